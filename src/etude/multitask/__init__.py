"""Several tasks that share a model: tasks, heads, weightings, a curriculum and their sections in config files."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.multitask.curriculum.callback import CurriculumCallback
    from etude.multitask.functional import TaskLosses, default_weights, multi_task_loss, multi_task_terms
    from etude.multitask.gradient_monitor import TaskGradientMonitor, TaskGradientReport
    from etude.multitask.gradients import TaskGradients, TaskGradientWatcher
    from etude.multitask.heads import BinaryHead, LanguageModelHead, LinearHead, SequenceClassifier, TokenClassifier
    from etude.multitask.model import MultiTaskModel
    from etude.multitask.spec import TaskSpec
    from etude.multitask.task import MultiTask
    from etude.multitask.weighting import Weighting

__all__ = [
    "BinaryHead",
    "CurriculumCallback",
    "LanguageModelHead",
    "LinearHead",
    "MultiTask",
    "MultiTaskModel",
    "SequenceClassifier",
    "TaskGradientMonitor",
    "TaskGradientReport",
    "TaskGradientWatcher",
    "TaskGradients",
    "TaskLosses",
    "TaskSpec",
    "TokenClassifier",
    "Weighting",
    "default_weights",
    "multi_task_loss",
    "multi_task_terms",
]

__getattr__ = load_late(__name__, __file__)
