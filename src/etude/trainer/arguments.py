"""What users give a `Trainer`: names and mappings become parts, and what cannot be used is refused in one line."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etude.core import ConfigError, DataError, Task
from etude.core.spelling import did_you_mean
from etude.core.whole import as_whole
from etude.engine.callback import Callback
from etude.losses import LossStrategy, SupervisedTask, as_strategy
from etude.trainer.config import TrainerConfig

Section = str | Mapping[str, Any]
"""A registered component as a config file says it: its name, or a mapping with `name` and arguments."""


def check_model(model: Any) -> nn.Module:
    """Return the model; raise ConfigError if it is no module."""
    if isinstance(model, nn.Module):
        return model
    _refuse_class("model", model)
    raise ConfigError(f"model must be a torch.nn.Module, found {_kind(model)}")


def check_names(name: Any, meta: Any) -> None:
    """Raise ConfigError unless `name` is text and `meta` a mapping."""
    if not isinstance(name, str):
        raise ConfigError(f"name must be text, found {_kind(name)}")
    if meta is not None and not isinstance(meta, Mapping):
        raise ConfigError(f"meta must be a mapping of facts, found {_kind(meta)}")


def as_loss(loss: Any) -> Any:
    """Return a loss; one that is named is made."""
    if loss is None or isinstance(loss, LossStrategy):
        return loss
    if isinstance(loss, (str, Mapping)):
        return _build("loss", loss, "loss")
    _refuse_class("loss", loss)
    if not callable(loss):
        raise ConfigError(
            f"loss must be a torch loss, a function of (predictions, labels) or a name, not {_kind(loss)}"
        )
    return loss


def check_task(task: Any) -> None:
    """Raise ConfigError if a task cannot be called."""
    if task is not None:
        _refuse_class("task", task)
        if not callable(task):
            raise ConfigError(f"task must be callable as task(model, batch, metrics=…), found {_kind(task)}")


def make_task(
    of: type, loss: Any, task: Any, config: TrainerConfig, modalities: Mapping[str, Any], sources: Sequence[Any]
) -> Task:
    """Return the task of a trainer: the one given, that of a loss, or that of tokens of several modalities.

    Modalities are the business of their room, which is looked up only where it is needed. Raises ConfigError if what
    is given contradicts, TypeError for a keyword argument that the class `of` does not have.
    """
    if modalities or config.meaningful_loss is not None:
        try:
            room = import_module("etude.multimodal.training")
        except ModuleNotFoundError as error:
            name = next(iter(modalities), "config.meaningful_loss")
            near = did_you_mean(name, inspect.signature(of).parameters)
            raise TypeError(f"{of.__name__}() has no argument '{name}'{near}") from error
        made: Task = room.make_task(loss, task, config.meaningful_loss, modalities, of, sources)
        return made
    return plain_task(loss, task)


def plain_task(loss: Any, task: Any) -> Task:
    """Return the task that is given, or that of a loss."""
    check_task(task)
    if loss is not None and task is not None:
        raise ConfigError("loss= and task= both say what is learned; keep one of them")
    return task if task is not None else SupervisedTask(as_strategy(as_loss(loss)))


def as_callbacks(callbacks: Any) -> list[Callback]:
    """Return a list of callbacks from a list or a single one; those that are named are made.

    >>> [type(one).__name__ for one in as_callbacks({"name": "early_stopping", "patience": 2})]
    ['EarlyStopping']
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, (Callback, str, Mapping)) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    return [_as_callback(one, place) for place, one in enumerate(callbacks)]


def _as_callback(callback: Any, place: int) -> Callback:
    if isinstance(callback, (str, Mapping)):
        callback = _build("callback", callback, f"callbacks.{place}")
    _refuse_class("callbacks", callback)
    if not isinstance(callback, Callback):
        raise ConfigError(f"callbacks must be of class etude.Callback or names of such, found {_kind(callback)}")
    return callback


