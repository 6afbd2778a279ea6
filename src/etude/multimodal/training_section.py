"""`training.meaningful_loss`, an older form of `loss: {name: meaningful}`: its settings are moved there."""

from typing import Any

from etude.config import Document
from etude.config.document import put_setting
from etude.core import ConfigError
from etude.multimodal.loss.settings import WEIGHT_OF, read_settings
from etude.multimodal.loss.strategy import ALIASES, MEANINGFUL

HERE = "training.meaningful_loss"


def move_meaningful_loss(document: Document, training: dict[str, Any]) -> None:
    """Move the settings to the section `loss`, in the document itself; settings that disable it stay.

    Raises ConfigError if the two ask for different losses.
    """
    given, loss = training.get("meaningful_loss"), document.data.get("loss") or {}
    loss = {"name": loss} if isinstance(loss, str) else loss
    if not isinstance(given, dict) or not isinstance(loss, dict):
        return  # validation reports it
    enabled = read_settings(given, HERE, document).get("enabled", True)
    name = loss.get("name", MEANINGFUL if enabled else None)
    if (name == MEANINGFUL) != enabled:
        says = f"asks for the loss '{MEANINGFUL}'" if enabled else "turns the meaningful loss off"
        raise ConfigError(f"{document.place(HERE)}: {says}, and loss.name is '{name}'; keep one")
    if not enabled:
        return
    training.pop("meaningful_loss")
    target = document.data["loss"] = {**loss, "name": MEANINGFUL}
    weights = {f"weights.{name}": weight for name, weight in (given.pop("weights", None) or {}).items()}
    for key, value in {**given, **weights}.items():
        if key.startswith((WEIGHT_OF, "weights.")):
            if value is not None:
                inside = target["weights"] = dict(target.get("weights") or {})
                name = key.removeprefix(WEIGHT_OF).removeprefix("weights.")
                _put(document, inside, value, key, "loss.weights", name)
        elif key != "enabled":
            _put(document, target, value, key, "loss", ALIASES.get(key, key))
    if "loss" not in document.locations:
        document.renamed(HERE, "loss")


def _put(document: Document, target: dict[str, Any], value: Any, key: str, section: str, name: str) -> None:
    """Set one argument of the loss, unless a later file has set it in the section."""
    spellings = (name, *(alias for alias, of in ALIASES.items() if of == name))
    put_setting(document, target, value, here=f"{HERE}.{key}", section=section, spellings=spellings, name=name)
