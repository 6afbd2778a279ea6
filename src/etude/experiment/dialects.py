"""Two habits of writing configs, one schema: keys that some files keep under `training` move to their own section."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from etude.config import Document, Selection, canonical_keys
from etude.config.moving import put_setting
from etude.config.signature import parameters_of
from etude.trainer import TRAINING_ALIASES
from etude.trainer.optimization import DEFAULT_SCHEDULE

_MOVES = {
    "learning_rate": ("optimizer", "lr", ("lr", "learning_rate")),
    "weight_decay": ("optimizer", "weight_decay", ("weight_decay",)),
    "warmup_steps": ("scheduler", "warmup_steps", ("warmup_steps",)),
    "scheduler_type": ("scheduler", "name", ("name",)),
}
"""Key under `training` → section, key there, and the spellings under which that section may already have it."""

_MEANINGFUL = "etude.multimodal.training_section"
"""What moves `training.meaningful_loss`; imported only for files with that key or that loss."""

MOVED_KEYS = (*_MOVES, "use_scheduler")
"""Keys of `training` that are kept in other sections."""

DEFAULT_NAMES = {"optimizer": "adamw", "scheduler": DEFAULT_SCHEDULE}
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
    if training.get("meaningful_loss") is not None:
        import_module(_MEANINGFUL).move_meaningful_loss(document, training)


def trainer_settings(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return of the settings that moved those that a `Trainer` in Python acts on as the sections say.

    It makes AdamW of them: numbers for another optimizer would mislead it.
    """
    found = moved_settings(sections)
    optimizer = sections.get("optimizer")
    if optimizer is not None and optimizer.component.name != DEFAULT_NAMES["optimizer"]:
        found |= dict.fromkeys(("learning_rate", "weight_decay"))
    return found


def moved_settings(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that moved, from where they are now, whichever optimizer they are for.

    A schedule with other settings than `warmup_steps` has no keys under `training`: its name alone would mislead.
    """
    optimizer, scheduler = sections.get("optimizer"), sections.get("scheduler")
    found: dict[str, Any] = {}
    if optimizer is not None:
        arguments = optimizer.defaults | optimizer.arguments
        found |= {"learning_rate": arguments.get("lr"), "weight_decay": arguments.get("weight_decay")}
    if scheduler is None:
        found["use_scheduler"] = False
    elif not _settings(scheduler) - {"warmup_steps"}:
        arguments = scheduler.defaults | scheduler.arguments
        found |= {"use_scheduler": True, "scheduler_type": scheduler.component.name}
        found["warmup_steps"] = arguments.get("warmup_steps")
    if (loss := sections.get("loss")) is not None and loss.component.name == "meaningful":
        found["meaningful_loss"] = import_module(_MEANINGFUL).meaningful_settings(loss)
    return found


def _settings(selection: Selection) -> set[str]:
    """Return the arguments that a section gives and that are not the default."""
    known = parameters_of(selection.component.factory)[0]
    return {key for key, value in selection.arguments.items() if key not in known or known[key][1] != value}


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
