"""The keys and aliases allowed at a location in a config: walks type hints alongside the data."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError

from etude.config.document import Document, join
from etude.config.registry import Component, Section, lookup, names
from etude.config.selection import component_model, named_component
from etude.config.signature import SectionModel, spellings
from etude.core.errors import ConfigError


@dataclass(slots=True)
class Shape:
    """The keys of a section."""

    names: list[str] = field(default_factory=list)
    """The canonical keys, in the order of the signature."""
    spellings: dict[str, str] = field(default_factory=dict)
    """Every accepted key, with its canonical name."""
    hints: dict[str, list[Any]] = field(default_factory=dict)
    """The type of each value, by canonical name."""
    supplied: frozenset[str] = frozenset()
    """Arguments that the builder supplies and that a file cannot give."""
    kind: str = ""
    """The kind of component that the section names; empty for other sections."""


def shape_at(hint: Any, loc: Sequence[Any], data: Any, provided: frozenset[str] = frozenset()) -> Shape | None:
    """Return the keys of the section at `loc`, or None if there is no section."""
    hints, value = list(_members(hint)), data
    for part in loc:
        hints = [below for each in hints for below in _step(each, part, value, provided)]
        value = _child(value, part)
    shapes = (_shape(each, value, provided) for each in hints)
    return next((shape for shape in shapes if shape is not None), None)


def sections_of(hint: Any, data: Any, provided: frozenset[str] = frozenset()) -> dict[str, Shape]:
    """Return the shapes of the sections directly below, existing ones first.

    For a section without a known component, it is the shape of all components of its kind.
    """
    root = shape_at(hint, (), data, provided)
    found: dict[str, Shape] = {}
    for name, hints in sorted((root.hints if root else {}).items(), key=lambda item: _child(data, item[0]) is None):
        value = _child(data, name)
        for each in hints:
            shape = _shape(each, value, provided)
            if shape is None and isinstance(each, Section):
                shape = _shape_of_kind(each, provided)
            if shape is not None:
                found.setdefault(name, shape)
    return found


def marks_in(hint: Any, seen: frozenset[Any] = frozenset()) -> Iterator[Section]:
    """Yield the marks of all components that a value of this type may contain, at any depth."""
    for each in _members(hint):
        if isinstance(each, Section):
            yield each
        elif each not in seen:  # a model may contain itself
            shape = _shape(each, None, frozenset())
            inside = (
                typing.get_args(each) if shape is None else [below for some in shape.hints.values() for below in some]
            )
            for below in inside:
                yield from marks_in(below, seen | {each})


def component_shape(component: Component, provided: frozenset[str] = frozenset()) -> Shape:
    """Return the keys of a section that names this component."""
    shape = _shape_of_model(component_model(component, provided))
    shape.names.insert(0, "name")
    shape.spellings["name"] = "name"
    shape.kind = component.kind
    return shape


def _child(value: Any, part: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


def _members(hint: Any, metadata: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the alternatives of a type: section marks, models, generic types; unions are expanded."""
    section = next((extra for extra in metadata if isinstance(extra, Section)), None)
    origin = typing.get_origin(hint)
    if section is not None:
        yield section
    elif origin is Annotated:
        yield from _members(hint.__origin__, hint.__metadata__)
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _step(hint: Any, part: Any, value: Any, provided: frozenset[str]) -> list[Any]:
    """Return the type at key or index `part` of a value of this type."""
    shape = _shape(hint, value, provided)
    if shape is not None:
        return shape.hints.get(shape.spellings.get(part, part), [])
    arguments = [argument for argument in typing.get_args(hint) if argument is not Ellipsis]
    if isinstance(value, Mapping):
        arguments = arguments[-1:]
    elif isinstance(part, int) and typing.get_origin(hint) is tuple and len(arguments) > part:
        arguments = arguments[part : part + 1]
    return [member for argument in arguments for member in _members(argument)]


def _shape(hint: Any, value: Any, provided: frozenset[str]) -> Shape | None:
    if isinstance(hint, Section):
        try:
            component = named_component(hint.kind, value)
        except ValidationError:
            return None
        return component_shape(component, provided | hint.provided)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return _shape_of_model(hint)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        hints = {
            name: list(_members(each))
            for name, each in typing.get_type_hints(hint, include_extras=True).items()
            if typing.get_origin(each) is not typing.ClassVar
        }
        return Shape(list(hints), {name: name for name in hints}, hints)
    return None


def _shape_of_model(model: type[BaseModel]) -> Shape:
    shape = Shape()
    for name, info in model.model_fields.items():
        keys = spellings(model, name)
        shape.names.append(keys[0])
        shape.spellings.update(dict.fromkeys(keys, keys[0]))
        shape.hints[keys[0]] = list(_members(info.annotation, info.metadata))
    if issubclass(model, SectionModel):
        shape.supplied = model.supplied_
    return shape


def _shape_of_kind(section: Section, provided: frozenset[str]) -> Shape:
    """Return the keys that any component of the kind accepts."""
    merged = Shape()
    for name in names(section.kind):
        shape = component_shape(lookup(section.kind, name), provided | section.provided)
        merged.names += [key for key in shape.names if key not in merged.names]
        merged.spellings = shape.spellings | merged.spellings
    return merged


def canonical_keys(
    data: Mapping[str, Any], aliases: Mapping[str, str], path: str = "", document: Document | None = None
) -> dict[str, Any]:
    """Return the section with canonical keys; messages still show the keys that were written.

    If two aliases come from different files, the later one overrides, as with any key. In the same file they raise
    ConfigError.

    >>> canonical_keys({"log_every": 50, "epochs": 3}, {"log_every": "log_interval"})
    {'log_interval': 50, 'epochs': 3}
    """
    origin = document or Document({})
    result: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in data.items():
        name, place = aliases.get(key, key), join(path, key)
        if name in written:
            later = origin.layer(place) - origin.layer(join(path, written[name]))
            if later == 0:
                raise ConfigError(
                    f"{origin.place(place)}: means the same as '{written[name]}', which is given too; keep one of them"
                )
            if later < 0:
                continue
        result[name], written[name] = value, key
    for name, key in written.items():
        if key != name:
            origin.renamed(join(path, key), join(path, name))
    return result


def canonical_sections(hint: Any, data: Any, path: str, document: Document | None, provided: frozenset[str]) -> Any:
    """Return a section and all sections inside it with canonical keys, according to the schema."""

    def rename(value: Any, loc: tuple[Any, ...], where: str) -> Any:
        if isinstance(value, list):
            return [rename(item, (*loc, i), join(where, i)) for i, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        shape = shape_at(hint, loc, data, provided) or Shape()
        named = canonical_keys(value, shape.spellings, where, document)
        return {key: rename(item, (*loc, key), join(where, key)) for key, item in named.items()}

    return rename(data, (), path)