def optimizer_factory(optimizer: Any, settings: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function of the parameters from one, from a class of optimizers, or from a name.

    A class and a name get `settings`, the learning rate and weight decay of the config, where they have none. Raises
    ConfigError for anything else.
    """
    if isinstance(optimizer, (str, Mapping)):
        section = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
        own = {"lr"} if "learning_rate" in section else set(section)
        section = {**{key: value for key, value in settings.items() if key not in own}, **section}
        return lambda params: _build("optimizer", section, "optimizer", params=params)
    is_class = isinstance(optimizer, type)
    if not callable(optimizer) or (is_class and not issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer must be an optimizer, a function of the parameters that makes one, or a name such as 'adamw', "
            f"found {_kind(optimizer)}"
        )

    def make(params: Any) -> torch.optim.Optimizer:
        try:
            made = optimizer(params, **(settings if is_class else {}))
        except TypeError as error:
            raise ConfigError(f"optimizer cannot be made from the parameters: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer, a function, must return a torch optimizer, and returned {_kind(made)}")
        return made

    return make


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError for what is no optimizer, and for one whose step computes the loss again."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        _refuse_class("optimizer", optimizer)
        raise ConfigError(f"optimizer must be a torch optimizer, found {_kind(optimizer)}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} computes the loss several times in a step, by a closure, which a "
            f"run that accumulates and skips updates cannot do; use another one, such as 'adamw'"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler that is neither a function of the step nor one of torch."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    _refuse_class("scheduler", scheduler.func if isinstance(scheduler, functools.partial) else scheduler)
    if callable(getattr(scheduler, "step_update", None)):
        raise ConfigError(
            f"scheduler {type(scheduler).__name__} has the interface of timm, which is driven by hand; give a function "
            f"of the step such as etude.optim.warmup_cosine(total_steps, warmup_steps), or a torch scheduler"
        )
    if not callable(scheduler):
        raise ConfigError(
            f"scheduler must be a function of the step, a torch scheduler or a name such as 'cosine', "
            f"found {_kind(scheduler)}"
        )


def check_functions(**functions: Any) -> None:
    """Raise ConfigError for a function that cannot be called."""
    for name, function in functions.items():
        _refuse_class(name, function)
        if not callable(function):
            raise ConfigError(f"{name} must be a function, found {_kind(function)}")


def as_epochs(num_epochs: Any) -> int:
    """Return a number of epochs; raise ConfigError unless it is a whole number of at least 1."""
    return as_whole("num_epochs", num_epochs, least=1)


def as_tensors(source: Any, model: nn.Module) -> Any:
    """Return NumPy arrays, alone or in a tuple, as tensors; anything else as it is.

    Floating numbers get the format of the model: that of NumPy is float64 unless asked otherwise.
    """
    if isinstance(source, np.ndarray):
        return _as_tensor(source, model)
    if isinstance(source, tuple) and source and all(isinstance(one, (np.ndarray, Tensor)) for one in source):
        return tuple(_as_tensor(one, model) if isinstance(one, np.ndarray) else one for one in source)
    return source


def _as_tensor(array: np.ndarray[Any, Any], model: nn.Module) -> Tensor:
    try:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise DataError(f"a NumPy array of {array.dtype} cannot become a tensor; give numbers") from error
    if tensor.is_floating_point():
        formats = (param.dtype for param in model.parameters() if param.is_floating_point())
        return tensor.to(next(formats, torch.get_default_dtype()))
    return tensor if tensor.dtype in (torch.bool, torch.uint8) else tensor.long()


def _build(kind: str, section: Section, path: str, **provided: Any) -> Any:
    from etude.config import build_component

    return build_component(kind, section, path=path, provided=provided)


def _refuse_class(argument: str, value: Any) -> None:
    if isinstance(value, type):
        raise ConfigError(f"{argument} is the class {value.__name__}; give an object of it: {value.__name__}(…)")


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}".replace("\n", " ")
