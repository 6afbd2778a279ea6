"""How a model was made, as plain data: its class and the arguments of its constructor, so that it can be built again.

The arguments are known if the class takes none, if the model keeps each under its own name (`self.width = width`) or
all of them in a mapping `init_arguments` or `hparams`, or if it is a Hugging Face model, which has a config. Values
are plain data, dataclasses of plain data, and Hugging Face configs. Nothing is recorded that would be guessed.
"""

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from torch import nn

from etude.core.errors import ConfigError
from etude.core.model import unwrap

CLASS, ARGUMENTS, FROM_DICT, TUPLE = "class", "arguments", "from_dict", "tuple"


class NotPlainError(TypeError):
    """A value that cannot be recorded."""


def model_record(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model and, if they are known, its arguments.

    >>> class Net(nn.Module):
    ...     def __init__(self, width=8):
    ...         super().__init__()
    ...         self.width = width
    >>> model_record(Net(3))["arguments"]
    {'width': 3}
    """
    model = unwrap(model)
    record: dict[str, Any] = {CLASS: name_of(type(model))}
    try:
        return {**record, ARGUMENTS: {key: _plain(value) for key, value in arguments_of(model).items()}}
    except NotPlainError:
        return record


class RemembersArguments:
    """Base class of objects that know the arguments they were made with."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments; a copy gets them with the attributes."""
        made = super().__new__(cls)
        made._made_with = args, kwargs
        return made


def arguments_of(model: Any) -> Mapping[str, Any]:
    """Return the arguments that a model, a data set or another object was made with.

    Raises NotPlainError if they are not known.
    """
    kind, config = type(model), getattr(model, "config", None)
    if isinstance(model, RemembersArguments):
        args, kwargs = model._made_with
        if not _has_names(kind):
            raise NotPlainError
        return dict(inspect.signature(kind).bind(*args, **kwargs).arguments)
    if isinstance(getattr(kind, "config_class", None), type) and _has_dict(config):
        return {"config": config}
    if isinstance(found := getattr(model, "init_arguments", None), Mapping):
        return found
    if kind.__init__ is nn.Module.__init__ or _is_bare(kind):
        return {}
    if kind.__module__ == "torch.nn.modules.loss":
        return _of_torch_loss(model)
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except ValueError:  # a class written in C
        raise NotPlainError from None
    named = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    if isinstance(found := getattr(model, "hparams", None), Mapping) and named <= {*found}:
        return found if len(named) < len(parameters) else {name: found[name] for name in named}
    kept = getattr(model, "__dict__", {})
    if any(
        one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) or one.name not in kept for one in parameters
    ):
        raise NotPlainError
    return {one.name: kept[one.name] for one in parameters}


def _is_bare(kind: Any) -> bool:
    """Whether a class takes no arguments: a tensor, for example, takes its own in `__new__`."""
    is_bare: bool = kind.__init__ is object.__init__ and kind.__new__ is object.__new__
    return is_bare


def _has_names(kind: type) -> bool:
    """Whether all parameters of a class can be passed by name."""
    kinds = {one.kind for one in inspect.signature(kind).parameters.values()}
    return kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def _of_torch_loss(loss: nn.Module) -> dict[str, Any]:
    """Return the arguments of a loss of torch, which keeps all but those that are out of use."""
    names = [name for name in inspect.signature(type(loss)).parameters if name not in ("size_average", "reduce")]
    if any(not hasattr(loss, name) for name in names):
        raise NotPlainError
    return {name: getattr(loss, name) for name in names}


def _has_dict(value: Any) -> bool:
    return callable(getattr(value, "to_dict", None)) and callable(getattr(type(value), "from_dict", None))


def _plain(value: Any) -> Any:
    """Return a value as JSON data; raise NotPlainError if it has no such form."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    if type(value) is tuple:
        return {TUPLE: [_plain(one) for one in value]}
    if type(value) is dict and all(type(key) is str for key in value) and not {CLASS, TUPLE} & {*value}:
        return {key: _plain(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [one.name for one in dataclasses.fields(value) if one.init]
        return {CLASS: name_of(type(value)), ARGUMENTS: {name: _plain(getattr(value, name)) for name in fields}}
    if _has_dict(value):
        with suppress(TypeError, ValueError):
            return {CLASS: name_of(type(value)), FROM_DICT: json.loads(json.dumps(value.to_dict()))}
    raise NotPlainError


def name_of(kind: Any) -> str:
    """Return the `module:qualname` of a class or function."""
    return f"{kind.__module__}:{kind.__qualname__}"


def rebuild_model(record: Any, *, import_class: bool = False) -> nn.Module:
    """Build a model from its record, with new weights.

    The class must be in a module that is already imported, or in etude: a record is data, and data does not choose
    which code is imported. `import_class` allows that. Raises ConfigError if the model cannot be built.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get(CLASS), str):
        raise ConfigError("there is no record of the model's class")
    name = record[CLASS]
    if not isinstance(record.get(ARGUMENTS), Mapping):
        raise ConfigError(
            f"the arguments of {name} are not recorded: keep each under its own name (self.width = width) "
            "in __init__ before the next training"
        )
    kind = _class(name, import_class)
    if not issubclass(kind, nn.Module):
        raise ConfigError(f"{name} is not a torch.nn.Module")
    try:
        model: nn.Module = kind(**{key: _restored(value, import_class) for key, value in record[ARGUMENTS].items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be built with its recorded arguments ({error})") from error
    return model


def _restored(value: Any, import_class: bool) -> Any:
    if isinstance(value, list):
        return [_restored(one, import_class) for one in value]
    if not isinstance(value, dict):
        return value
    if TUPLE in value:
        return tuple(_restored(value[TUPLE], import_class))
    if CLASS not in value:
        return {key: _restored(one, import_class) for key, one in value.items()}
    kind: Any = _class(value[CLASS], import_class)
    if FROM_DICT in value and callable(getattr(kind, "from_dict", None)):
        return kind.from_dict(value[FROM_DICT])
    if "__dataclass_fields__" not in vars(kind):
        raise ConfigError(f"{value[CLASS]} is not a dataclass")
    return kind(**_restored(value[ARGUMENTS], import_class))


def _class(name: str, import_class: bool) -> type:
    found = located(name, import_class)
    if not isinstance(found, type):
        raise ConfigError(f"{name} is not a class")
    return found


def located(name: str, import_class: bool) -> Any:
    """Return a class, function or object by `module:qualname`.

    Its module must be imported already or in etude, unless `import_class` allows to import it. Raises ConfigError.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    if found is None and not import_class and module.partition(".")[0] != "etude":
        raise ConfigError(
            f"{name} is in a module that is not imported; import {module} first, or set import_class=True"
        )
    try:
        found = import_module(module) if found is None else found
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be imported ({error})") from error
    return found
