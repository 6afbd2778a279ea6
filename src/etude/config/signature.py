"""A signature is a schema: the base model of every section, and models made from a component's typed parameters."""

import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticUndefined

from etude.core.errors import ConfigError

_LEAVES: dict[Any, dict[str, Any]] = {"int": {}, "float": {"allow_inf_nan": False}, "bool": {}, "str": {}}
"""Schema types of single values, with the settings that a field may change."""
_NOT_SCHEMAS = ("default", "metadata", "expected", "serialization", "config", "cls", "function", "keys_schema")
"""Keys of a core schema that contain no values to make strict; mapping keys may be numbers written as strings."""


def _make_strict(node: Any, handler: GetCoreSchemaHandler, seen: set[str]) -> None:
    if isinstance(node, (list, tuple)):
        for item in node:
            _make_strict(item, handler, seen)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    for key, value in node.items():
        # Without a type this is a mapping from field names to schemas: no key is special.
        if not isinstance(kind, str) or key not in _NOT_SCHEMAS:
            _make_strict(value, handler, seen)
    if not isinstance(kind, str):  # a mapping of fields, one of which may be named "type"
        return
    if kind in _LEAVES:
        node |= {**_LEAVES[kind], **node, "strict": True}
    elif kind == "definition-ref" and node["schema_ref"] not in seen:
        seen.add(node["schema_ref"])
        _make_target_strict(node, handler, seen)


def _make_target_strict(node: Any, handler: GetCoreSchemaHandler, seen: set[str]) -> None:
    try:
        target = handler.resolve_ref_schema(node)
    except LookupError:  # a model that refers to itself is not complete yet
        return
    if target["type"] in ("dataclass", "typed-dict"):  # models are already strict through their base class
        _make_strict(target, handler, seen)


class SectionModel(BaseModel):
    """A section of a config file: derive fixed sections from it, with fields, types and defaults as in pydantic.

    A number must be written as `3`: `"3"`, `true` and (for an integer) `3.5` are mistakes. Numbers are finite, unless
    a field has `Field(allow_inf_nan=True)`. A list is accepted for a tuple or a set, and a string for a path, an enum
    or a literal, because YAML has no other way to write them.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    supplied_: ClassVar[frozenset[str]] = frozenset()
    """Arguments that the builder supplies and that cannot be written in a file."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make every number, string and boolean strict and numbers finite; leave containers lenient."""
        schema = handler(source)
        _make_strict(schema, handler, set())
        return schema


class OpenSectionModel(SectionModel):
    """A section that accepts any further keys: the schema of a signature with `**kwargs`."""

    model_config = ConfigDict(extra="allow")


def spellings(model: type[BaseModel], name: str) -> list[str]:
    """Return the keys that set a field, the canonical one first."""
    info: FieldInfo = model.model_fields[name]
    alias = info.validation_alias or info.alias
    if alias is None:
        return [name]
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    keys = [choice for choice in choices if isinstance(choice, str)]
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    if by_name and name not in keys:
        keys.insert(0, name)
    return sorted(keys, key=lambda key: key != name)


_LOOSE = ConfigDict(arbitrary_types_allowed=True)
Parameter = tuple[Any, Any]
"""Type hint and default of an argument; the default is `PydanticUndefined` if there is none."""


def schema_of(
    factory: Callable[..., Any],
    *,
    provided: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    name: str | None = None,
) -> type[SectionModel]:
    """Return the model of a config section for `factory`: one field per parameter.

    `provided` names parameters that the builder supplies (`params`, `total_steps`): a section may omit them, and may
    set those whose type can be written in YAML. `aliases` maps other spellings to parameters.

    >>> def sgd(params, lr: float, momentum: float = 0.0): ...
    >>> schema_of(sgd, provided=["params"]).model_validate({"lr": 1}).model_dump()
    {'lr': 1.0, 'momentum': 0.0}
    """
    make = _schema if isinstance(factory, Hashable) else _schema.__wrapped__
    return make(factory, frozenset(provided), tuple((aliases or {}).items()), name or _name_of(factory))


@functools.lru_cache(maxsize=1024)
def _schema(
    factory: Callable[..., Any], provided: frozenset[str], aliases: tuple[tuple[str, str], ...], name: str
) -> type[SectionModel]:
    parameters, is_open = parameters_of(factory)
    fields: dict[str, Parameter] = {}
    supplied = set()
    for parameter, (hint, default) in parameters.items():
        if parameter in provided:
            if not _is_expressible(hint):
                supplied.add(parameter)
                continue
            default = None if default is PydanticUndefined else default
        fields[parameter] = (hint, default)
    base = OpenSectionModel if is_open else SectionModel
    model = make_model(name, fields, dict(aliases), base, doc=_summary(factory))
    model.supplied_ = frozenset(supplied)
    return model


