"""The JSON Schema of an experiment file, so that editors complete its keys and check its values."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from etude.config.components import BY_PATH
from etude.config.registry import kinds, lookup, names
from etude.config.schema import SectionSpec, root_model
from etude.config.selection import component_model
from etude.config.shapes import marks_in
from etude.config.signature import spellings

_DEFS = "#/$defs/"


def json_schema(sections: Mapping[str, SectionSpec]) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file with these sections and the components registered so far.

    A component section is checked against the arguments of the component it names. In a file that `extends` another,
    no key is required, because the other file may have it.
    """
    root = root_model(sections)
    provided: dict[str, frozenset[str]] = {}
    for mark in marks_in(root):
        provided[mark.kind] = provided.get(mark.kind, frozenset()) | mark.provided
    everywhere = frozenset[str]().union(*provided.values())
    components = {
        (kind, name): component_model(lookup(kind, name), provided.get(kind, everywhere))
        for kind in kinds()
        for name in names(kind)
    }
    inputs: Any = [(model, "validation") for model in (root, *components.values())]
    made, shared = models_json_schema(inputs, schema_generator=_Generator)
    schemas: dict[Any, dict[str, Any]] = {model: schema for (model, _mode), schema in made.items()}
    defs: dict[str, Any] = shared.get("$defs", {})
    for kind in kinds():
        defs[f"section.{kind}"] = _kind_schema(
            kind, {name: _inlined(schemas[components[kind, name]], defs) for name in names(kind)}
        )
    defs["file"] = _file_schema(_inlined(schemas[root], defs), sections, defs)
    defs = {name: _linked(schema) for name, schema in defs.items()}
    defs |= {f"{name}.partial": _partial(schema) for name, schema in defs.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Etude experiment",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": f"{_DEFS}file.partial"},
        "else": {"$ref": f"{_DEFS}file"},
        "$defs": defs,
    }


class _Generator(GenerateJsonSchema):
    """Adds aliases of keys, and accepts any value for arguments that a file cannot hold."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Add a property for every alias."""
        result = super().model_schema(schema)
        model = schema["cls"]
        for name in model.model_fields:
            _add_spellings(result, spellings(model, name))
        return result

    def model_field_schema(self, schema: core_schema.ModelField) -> JsonSchemaValue:
        """Return the schema of one argument, `{}` if JSON Schema cannot express its type."""
        try:
            return super().model_field_schema(schema)
        except PydanticInvalidForJsonSchema:
            return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """No warning: a default that JSON cannot express is omitted."""


def _add_spellings(schema: JsonSchemaValue, keys: list[str]) -> None:
    """Let each of `keys` set the same field; at most one of them may be given."""
    first, *others = keys
    if not others or first not in schema.get("properties", {}):
        return
    rules: list[Any] = schema.setdefault("allOf", [])
    for other in others:
        schema["properties"][other] = schema["properties"][first] | {"description": f"Another spelling of {first}."}
    if first in schema.get("required", ()):
        schema["required"].remove(first)
        rules.append({"anyOf": [{"required": [key]} for key in keys]})
    rules += [{"not": {"type": "object", "required": list(pair)}} for pair in itertools.combinations(keys, 2)]


def _kind_schema(kind: str, components: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a section that names a component: each name has its own arguments."""
    cases = []
    for name, schema in components.items():
        arguments = copy.deepcopy(schema)
        arguments["properties"] = {"name": {"const": name}} | arguments.get("properties", {})
        arguments.pop("title", None)
        cases.append({"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": arguments})
    known: dict[str, Any] = {"enum": list(components), "description": f"Which {kind}."}
    if kind in BY_PATH:
        known = {"anyOf": [{"enum": known.pop("enum")}, {"pattern": r"\."}], **known}
    section = {"type": "object", "properties": {"name": known}, "required": ["name"], "allOf": cases}
    if not cases:
        del section["allOf"]
    return {"if": {"type": "string"}, "then": known, "else": section}


def _file_schema(
    root: dict[str, Any], sections: Mapping[str, SectionSpec], defs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the schema of the whole file: descriptions, aliases of fixed sections, and `extends`."""
    whole = copy.deepcopy(root)
    fixed = [name for name, spec in sections.items() if spec.is_fixed]
    whole["required"] = [name for name in whole.get("required", ()) if name not in fixed]
    for name, spec in sections.items():
        described = whole["properties"][name]
        if spec.is_fixed:
            described = whole["properties"][name] = _inlined(described, defs) | {"type": ["object", "null"]}
        if spec.description:
            described["description"] = spec.description
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    whole["properties"]["extends"] = files | {
        "description": "Files that this one extends; later ones override earlier ones."
    }
    whole.pop("title", None)
    return whole


def _inlined(schema: dict[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition that a schema refers to."""
    reference = schema.get("$ref")
    return defs[reference.removeprefix(_DEFS)] if reference else schema


def _linked(schema: Any) -> Any:
    """Let each nested section refer to its kind, and drop the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_linked(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    linked = {key: _linked(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    kind = linked.pop("x-section", None)
    return linked | ({"$ref": f"{_DEFS}section.{kind}"} if kind in kinds() else {})


def _partial(schema: Any) -> Any:
    """Return the schema without required keys, for files that extend another; conditions do not change."""
    if isinstance(schema, list):
        return [_partial(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):
        return schema | {"$ref": f"{schema['$ref']}.partial"}
    return {
        key: value if key in ("if", "not", "default") else _partial(value)
        for key, value in schema.items()
        if key != "required" or not isinstance(value, list)
    }
