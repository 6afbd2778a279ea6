"""Keys that some files keep under `training` move to the sections they belong to: one way, before validation."""

from typing import Any

from etude.config import Document, canonical_keys
from etude.config.document import put_setting
from etude.core import ConfigError
from etude.experiment.features import features_for
from etude.trainer import TRAINING_ALIASES
from etude.trainer.optimization import DEFAULT_SCHEDULE

_MOVES = {
    "learning_rate": ("optimizer", "lr", ("lr", "learning_rate")),
    "weight_decay": ("optimizer", "weight_decay", ("weight_decay",)),
    "warmup_steps": ("scheduler", "warmup_steps", ("warmup_steps",)),
    "scheduler_type": ("scheduler", "name", ("name",)),
}
"""Key under `training` → section, key there, and the spellings under which that section may already have it."""

_MOVED_BY = {"meaningful_loss": "etude.multimodal"}
"""Key under `training` → the room whose feature moves it."""

LEGACY_KEYS = (*_MOVES, "use_scheduler", "use_mixed_precision", "precision_dtype", *_MOVED_BY)
"""Keys of `training` that the other sections, and `precision`, say better: shown only where they say something."""

DEFAULT_NAMES = {"optimizer": "adamw", "scheduler": DEFAULT_SCHEDULE}
"""The component of an optimizer section without a name, or of one that only a key of `training` speaks of."""


def move_legacy_keys(document: Document) -> None:
    """Give every setting its one place, in the document itself; messages keep showing what was written.

    Raises ConfigError if one file gives the same setting in both places. Between files, and from the command line,
    the later one wins.
    """
    data = document.data
    optimizer = data.get("optimizer")
    if isinstance(optimizer, dict) and "name" not in optimizer:
        data["optimizer"] = {"name": DEFAULT_NAMES["optimizer"], **optimizer}
    training = data.get("training")
    if not isinstance(training, dict):
        return
    training = data["training"] = canonical_keys(training, TRAINING_ALIASES, "training", document)
    use_scheduler = training.pop("use_scheduler", None)
    if use_scheduler is False:
        data["scheduler"] = None
        training.pop("scheduler_type", None)
        training.pop("warmup_steps", None)
    elif use_scheduler is True and data.get("scheduler") is None and training.get("scheduler_type") is None:
        data["scheduler"] = {"name": DEFAULT_NAMES["scheduler"]}
    for key, (section, name, spellings) in _MOVES.items():
        if training.get(key) is not None:
            _move(document, training, key, section, name, spellings)
    for key, room in _MOVED_BY.items():
        if training.get(key) is not None:
            features = features_for((), [room])
            if not features:
                raise ConfigError(f"{document.place(f'training.{key}')}: needs {room}, which is not installed")
            features[0].move_legacy_keys(document, training)


def _move(
    document: Document, training: dict[str, Any], key: str, section: str, name: str, spellings: tuple[str, ...]
) -> None:
    here = f"training.{key}"
    target = document.data.get(section)
    if isinstance(target, str):
        target = document.data[section] = {"name": target}
    if target is not None and not isinstance(target, dict):
        return  # not a section at all: validation says so
    value = training.pop(key)
    if target is None:
        target = document.data[section] = {"name": DEFAULT_NAMES[section]}
    if name == "name" and f"{section}.name" not in document.locations:
        spellings = ()  # filled in above, and said by no one
    put_setting(document, target, value, here=here, section=section, spellings=spellings, name=name)