def make_model(
    name: str,
    fields: Mapping[str, Parameter],
    aliases: Mapping[str, str],
    base: type[SectionModel] = SectionModel,
    doc: str | None = None,
) -> type[SectionModel]:
    """Return a model with the given fields; hints that pydantic cannot handle count as `Any`.

    `aliases` may be shared by several components: those of arguments that this one lacks are ignored.
    """
    others: dict[str, list[str]] = {}
    for alias, argument in aliases.items():
        others.setdefault(argument, []).append(alias)

    def definitions(usable: Callable[[Any], bool]) -> dict[str, Any]:
        return {
            _field_name(argument): (
                hint if usable(hint) else Any,
                Field(default, validation_alias=AliasChoices(argument, *others.get(argument, ()))),
            )
            for argument, (hint, default) in fields.items()
        }

    make: Any = functools.partial(create_model, name, __base__=base, __doc__=doc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hints that are no types, which any value satisfies
        try:
            model: type[SectionModel] = make(**definitions(lambda _hint: True))
        except Exception:  # pydantic may raise anything for a third-party hint: find the hint, keep the others
            model = make(**definitions(_is_usable))
    return model


def parameters_of(factory: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    """Return hint and default of every keyword parameter, and whether there is a `**kwargs`.

    A parameter `name` is excluded: in a section that key names the component.
    """
    signature = inspect.signature(factory)
    names = getattr(_annotated(factory), "__globals__", {})
    found: dict[str, Parameter] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "name":
            continue
        required = parameter.default is parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY:
            if required:
                raise ConfigError(
                    f"{_name_of(factory)} takes '{parameter.name}' by position only, but a config gives arguments "
                    "by name; make it a keyword parameter"
                )
            continue
        hint = _resolved(parameter.annotation, names)
        if parameter.default is None:
            hint = _or_none(hint)
        found[parameter.name] = (hint, PydanticUndefined if required else parameter.default)
    return found, any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Return a hint with its strings evaluated; Any if it is missing or cannot be evaluated at run time."""
    if hint is inspect.Parameter.empty:
        return Any
    try:
        alone = type("alone", (), {"__annotations__": {"hint": hint}})
        return typing.get_type_hints(alone, names, include_extras=True)["hint"]
    except Exception:  # evaluating a hint may raise anything
        return Any


def _annotated(factory: Callable[..., Any]) -> Any:
    """Return the function whose annotations describe the call."""
    if isinstance(factory, functools.partial):
        return _annotated(factory.func)
    if inspect.isclass(factory):
        own = inspect.unwrap(factory.__init__)
        return own if inspect.isfunction(own) else inspect.unwrap(factory.__new__)
    if inspect.isroutine(factory):
        return inspect.unwrap(factory)
    return type(factory).__call__


def _or_none(hint: Any) -> Any:
    """Return the hint with None allowed, as a default of None implies."""
    try:
        return typing.Union[hint, None]  # noqa: UP007 - `|` is not defined for every hint
    except TypeError:
        return Any


def _field_name(argument: str) -> str:
    """Return a field name that does not shadow pydantic's attributes; the key is the argument's name in any case."""
    if argument.startswith("_") or hasattr(SectionModel, argument):
        return f"{argument.lstrip('_')}_argument"
    return argument


def _is_usable(hint: Any) -> bool:
    try:
        TypeAdapter(hint, config=_LOOSE)
    except Exception:
        return False
    return True


def _is_expressible(hint: Any) -> bool:
    """Return whether every value of this type can be written in YAML."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(_is_expressible(member) for member in typing.get_args(hint))
    try:
        return bool(TypeAdapter(hint, config=_LOOSE).json_schema())
    except (PydanticUserError, TypeError, ValueError, LookupError, AttributeError):
        return False


def _name_of(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", type(factory).__qualname__)


def _summary(factory: Callable[..., Any]) -> str | None:
    """Return the first line of the docstring, unless it is generated (dataclasses) or that of `partial`."""
    doc = inspect.cleandoc(factory.__doc__ or "")
    if not doc or isinstance(factory, functools.partial) or doc.startswith(f"{_name_of(factory)}("):
        return None
    return doc.splitlines()[0]
