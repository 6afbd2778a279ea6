"""Callbacks that could not act are refused at the start, with the reason."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from etude.callbacks import EarlyStopping, FindNonfinite, LRSchedule, ModelCheckpoint, TextSamples
from etude.core import ConfigError, Task
from etude.engine.callback import Callback, implements
from etude.multitask.curriculum.callback import CurriculumCallback
from etude.multitask.gradient_monitor import TaskGradientMonitor
from etude.multitask.task import MultiTask


def check_callbacks(callbacks: Iterable[Callback], task: Task, model: nn.Module | None) -> None:
    """Raise ConfigError for callbacks that need several tasks, or the layers of a model, where there are none.

    `model` is None if training is by functions that belong to no module.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, TaskGradientMonitor) and not isinstance(task, MultiTask):
            raise ConfigError(
                f"{name} compares the gradients of several tasks, and {type(task).__name__} is one; "
                f"give task=MultiTask({{...}}), or leave it out"
            )
        switched: object = callback.task if isinstance(callback, CurriculumCallback) else task
        if switched is not task:
            raise ConfigError(
                f"{name} switches the tasks of another task than the one that is trained; give it that one"
            )
        needs_model = isinstance(callback, (FindNonfinite, ModelCheckpoint, TextSamples))
        if model is None and (needs_model or implements(callback, "on_gradients")):
            raise ConfigError(f"{name} needs the layers: pass a module as model_forward, or its method")


def check_validation(callbacks: Iterable[Callback], validation: Any, remedy: str) -> None:
    """Raise ConfigError for callbacks that wait for a validation number where there is no validation."""
    if validation is not None:
        return
    for callback in callbacks:
        if not isinstance(callback, (EarlyStopping, ModelCheckpoint, LRSchedule)) or callback.monitored is None:
            continue
        if (name := callback.monitored.name).startswith("val_"):
            raise ConfigError(
                f"{type(callback).__name__} monitors '{name}', but there is no validation here: give {remedy}, give "
                f"the callback to the ValidationLoop, or monitor a training number such as 'loss'"
            )


def check_rates(callbacks: Iterable[Callback]) -> None:
    """Raise ConfigError for a torch scheduler where a schedule of the run sets the rate of every step."""
    if any(isinstance(callback, LRSchedule) for callback in callbacks):
        raise ConfigError(
            "both LRSchedule and a schedule set the learning rate, and the latter wins; leave one of them out "
            "(training.warmup_steps, use_scheduler and scheduler_type make a schedule)"
        )
