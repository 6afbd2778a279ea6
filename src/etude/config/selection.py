"""A validated component section that has not been built: which component, with which arguments."""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from etude.config.messages import show
from etude.config.registry import Component, Section, lookup, names
from etude.config.signature import SectionModel, schema_of, spellings
from etude.core.errors import ConfigError
from etude.core.spelling import a, listed


@dataclass(frozen=True, slots=True)
class Selection:
    """A component and its validated arguments."""

    component: Component
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments given in the section, under canonical names; a nested section is a `Selection` itself."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults from the signature."""


def select(kind: str, value: Any, provided: Collection[str] = ()) -> Selection:
    """Validate a section against the signature of the component it names; raise pydantic's ValidationError.

    A bare name means the component with its defaults.
    """
    component = named_component(kind, value)
    provided = {*provided, *component.provided}
    given = {} if isinstance(value, str) else {key: item for key, item in value.items() if key != "name"}
    model = component_model(component, provided)
    validated = model.model_validate(given, context={"provided": frozenset(provided)})
    values = field_values(validated)
    extra = validated.model_extra or {}
    canonical = {spellings(model, name)[0] for name in validated.model_fields_set if name not in extra}
    return Selection(
        component,
        {key: item for key, item in values.items() if key in canonical} | extra,
        {key: item for key, item in values.items() if key not in canonical and key not in provided},
    )


def named_component(kind: str, value: Any) -> Component:
    """Return the component that a section names, or raise pydantic's ValidationError at `name`."""
    known = f"(there are: {listed(names(kind))})"
    if not isinstance(value, (str, Mapping)):
        raise _error(kind, (), value, f"expected the name of {a(kind)}, or a mapping with 'name:' {known}")
    name = value if isinstance(value, str) else value.get("name")
    if name is None:
        raise _error(kind, ("name",), value, f"missing; name {a(kind)} {known}")
    if not isinstance(name, str):
        raise _error(kind, ("name",), name, f"expected the name of {a(kind)}, got {show(name)} {known}")
    try:
        return lookup(kind, name)
    except ConfigError as error:
        raise _error(kind, ("name",), name, str(error)) from None


def _error(kind: str, loc: tuple[str, ...], value: Any, problem: str) -> ValidationError:
    # Braces in the text would be read as placeholders, so it is passed as a value.
    custom = PydanticCustomError("component", "{problem}", {"problem": problem})
    return ValidationError.from_exception_data(kind, [InitErrorDetails(type=custom, loc=loc, input=value)])


def component_model(component: Component, provided: Collection[str] = ()) -> type[SectionModel]:
    """Return the schema of the component's arguments."""
    return schema_of(
        component.factory,
        provided={*provided, *component.provided},
        aliases=component.aliases,
        name=f"{component.kind}.{component.name}",
    )


def section_core_schema(section: Section) -> CoreSchema:
    """Return the schema of an argument marked as a `Section`: a mapping with `name:`, a bare name, or an object."""

    def validate(value: Any, info: core_schema.ValidationInfo) -> Any:
        if not isinstance(value, (str, bytes, int, float, list, tuple, Mapping, type(None))):
            return value  # an object made in Python: only the component that takes it can check it
        return select(section.kind, value, section.provided | frozenset((info.context or {}).get("provided", ())))

    return core_schema.with_info_plain_validator_function(validate)


def field_values(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a validated section under their canonical names."""
    return {spellings(type(model), name)[0]: getattr(model, name) for name in type(model).model_fields}


def selections_in(value: Any, path: str = "") -> dict[str, Selection]:
    """Return every component named in validated sections, by dotted path; nested ones come after their parent."""
    found = {path: value} if isinstance(value, Selection) else {}
    for key, item in _items(value):
        found |= selections_in(item, f"{path}.{key}" if path else str(key))
    return found


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Selection):
        return value.arguments.items()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, BaseModel):
        return field_values(value).items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def plain(value: Any) -> Any:
    """Return validated values in the form of a config file: mappings, lists, strings, numbers and null.

    Raises TypeError for objects that no file can hold; in sections such arguments are omitted.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, Selection):
        return {"name": value.component.name, **_plain_items(value.arguments | value.defaults)}
    if isinstance(value, BaseModel):
        return _plain_items(field_values(value) | (value.model_extra or {}))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_items({item.name: getattr(value, item.name) for item in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a config file cannot hold a {type(value).__name__}")


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in values.items():
        try:
            result[key] = plain(value)
        except TypeError:
            continue
    return result
