"""`training.meaningful_loss` is another way to write `loss: {name: meaningful}`: its settings move there, and back."""

from collections.abc import Iterator
from typing import Any

from etude.config import Document, Selection, validate_section
from etude.core import ConfigError
from etude.experiment.moving import put_setting
from etude.trainer import MeaningfulLossConfig

HERE = "training.meaningful_loss"
MEANINGFUL = "meaningful"
"""The name of the loss."""
_NAMED = ("image", "scalar", "spectrum")
"""Modalities whose weight has a key of its own there, such as `weight_image`."""
_KEYS = {
    "sample_k_per_modality": "sample_k",
    **{key: key for key in ("weight", "kind", "huber_delta", "hl_sigma", "use_ce")},
}
"""Other keys there, and the arguments of the loss that they are."""
_SPELLINGS = {"sample_k": ("sample_k", "sample_k_per_modality")}
"""Arguments of the loss that may be written in more than one way, in both places."""


def move_meaningful_loss(document: Document, training: dict[str, Any]) -> None:
    """Move the settings to the section `loss`, in the document itself; settings that turn it off stay.

    Where the two contradict, the later one holds; raises ConfigError if one file says both.
    """
    given, loss = training.get("meaningful_loss"), document.data.get("loss")
    loss = {"name": loss} if isinstance(loss, str) else loss
    if not isinstance(given, dict) or not (loss is None or isinstance(loss, dict)):
        return
    try:
        settings = validate_section(MeaningfulLossConfig, given, path=HERE, document=document)
    except ConfigError:
        return  # it stays where it is: validation tells this together with all other mistakes
    if _contradicts(document, settings.enabled, loss):
        if _layer(document) < document.layer("loss.name"):
            training.pop("meaningful_loss")
            return
        document.forget("loss")
        document.data["loss"] = loss = None
    if settings.enabled:
        training.pop("meaningful_loss")
        target = document.data["loss"] = {**(loss or {}), "name": MEANINGFUL}
        for written, path, value in _said(settings):
            _put(document, target, written, path, value)
        if "loss" not in document.locations:
            document.renamed(HERE, "loss")


def meaningful_settings(loss: Selection | None) -> dict[str, Any]:
    """Return {"meaningful_loss": …} from the section `loss`, the way back; nothing if that is another loss."""
    if loss is None or loss.component.name != MEANINGFUL:
        return {}
    weights = dict(loss.arguments.get("weights") or {})
    named = {f"weight_{name}": weights.pop(name) for name in _NAMED if name in weights}
    same = {key: loss.arguments[name] for key, name in _KEYS.items() if name in loss.arguments}
    return {"meaningful_loss": MeaningfulLossConfig(**named, **same, weights=weights)}


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


def _said(settings: MeaningfulLossConfig) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield what was given: the key there, the path below `loss`, the value."""
    for key, name in _KEYS.items():
        if key in settings.model_fields_set:
            yield key, (name,), getattr(settings, key)
    for name, weight in settings.all_weights.items():
        key = f"weights.{name}" if name in settings.weights else f"weight_{name}"
        yield key, ("weights", name), weight


def _put(document: Document, target: dict[str, Any], written: str, path: tuple[str, ...], value: Any) -> None:
    """Set one argument of the loss, unless the section has it already from a later file."""
    *outer, name = path
    for key in outer:
        if not isinstance(inside := target.get(key) or {}, dict):
            return  # validation says so
        target[key] = dict(inside)
        target = target[key]
    spellings = _SPELLINGS.get(name, (name,))
    candidates = [f"{HERE}.{one}" for one in (written, *spellings)]
    here = next((one for one in candidates if one in document.locations), candidates[0])
    section = ".".join(("loss", *outer))
    put_setting(document, target, value, here=here, section=section, spellings=spellings, name=name)
