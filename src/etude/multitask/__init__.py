"""Several tasks that share a model: tasks, heads, weightings, a curriculum and their sections in config files."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.multitask.curriculum.callback import CurriculumCallback as CurriculumCallback
    from etude.multitask.functional import (
        TaskLosses as TaskLosses,
        default_weights as default_weights,
        multi_task_loss as multi_task_loss,
        multi_task_terms as multi_task_terms,
    )
    from etude.multitask.gradient_monitor import (
        TaskGradientMonitor as TaskGradientMonitor,
        TaskGradientReport as TaskGradientReport,
    )
    from etude.multitask.gradients import TaskGradients as TaskGradients, TaskGradientWatcher as TaskGradientWatcher
    from etude.multitask.heads import (
        BinaryHead as BinaryHead,
        LanguageModelHead as LanguageModelHead,
        LinearHead as LinearHead,
        SequenceClassifier as SequenceClassifier,
        TokenClassifier as TokenClassifier,
    )
    from etude.multitask.model import MultiTaskModel as MultiTaskModel
    from etude.multitask.spec import TaskSpec as TaskSpec
    from etude.multitask.task import MultiTask as MultiTask
    from etude.multitask.weighting import Weighting as Weighting


__getattr__ = load_late(__name__, __file__)
