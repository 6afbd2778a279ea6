"""Optional packages that add sections to experiment files; a package is imported only if a file needs it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import create_model

from etude.config import Feature, SectionSpec
from etude.lazy import import_room

ROOM_OF = {
    "tasks": "etude.multitask",
    "weighting": "etude.multitask",
    "curriculum": "etude.multitask",
    "vocab": "etude.multimodal",
}
"""Key of a file → package; its module `feature` has a `FEATURE`. They check and build in this order."""


def features_for(keys: Collection[str], modules: Collection[str] = ()) -> tuple[Feature, ...]:
    """Return the features that handle one of the keys, or whose package contains one of the modules."""
    rooms = {ROOM_OF[key] for key in keys if key in ROOM_OF}
    rooms |= {".".join(module.split(".")[:2]) for module in modules}
    found = (import_room(f"{room}.feature") for room in dict.fromkeys(ROOM_OF.values()) if room in rooms)
    return tuple(module.FEATURE for module in found if module is not None)


def all_features() -> tuple[Feature, ...]:
    """Return the features of all installed packages."""
    return features_for(ROOM_OF)


def with_features(
    sections: Mapping[str, SectionSpec | None], features: Collection[Feature]
) -> dict[str, SectionSpec]:
    """Return the sections of a file, including those of the features in their positions."""
    added = {key: spec for feature in features for key, spec in feature.sections.items()}
    found = {key: added.get(key, spec) for key, spec in sections.items()}
    return {key: spec for key, spec in found.items() if spec is not None}


def with_training_models(training: SectionSpec, features: Collection[Feature]) -> SectionSpec:
    """Return the section `training` with the features' schemas for their keys."""
    models = {key: model for feature in features for key, model in feature.training_models().items()}
    fields: Any = {key: (model | None, training.model.model_fields[key]) for key, model in models.items()}
    return replace(training, model=create_model("training", __base__=training.model, **fields))
