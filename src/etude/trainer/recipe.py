"""What a `Trainer` was given, as plain data: model, loaders, optimizer and so on, so that a command can make it again.

A part is recorded if it is plain data, a class, function or object with a name in an importable module, an object whose
class is such a name and whose arguments are known, or a torch DataLoader or optimizer of such parts. Everything else is
recorded as unknown, with the reason: nothing is guessed.
"""

import inspect
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import PurePath
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate, default_convert

from etude.config.selection import plain
from etude.core import ConfigError
from etude.core.model import unwrap
from etude.core.model_record import NotPlainError, arguments_of, located, name_of
from etude.core.spelling import shorten
from etude.optim.kernels import KernelOptimizer
from etude.optim.several import Optimizers
from etude.trainer.config import TrainerConfig

UNKNOWN, NAMED, CLASS, ARGUMENTS, TUPLE, OPTIMIZER = "unknown", "named", "class", "arguments", "tuple", "optimizer"
_TAGS = frozenset({UNKNOWN, NAMED, CLASS, ARGUMENTS, TUPLE, OPTIMIZER})
SETTING = "config."
"""Before the names of settings that are objects, which the section `training` cannot hold."""


def recipe_of(model: nn.Module, config: TrainerConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of a model, of settings that are objects, and of other arguments that were given."""
    objects = {f"{SETTING}{name}": value for name, value in config if not _is_plain(value)}
    parts = {**given, **objects}
    used = {name: part for name, part in parts.items() if part is not None and not _is_empty(part)}
    recorder = _Recorder(model)
    return {"model": recorder.model(), **{name: recorder.part(part) for name, part in used.items()}}


def rebuild(recipe: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the parts of these names that a recipe has.

    This imports and calls what the recipe names: it may be any code, so it must be trusted. Raises ConfigError if a
    part cannot be made.
    """
    wanted = {name: recipe[name] for name in names if name in recipe}
    parts: dict[str, Any] = {}
    for name, one in sorted(wanted.items(), key=lambda item: item[0] != "model"):
        parts[name] = _restored(one, parts.get("model"))
    return parts


def check_known(recipe: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ConfigError if a recipe does not know one of these parts."""
    wanted = {name: recipe[name] for name in names if name in recipe}
    unknown = [f"{name} ({shorten(reason, 120)})" for name, one in wanted.items() if (reason := _reason(one))]
    if unknown:
        raise ConfigError(f"not recorded: {', '.join(unknown)}")


def modules_in(record: Any) -> list[str]:
    """Return the modules that a record names.

    >>> modules_in({"model": {"class": "mine:Net", "arguments": {"kind": {"named": "yours.parts:Block"}}}})
    ['mine', 'yours.parts']
    """
    if isinstance(record, list):
        return list(dict.fromkeys(name for one in record for name in modules_in(one)))
    if not isinstance(record, Mapping):
        return []
    own = [record[tag].partition(":")[0] for tag in (CLASS, NAMED) if isinstance(record.get(tag), str)]
    return list(dict.fromkeys([*own, *modules_in(list(record.values()))]))


# ------------------------------------------------------------------------------------------------ recording


class _Recorder:
    """Records the parts of a run with this model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def part(self, value: Any) -> Any:
        """Return the record of an argument, or why there is none."""
        try:
            return self.record(value)
        except NotPlainError as error:
            return {UNKNOWN: str(error) or f"a {type(value).__name__}"}

    def model(self) -> Any:
        """Return the record of the model: its class, or else its name in a module, where it may have other weights."""
        try:
            return self._made(unwrap(self._model))
        except NotPlainError as error:
            name = self._named.get(id(unwrap(self._model)))
            return {NAMED: name} if name is not None else {UNKNOWN: str(error)}

    def record(self, value: Any) -> Any:
        """Return a value as plain data; raise NotPlainError if it has no such form."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (list, tuple):
            items = [self.record(one) for one in value]
            return items if type(value) is list else {TUPLE: items}
        if type(value) is dict and all(type(key) is str for key in value) and not _TAGS & {*value}:
            return {key: self.record(one) for key, one in value.items()}
        if isinstance(value, PurePath):
            return str(value)
        is_code = isinstance(value, type) or inspect.isfunction(value)
        name = name_of(value) if is_code else self._named.get(id(value))
        if name is not None and (not is_code or _is_found(name, value)):
            return {NAMED: name}
        return self._made(value)

    def _made(self, value: Any) -> dict[str, Any]:
        """Return the class and the arguments of an object."""
        if isinstance(value, Optimizer) and not isinstance(value, Optimizers):
            return {OPTIMIZER: _importable(type(value)), ARGUMENTS: self._all(_of_optimizer(value, self._model))}
        arguments = _of_loader(value) if type(value) is DataLoader else _own_arguments(value)
        try:
            return {CLASS: _importable(type(value)), ARGUMENTS: self._all(arguments)}
        except NotPlainError as error:
            raise NotPlainError(f"{type(value).__name__}: {error}") from None

    def _all(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for key, value in arguments.items():
            try:
                found[key] = self.record(value)
            except NotPlainError as error:
                raise NotPlainError(f"{key} is {error}") from None
        return found

    @cached_property
    def _named(self) -> dict[int, str]:
        """`module:name` of the objects in modules of the user: not of the script, nor of what was installed."""
        installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        found, others = dict[int, str](), {"etude", "__main__", "__mp_main__"}
        for module, content in list(sys.modules.items()):
            if (top := module.partition(".")[0]) in others or content is sys.modules.get("__main__"):
                continue
            names = getattr(content, "__dict__", {})
            file = names.get("__file__")
            if isinstance(file, str) and not file.startswith(installed):
                found |= {id(value): f"{module}:{key}" for key, value in names.items() if key.isidentifier()}
            elif module == top and (file or "__path__" not in names):  # its modules are installed or built in too
                others.add(top)
        return found


def _own_arguments(value: Any) -> Mapping[str, Any]:
    if inspect.isroutine(value) or isinstance(value, type):
        raise NotPlainError(f"{getattr(value, '__qualname__', 'a function')}, which no module has under that name")
    _importable(type(value))  # its own reason comes first
    try:
        return arguments_of(value)
    except NotPlainError:
        raise NotPlainError(f"a {type(value).__name__} whose arguments are not known") from None


def _importable(kind: type) -> str:
    name = name_of(kind)
    if not _is_found(name, kind):
        home = "the script itself" if kind.__module__ == "__main__" else "a function"
        raise NotPlainError(f"a {kind.__qualname__}, which is defined in {home} and cannot be imported")
    return name


def _is_found(name: str, value: Any) -> bool:
    if name.startswith("__main__:"):
        return False
    try:
        return located(name, False) is value
    except ConfigError:
        return False


def _of_loader(loader: Any) -> dict[str, Any]:
    """Return the arguments of a torch DataLoader; raise NotPlainError for those that it does not keep."""
    sampler, batches = loader.sampler, loader.batch_sampler
    usual = type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is loader.dataset
    drawn = usual and not (isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples))
    if not drawn or batches is None or loader.generator is not None or type(batches).__name__ != "BatchSampler":
        raise NotPlainError("a DataLoader with a sampler or generator of its own")
    found = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "shuffle": isinstance(sampler, RandomSampler),
        **{name: getattr(loader, name) for name in ("num_workers", "drop_last", "pin_memory", "persistent_workers")},
    }
    if loader.collate_fn not in (default_collate, default_convert):
        found["collate_fn"] = loader.collate_fn
    if loader.worker_init_fn is not None:
        found["worker_init_fn"] = loader.worker_init_fn
    return found


def _of_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the settings of an optimizer of one group with all parameters."""
    groups = optimizer.param_groups
    if len(groups) != 1 or [*map(id, groups[0]["params"])] != [*map(id, model.parameters())]:
        raise NotPlainError(f"a {type(optimizer).__name__} with groups or parameters of its own")
    taken = inspect.signature(type(optimizer)).parameters
    kernel = {"kernel": optimizer._kernel} if isinstance(optimizer, KernelOptimizer) else {}
    return {key: value for key, value in (optimizer.defaults | kernel).items() if key in taken}


def _is_plain(value: Any) -> bool:
    try:
        plain(value)
    except TypeError:
        return False
    return True


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and not value


# ------------------------------------------------------------------------------------------------ rebuilding


def _restored(value: Any, model: Any) -> Any:
    if isinstance(value, list):
        return [_restored(one, model) for one in value]
    if not isinstance(value, Mapping):
        return value
    if NAMED in value:
        return located(str(value[NAMED]), True)
    if TUPLE in value:
        return tuple(_restored(list(value[TUPLE]), model))
    arguments = value.get(ARGUMENTS) if CLASS in value or OPTIMIZER in value else value
    if not isinstance(arguments, Mapping):
        raise ConfigError("the record of a part is damaged")
    found = {str(key): _restored(one, model) for key, one in arguments.items()}
    if arguments is value:
        return found
    name = str(value.get(CLASS) or value[OPTIMIZER])
    kind = located(name, True)
    if not isinstance(kind, type):
        raise ConfigError(f"{name} is not a class")
    first = (model.parameters(),) if OPTIMIZER in value else ()
    try:
        return kind(*first, **found)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{name} cannot be made with its recorded arguments ({error})") from error


def _reason(record: Any) -> str:
    """Return why a part, or something in it, is not known; empty if it is."""
    return str(record[UNKNOWN]) if isinstance(record, Mapping) and UNKNOWN in record else ""
