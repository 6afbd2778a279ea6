"""Two habits of writing configs, one schema: keys that some files keep under `training` move to their own section."""

from collections.abc import Mapping
from typing import Any

from etude.config import Document, canonical_keys
from etude.experiment.meaningful_dialect import meaningful_settings, move_meaningful_loss
from etude.experiment.moving import put_setting
from etude.trainer import TRAINING_ALIASES

_MOVES = {
    "learning_rate": ("optimizer", "lr", ("lr", "learning_rate")),
    "weight_decay": ("optimizer", "weight_decay", ("weight_decay",)),
    "warmup_steps": ("scheduler", "warmup_steps", ("warmup_steps",)),
    "scheduler_type": ("scheduler", "name", ("name",)),
}
"""Key under `training` → section, key there, and the spellings under which that section may already have it."""

MOVED_KEYS = (*_MOVES, "use_scheduler")
"""Keys of `training` that are kept in other sections."""

DEFAULT_NAMES = {"optimizer": "adamw", "scheduler": "warmup_cosine"}
"""The component of an optimizer section without a name, or of one that only a key of `training` speaks of."""


def unify_dialects(document: Document) -> None:
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
    if training.pop("use_scheduler", None) is False:
        data["scheduler"] = None
        training.pop("scheduler_type", None)
        training.pop("warmup_steps", None)
    for key, (section, name, spellings) in _MOVES.items():
        if training.get(key) is not None:
            _move(document, training, key, section, name, spellings)
    move_meaningful_loss(document, training)


def trainer_settings(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return of the settings that moved those that a `Trainer` in Python acts on as the sections say.

    It makes AdamW and `warmup_cosine` of them: numbers for another optimizer or another schedule would mislead it.
    """
    found = moved_settings(sections)
    for section, keys in (("optimizer", ("learning_rate", "weight_decay")), ("scheduler", ("warmup_steps",))):
        selection = sections.get(section)
        if selection is not None and selection.component.name != DEFAULT_NAMES[section]:
            found |= dict.fromkeys(keys)
    return found


def moved_settings(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that moved, from where they are now, whichever optimizer and schedule they are for."""
    optimizer, scheduler = sections.get("optimizer"), sections.get("scheduler")
    found: dict[str, Any] = {"use_scheduler": scheduler is not None}
    if optimizer is not None:
        arguments = optimizer.defaults | optimizer.arguments
        found |= {"learning_rate": arguments.get("lr"), "weight_decay": arguments.get("weight_decay")}
    if scheduler is not None:
        arguments = scheduler.defaults | scheduler.arguments
        found |= {"scheduler_type": scheduler.component.name, "warmup_steps": arguments.get("warmup_steps")}
    return found | meaningful_settings(sections.get("loss"))


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
