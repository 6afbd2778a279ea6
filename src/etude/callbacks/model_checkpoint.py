"""Keep the weights of the best epoch in one safetensors file."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from etude.callbacks.monitored import Monitored, resolve, with_other_names
from etude.checkpoint import check_kind, pack, record_of
from etude.checkpoint.format import safetensors_pieces
from etude.config.registry import register
from etude.core import CheckpointError, ConfigError, TrainingError
from etude.core.files import replacing
from etude.core.model import clean_state_dict
from etude.core.monitor import Mode
from etude.engine.callback import Callback, Logs, RunInfo

logger = logging.getLogger("etude")

SUFFIX = ".safetensors"

_STATE = record_of("ModelCheckpoint", {"best_path": str | None, "monitored": dict[str, Any]})


@register("callback", "model_checkpoint")
class ModelCheckpoint(Callback):
    """Writes the model's weights whenever the monitored metric is the best so far.

    `monitor` is that of the run by default (`training.monitor`, or `val_loss`), and `mode` follows from a known name.
    `filepath` is a file (`checkpoints/best_model.safetensors`) or a folder, which gets a `best_model.safetensors`. It
    may contain fields: `weights/{epoch:03d}-{val_loss:.4f}.safetensors` keeps a file for every epoch that was the
    best so far; epochs are counted from zero. A relative path is inside the run folder, if there is one. In a run of
    several phases only epochs of the same phase are compared: the file is that of the best epoch of the last phase.

    The file is replaced atomically. Its metadata hold epoch, step, and the monitored name and value;
    `safetensors.torch.load_model(model, path)` loads it. A full disk loses the file, but does not end the run. In a
    loop of your own, without `on_train_begin`, set `.model` to the model to save.
    """

    needs_model = True

    def __init__(self, filepath: str | Path, monitor: str | None = None, mode: Mode | None = None) -> None:
        super().__init__()
        self.filepath = _file(filepath)
        self.monitored = Monitored("ModelCheckpoint", monitor, mode)
        self.model: nn.Module | None = None
        self.best_path: Path | None = None
        """The file of the best epoch; None before the first."""
        self._run: RunInfo | None = None

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the file of `filepath`."""
        return (str(_file(arguments["filepath"])),)

    def on_train_begin(self, run: RunInfo) -> None:
        """Take the model of the run and check that the folder is writable."""
        self._run, self.model = run, run.model
        self.monitored.begin(run)
        if run.clock.step == 0:
            self.best_path = None
        if run.is_main:
            folder = next(p for p in resolve(self.filepath, run).parents if "{" not in str(p))
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"ModelCheckpoint cannot write in {folder}: {error.strerror or error}; choose a writable filepath"
                ) from error

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """From now on compare only with epochs of this phase."""
        self.monitored.begin_phase(facts)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the weights if this epoch is the best."""
        before = self.monitored.state_dict()
        if not self.monitored.update(epoch, logs):
            return
        path = self._path(epoch, logs)
        if self._run is None or self._run.is_main:
            if self.model is None:
                logger.warning("ModelCheckpoint saved nothing: call on_train_begin(run), or set its `.model`")
                return
            try:
                with nullcontext() if self._siblings is None else self._siblings.saving():
                    save_weights(self.model, path, self._metadata(epoch))
            except CheckpointError as error:
                self.monitored.load_state_dict(before)  # compare only with epochs whose file was written
                logger.warning(f"{error}; training continues")
                return
        self.best_path = path

    def on_train_end(self, result: Logs) -> None:
        """Warn if the metric was never reported."""
        self.monitored.warn_if_never_seen()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its file."""
        path = str(self.best_path) if self.best_path is not None else None
        return {"best_path": path, "monitored": self.monitored.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        check_kind(_STATE, state, "state")
        self.monitored.load_state_dict(state["monitored"])
        self.best_path = Path(state["best_path"]) if state["best_path"] is not None else None

    def _path(self, epoch: int, logs: Logs) -> Path:
        try:
            name = str(self.filepath).format_map({**with_other_names(logs), "epoch": epoch})
        except (KeyError, IndexError, ValueError) as error:
            raise TrainingError(
                f"ModelCheckpoint cannot fill in filepath '{self.filepath}' ({error}); "
                f"its fields can be: epoch, {', '.join(sorted(logs))}"
            ) from error
        return resolve(name, self._run)

    def _metadata(self, epoch: int) -> dict[str, str]:
        metadata = {"epoch": str(epoch), "monitor": self.monitored.name, "value": repr(self.monitored.best)}
        return metadata | ({"step": str(self._run.clock.step)} if self._run is not None else {})


def _file(filepath: str | Path) -> Path:
    text = str(filepath)
    path = Path(text)
    if path.suffix == SUFFIX:
        return path
    if text.endswith(("/", "\\")) or path.is_dir() or not path.suffix:
        return path / f"best_model{SUFFIX}"
    raise ConfigError(
        f"ModelCheckpoint writes safetensors: filepath '{text}' must end in {SUFFIX}, or in / if it is a folder"
    )


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a model's state; tied weights are stored once, and the metadata names them.

    `safetensors.torch.load_model(model, path)` reads it. Raises CheckpointError if it cannot be written; an earlier
    file is unchanged.
    """
    state = {name: value for name, value in clean_state_dict(model).items() if isinstance(value, Tensor)}
    tensors, structure = pack(state, "model")
    stored_as = {name: next(iter(node.values())) for name, node in structure["dict"].items()}
    tied = {name: first for name, first in stored_as.items() if name != first}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            for piece in safetensors_pieces(tensors, {**tied, **metadata}):
                file.write(piece)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
