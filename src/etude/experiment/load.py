"""From a run folder back to a model: `load_model`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.checkpoint import Checkpoint, CheckpointManager, load_model_state
from etude.checkpoint.trust import errors_of
from etude.config import RunDraft, build_selection
from etude.core import CheckpointError, ConfigError
from etude.core.model_record import rebuild_model
from etude.core.random import aside, set_seed
from etude.core.run_layout import folder_name
from etude.core.spelling import shorten
from etude.experiment.config import ExperimentConfig, load_config
from etude.monitor import RunFolder
from etude.trainer import resolve_device


def load_model(
    run_dir: str | Path,
    which: str | int = "best",
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    import_class: bool = False,
) -> nn.Module:
    """Return the trained model of a run, in eval mode.

    which: `best` (the last if no checkpoint is the best), `last`, or a step number.
    model: a module to load the weights into; without it the model is built: from the run folder's config.yaml, or for
        a run made in Python from its recorded class and arguments (see `etude.core.model_record`).
    device: where the model is placed.
    import_class: for a run made in Python, import the module of the recorded class, which runs its code. Without it
        the module must be imported already.

    The data of the run is not needed. Raises CheckpointError if the weights do not fit, and ConfigError if the model
    cannot be built.
    """
    folder, place = RunFolder.open(run_dir), resolve_device(device)
    return model_of(folder, read_weights(folder, which), model, import_class=import_class).to(place)


def model_of(
    folder: RunFolder, checkpoint: Checkpoint, model: nn.Module | None = None, *, import_class: bool = False
) -> nn.Module:
    """Return the model of a run, in eval mode, with the weights of a checkpoint."""
    with aside(0):
        built = model if model is not None else _built(folder, checkpoint, import_class)
    with errors_of(checkpoint.path):
        load_model_state(built, checkpoint.model_state)
    return built.eval()


def _built(folder: RunFolder, checkpoint: Checkpoint, import_class: bool) -> nn.Module:
    """Return the model of a run with new weights, built without its data."""
    if folder.is_rebuildable:
        return _from_config(load_config(folder.config_path, announce=True), checkpoint.meta.get("model_sizes"))
    try:
        return rebuild_model(checkpoint.meta.get("model"), import_class=import_class)
    except ConfigError as error:
        raise ConfigError(
            f"{folder.path} holds a run made in Python, and {error}; or pass the model yourself: "
            f"load_model({str(folder.path)!r}, model=…)"
        ) from error


def _from_config(config: ExperimentConfig, recorded: Any) -> nn.Module:
    sizes: dict[str, Any] = dict(recorded or {})
    if "input_shape" in sizes:
        sizes["input_shape"] = tuple(sizes["input_shape"])
    draft = RunDraft(config.sections, config.document, vocab_size=sizes.get("vocab_size"))
    selection = config.require("model")
    set_seed(config.training.seed)  # weights that the run never trained are those it began with
    draft.model = build_selection(selection, path="model", document=config.document, provided=sizes)
    for feature in config.features:
        feature.after_model(draft)
    built: nn.Module = draft.model
    return built


def read_weights(folder: RunFolder, which: str | int, *, lazy: bool = False) -> Checkpoint:
    """Read the best, the last, or that of a step; a damaged best or last is replaced by the next intact one.

    With `lazy` the values of tensors are read when they are needed.
    """
    manager, which = CheckpointManager(folder.checkpoints_path), str(which)
    if which in ("best", "last"):
        return manager.load(which if manager.best() is not None else "last", lazy=lazy)
    steps = {str(entry.step): entry.step for entry in manager.all()}
    step = steps.get(which.lstrip("0") or "0")
    if step is None:
        there = ", ".join(steps) or "none"
        raise CheckpointError(f"{folder.path} has no checkpoint {shorten(which)!r} (available: {there}, best, last)")
    return manager.load(folder_name(step), lazy=lazy)
