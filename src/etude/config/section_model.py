"""The base of every section's schema: no unknown keys, finite numbers, and no silent conversions between types."""

from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

_LEAVES: dict[Any, dict[str, Any]] = {"int": {}, "float": {"allow_inf_nan": False}, "bool": {}, "str": {}}
"""The types of single values, with the settings that a field may change."""
_NOT_SCHEMAS = ("default", "metadata", "expected", "serialization", "config", "cls", "function", "keys_schema")
"""Keys of a core schema that hold no values to make strict; keys of mappings may be numbers written as text."""


def _make_strict(node: Any, handler: GetCoreSchemaHandler, seen: set[str]) -> None:
    if isinstance(node, (list, tuple)):
        for item in node:
            _make_strict(item, handler, seen)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    for key, value in node.items():
        # Without a type this is a mapping from field names to schemas, where no key is special.
        if not isinstance(kind, str) or key not in _NOT_SCHEMAS:
            _make_strict(value, handler, seen)
    if not isinstance(kind, str):  # fields, one of which may be called "type"
        return
    if kind in _LEAVES:
        node |= {**_LEAVES[kind], **node, "strict": True}
    elif kind == "definition-ref" and node["schema_ref"] not in seen:
        seen.add(node["schema_ref"])
        _make_target_strict(node, handler, seen)


def _make_target_strict(node: Any, handler: GetCoreSchemaHandler, seen: set[str]) -> None:
    try:
        target = handler.resolve_ref_schema(node)
    except LookupError:  # a model that refers to itself is still being made
        return
    if target["type"] in ("dataclass", "typed-dict"):  # models are strict by their own base
        _make_strict(target, handler, seen)


class SectionModel(BaseModel):
    """A section of a config file: derive fixed sections from it, with fields, types and defaults as usual.

    `3` is a number where one is wanted, but `"3"`, `true` and (for an integer) `3.5` are mistakes. Numbers are finite,
    unless a field says `Field(allow_inf_nan=True)`. A list fills a tuple or a set, and text fills a path, an enum or a
    literal, because YAML has no other way to write them.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    supplied_: ClassVar[frozenset[str]] = frozenset()
    """Arguments that the builder supplies and that cannot be written in a file."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make every number, text and boolean strict, numbers finite, and leave containers lenient."""
        schema = handler(source)
        _make_strict(schema, handler, set())
        return schema


class OpenSectionModel(SectionModel):
    """A section that takes any further keys: the schema of a signature with `**kwargs`."""

    model_config = ConfigDict(extra="allow")


def spellings(model: type[BaseModel], name: str) -> list[str]:
    """Return the keys that fill a field, the canonical one first."""
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
