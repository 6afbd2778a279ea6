"""`training.meaningful_loss`, an older way to write `loss: {name: meaningful}`: its settings move there."""

from collections.abc import Iterator
from typing import Any

from etude.config import Document
from etude.config.document import put_setting
from etude.core import ConfigError
from etude.multimodal.loss.settings import WEIGHT_OF, read_settings
from etude.multimodal.loss.strategy import ALIASES, MEANINGFUL

HERE = "training.meaningful_loss"


def move_meaningful_loss(document: Document, training: dict[str, Any]) -> None:
    """Move the settings to the section `loss`, in the document itself; settings that turn it off stay.

    Where the two contradict, the later one holds; raises ConfigError if one file says both.
    """
    given, loss = training.get("meaningful_loss"), document.data.get("loss")
    loss = {"name": loss} if isinstance(loss, str) else loss
    if not isinstance(given, dict) or not (loss is None or isinstance(loss, dict)):
        return
    enabled = read_settings(given, HERE, document).get("enabled", True)
    if _contradicts(document, enabled, loss):
        if _layer(document) < document.layer("loss.name"):
            training.pop("meaningful_loss")
            return
        document.forget("loss")
        document.data["loss"] = loss = None
    if enabled:
        training.pop("meaningful_loss")
        target = document.data["loss"] = {**(loss or {}), "name": MEANINGFUL}
        for written, path, value in _said(given):
            _put(document, target, written, path, value)
        if "loss" not in document.locations:
            document.renamed(HERE, "loss")


def _contradicts(document: Document, enabled: bool, loss: dict[str, Any] | None) -> bool:
    """Whether the settings and the section `loss` ask for different losses; ConfigError if one file does."""
    if loss is None:  # left out, or turned off by a later file or the command line
        return enabled and "loss" in document.data and document.layer("loss") > _layer(document)
    name = loss.get("name", MEANINGFUL if enabled else None)
    if (name == MEANINGFUL) == enabled:
        return False
    if document.layer("loss.name") == _layer(document):
        says = f"asks for the loss '{MEANINGFUL}'" if enabled else "turns the meaningful loss off"
        raise ConfigError(f"{document.place(HERE)}: {says}, and loss.name is '{name}'; keep one")
    return True


def _layer(document: Document) -> int:
    """Return how late the latest of the settings was given."""
    layers = (one.layer for path, one in document.locations.items() if f"{path}.".startswith(f"{HERE}."))
    return max(layers, default=0)


def _said(given: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield what was given: the key there, the path below `loss`, the value."""
    for key, value in given.items():
        if key == "weights":
            yield from ((f"{key}.{name}", (key, name), weight) for name, weight in (value or {}).items())
        elif key.startswith(WEIGHT_OF):
            if value is not None:
                yield key, ("weights", key.removeprefix(WEIGHT_OF)), value
        elif key != "enabled":
            yield key, (ALIASES.get(key, key),), value


def _put(document: Document, target: dict[str, Any], written: str, path: tuple[str, ...], value: Any) -> None:
    """Set one argument of the loss, unless the section has it already from a later file."""
    *outer, name = path
    for key in outer:
        if not isinstance(inside := target.get(key) or {}, dict):
            return  # validation says so
        target[key] = dict(inside)
        target = target[key]
    section = ".".join(("loss", *outer))
    spellings = (name, *(alias for alias, of in ALIASES.items() if of == name and not outer))
    put_setting(document, target, value, here=f"{HERE}.{written}", section=section, spellings=spellings, name=name)
