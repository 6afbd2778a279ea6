"""Settings of `MeaningfulLoss` as files and mappings give them: its signature, and other spellings of it."""

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from etude.config import Document, Problem, SectionModel, config_error, validate_section
from etude.config.signature import make_model, parameters_of
from etude.multimodal.loss.strategy import ALIASES, MeaningfulLoss, Weight
from etude.multimodal.loss.terms import SHORT_NAMES

NO_SETTINGS = ("self", "vocab", "codebooks", "edges")
"""What the loss is made of; all its other arguments are settings."""
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(MeaningfulLoss).parameters.items()
    if name not in NO_SETTINGS
}
WEIGHT_OF = "weight_"
"""`weight_image: 0.5` is another spelling of `weights: {image: 0.5}`."""


class _Settings(SectionModel):
    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Say in the JSON Schema too that a weight is given once."""
        schema = handler.resolve_ref_schema(handler(core))
        for name in SHORT_NAMES:
            twice = {f"{WEIGHT_OF}{name}": {"type": "number"}, "weights": {"type": "object", "required": [name]}}
            schema.setdefault("allOf", []).append({"not": {"required": list(twice), "properties": twice}})
        return schema


@cache
def settings_model() -> type[SectionModel]:
    """Return the schema of all settings."""
    fields = {name: one for name, one in parameters_of(MeaningfulLoss)[0].items() if name in DEFAULTS}
    named = {f"{WEIGHT_OF}{name}": (Weight | None, None) for name in SHORT_NAMES}
    return make_model("meaningful_loss", {**fields, **named}, ALIASES, _Settings)


def read_settings(
    given: Any, path: str = "training.meaningful_loss", document: Document | None = None
) -> dict[str, Any]:
    """Return settings as arguments of `MeaningfulLoss`, without those that are not given.

    Raises ConfigError with a line for every mistake.

    >>> read_settings({"sample_k_per_modality": 64, "weight_image": 0.5, "weights": {"period": 0.2}})
    {'sample_k': 64, 'weights': {'period': 0.2, 'image': 0.5}}
    """
    section = validate_section(settings_model(), given, path=path, document=document)
    found = {key: getattr(section, key) for key in settings_model().model_fields if key in section.model_fields_set}
    found = {key: value for key, value in found.items() if value is not None or not key.startswith(WEIGHT_OF)}
    for name in found.get("weights") or {}:
        if f"{WEIGHT_OF}{name}" in found:
            text = f"the weight of '{name}' is given twice, by {WEIGHT_OF}{name} and weights; keep one"
            raise config_error([Problem(path, text)], document)
    return as_arguments(found)


def as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the names of the arguments; `weight_image` becomes part of `weights`."""
    found, weights = {}, dict(settings.get("weights") or {})
    for key, value in settings.items():
        if key.startswith(WEIGHT_OF):
            weights[key.removeprefix(WEIGHT_OF)] = value
        elif key != "weights":
            found[ALIASES.get(key, key)] = value
    return {**found, "weights": weights} if weights else found


def spellings_of(names: Iterable[str]) -> list[str]:
    """Return settings in all their spellings."""
    return [*(known := list(names)), *(alias for alias, name in ALIASES.items() if name in known)]
