"""Settings of `MeaningfulLoss` in files and mappings: its signature, and aliases."""

import inspect
from functools import cache
from typing import Any

from etude.config import Document, Problem, SectionModel, config_error
from etude.config.schema import validate_section
from etude.config.signature import make_model, parameters_of
from etude.multimodal.loss.strategy import ALIASES, MeaningfulLoss, Weight
from etude.multimodal.loss.terms import SHORT_NAMES

DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(MeaningfulLoss).parameters.items()
    if name not in ("self", "vocab", "codebooks", "edges")  # arguments that are not settings
}
WEIGHT_OF = "weight_"
"""`weight_image: 0.5` is an alias of `weights: {image: 0.5}`."""


@cache
def settings_model(names: tuple[str, ...] = tuple(DEFAULTS)) -> type[SectionModel]:
    """Return the schema of these settings."""
    fields = {name: one for name, one in parameters_of(MeaningfulLoss)[0].items() if name in names}
    weights = {f"{WEIGHT_OF}{name}": (Weight | None, None) for name in SHORT_NAMES}
    return make_model("meaningful_loss", {**fields, **weights}, ALIASES)


def read_settings(
    given: Any,
    path: str = "training.meaningful_loss",
    document: Document | None = None,
    names: tuple[str, ...] = tuple(DEFAULTS),
) -> dict[str, Any]:
    """Return settings as arguments of `MeaningfulLoss`, without unset ones.

    Raises ConfigError with a line for every mistake.

    >>> read_settings({"sample_k_per_modality": 64, "weight_image": 0.5, "weights": {"period": 0.2}})
    {'sample_k': 64, 'weights': {'period': 0.2, 'image': 0.5}}
    """
    section = validate_section(settings_model(names), given, path=path, document=document)
    found = {key: value for key, value in dict(section).items() if key in section.model_fields_set}
    weights = dict(found.pop("weights", None) or {})
    for name in SHORT_NAMES:
        if (weight := found.pop(f"{WEIGHT_OF}{name}", None)) is not None:
            if name in weights:
                text = f"the weight of '{name}' is given twice, by {WEIGHT_OF}{name} and weights; keep one"
                raise config_error([Problem(path, text)], document)
            weights[name] = weight
    return {**found, "weights": weights} if weights else found
