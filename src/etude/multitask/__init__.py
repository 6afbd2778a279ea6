"""Several tasks that share a model: tasks, heads, weightings, a curriculum and their sections in config files.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "curriculum.callback": ("CurriculumCallback",),
    "functional": (
        "TaskLosses",
        "default_weights",
        "multi_task_loss",
        "multi_task_terms",
    ),
    "gradient_monitor": (
        "TaskGradientMonitor",
        "TaskGradientReport",
    ),
    "gradients": ("TaskGradientWatcher", "TaskGradients"),
    "heads": (
        "BinaryHead",
        "LanguageModelHead",
        "LinearHead",
        "SequenceClassifier",
        "TokenClassifier",
    ),
    "model": ("MultiTaskModel",),
    "spec": ("TaskSpec",),
    "task": ("MultiTask",),
    "weighting": ("Weighting",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
