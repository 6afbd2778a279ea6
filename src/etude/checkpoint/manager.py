"""`CheckpointManager`: a folder of checkpoints that keeps the newest and the best. Usable on its own."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from etude.checkpoint.contents import MANIFEST, Contents
from etude.checkpoint.durable import clean_leftovers, delete_folder, follow
from etude.checkpoint.folder import (
    Entry,
    best_first,
    find_checkpoints,
    newest_intact,
    point,
    read_first_intact,
    read_newest_intact,
    remove_copies,
    to_delete,
)
from etude.checkpoint.match import load_model_state
from etude.checkpoint.optimizer import check_optimizer, load_optimizer_state, optimizer_state
from etude.checkpoint.store import Checkpoint, cannot_save, read_checkpoint, read_meta, write_contents
from etude.checkpoint.trust import check_kind, errors_of, record_of
from etude.core.arguments import as_whole
from etude.core.errors import CheckpointError
from etude.core.model import clean_state_dict
from etude.core.monitor import DEFAULT_MONITOR, Mode, mode_of
from etude.core.run_layout import BEST, LAST, folder_name
from etude.distributed import World

_log = logging.getLogger(__name__)

_MODULES = record_of("Modules", {"optimizer": dict[str, Any] | None, "extra": dict[str | int, Any]})
"""Keys that `save_modules` saves beside the model."""


class CheckpointManager:
    """Checkpoints of one run: `root/step-NNNNNNNN`, and the links `root/last` and `root/best`.

    It keeps the newest one and the best `keep_best` by the metric `monitor`; a later phase ranks before an earlier
    one. Without `monitor` it is the one that the newest checkpoint was saved with, or `val_loss`. All state is in the
    folders, so a new manager continues where another one stopped. A manager that only loads does not write.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> manager = CheckpointManager(mkdtemp(), keep_best=2)
    >>> metrics = {"val_loss": 0.5}
    >>> manager.save_modules(100, model=model, optimizer=optimizer, extra={"epoch": 3}, metrics=metrics).name
    'step-00000100'
    >>> manager.load_into(model, optimizer)
    {'epoch': 3}
    """

    def __init__(
        self, root: str | Path, *, keep_best: int = 3, monitor: str | None = None, mode: Mode | None = None
    ) -> None:
        as_whole("keep_best", keep_best, least=0)
        self.root = Path(root)
        self.keep_best = keep_best
        if monitor is None and mode is None:
            monitor, mode = self._saved_monitor()
        self.monitor = DEFAULT_MONITOR if monitor is None else monitor
        self.mode: Mode = mode_of(self.monitor, mode, "CheckpointManager")
        self._cleaned = self._has_warned = False

    def save(
        self,
        step: int,
        *,
        model_state: Mapping[str, Any],
        state: Any,
        metrics: Mapping[str, float] | None = None,
        meta: Mapping[str, Any] | None = None,
        config: str = "",
        world: World | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, then delete those no longer needed; return its folder.

        When this returns, the checkpoint is on disk. With several ranks all of them call this. Raises CheckpointError
        if it cannot be written, on all ranks; earlier checkpoints are then unchanged.
        """
        world = World() if world is None else world
        contents = Contents.of(model_state, state, self.facts(step, metrics or {}, meta or {}), config, world)
        world.attempt(lambda: self.write(step, contents, world), here=world.is_main or contents.is_sharded)
        return self.root / folder_name(step)

    def facts(self, step: int, metrics: Mapping[str, float], meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `meta.json` of a checkpoint holds about it."""
        step = as_whole("step", step, least=0, error=CheckpointError)
        return {**meta, "monitor": self.monitor, "mode": self.mode, "step": step, "metrics": _numbers(metrics)}

    def write(self, step: int, contents: Contents, world: World) -> None:
        """Write what was prepared: called by rank 0, or by all ranks if the contents are sharded."""
        path = self.root / folder_name(step)
        if contents.is_sharded:
            world.attempt(lambda: self._guarded(path, self._clean), here=world.is_main)
        else:
            self._guarded(path, self._clean)
        write_contents(path, contents, world)
        if world.is_main:
            self._guarded(path, lambda: self._tidy(step))

    def finish(self, step: int) -> None:
        """Complete the work after the checkpoint of `step`, if the process that saved it died too early.

        Leftovers are removed, the links are updated, and checkpoints no longer needed are deleted.
        """
        path = self.root / folder_name(step)
        self._guarded(path, self._clean)
        self._guarded(path, lambda: self._tidy(step))

    def load(self, which: str | Path | None = None, *, lazy: bool = False) -> Checkpoint:
        """Read a checkpoint: "last" (the default), "best", or one by its path or name.

        If the last or the best one is damaged, the next intact one is read, with a warning. With `lazy` the values of
        tensors are read when they are needed. Raises CheckpointError if there is none, or if the requested folder is
        damaged.
        """
        if which is None or which == LAST:
            return read_newest_intact(self.root, lazy=lazy)
        if which != BEST:
            path = Path(which)
            return read_checkpoint(path if path.exists() else self.root / path, lazy=lazy)
        ranked = best_first(self.all(), self.mode)
        if not ranked:
            raise CheckpointError(f'no checkpoint in {self.root} has a value of {self.monitor}; load "last" instead')
        folders = find_checkpoints(self.root)
        return read_first_intact([folders[entry.step] for entry in ranked], self.root, lazy=lazy)

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint, not verified, or None."""
        return next(reversed(find_checkpoints(self.root).values()), None)

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint, not verified, or None if none has a value."""
        ranked = best_first(self.all(), self.mode)
        return find_checkpoints(self.root)[ranked[0].step] if ranked else None

    def all(self) -> list[Entry]:
        """Return every checkpoint with its monitored value, oldest first."""
        return [self._entry(step, path) for step, path in find_checkpoints(self.root).items()]

    def save_modules(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Save a module, its optimizer and any other data (`extra`), for hand-written loops.

        Warns once if the folder holds a later step, for example of another run: `last` is always the latest step.
        """
        state = {
            "optimizer": None if optimizer is None else optimizer_state(optimizer, model),
            "extra": dict(extra or {}),
        }
        path = self.save(step, model_state=clean_state_dict(model), state=state, metrics=metrics)
        latest = max(find_checkpoints(self.root))
        if latest > step and not self._has_warned:
            self._has_warned = True
            _log.warning(
                f"{path} was saved, but {folder_name(latest)} is in the same folder and will be loaded as the last; "
                "if it belongs to another run, choose another folder or delete it"
            )
        return path

    def load_into(
        self, model: nn.Module, optimizer: Optimizer | None = None, which: str | Path | None = "last"
    ) -> dict[str, Any]:
        """Load what `save_modules` saved into the same kind of module and optimizer; return `extra`.

        Raises CheckpointError if they do not fit, before anything changes.
        """
        checkpoint = self.load(which)
        with errors_of(checkpoint.path):
            check_kind(_MODULES, checkpoint.state, "state")
            saved = checkpoint.state["optimizer"]
            if optimizer is not None and saved is None:
                raise CheckpointError("it has no optimizer state; load it without the optimizer")
            if optimizer is not None:
                check_optimizer(optimizer, model, saved)
            load_model_state(model, checkpoint.model_state)
            if optimizer is not None:
                load_optimizer_state(optimizer, model, saved)
        extra: dict[str, Any] = checkpoint.state["extra"]
        return extra

    def _saved_monitor(self) -> tuple[str | None, Mode | None]:
        """Return the metric that the newest readable checkpoint was saved with."""
        for path in reversed(find_checkpoints(self.root).values()):
            try:
                meta = read_meta(path)
                name, mode = meta.get("monitor"), meta.get("mode")
            except (CheckpointError, AttributeError):
                continue
            if isinstance(name, str) and mode in get_args(Mode):
                return name, mode
        return None, None

    def _guarded(self, path: Path, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise cannot_save(path, error) from error

    def _clean(self) -> None:
        if not self._cleaned:
            clean_leftovers(self.root)
            self._cleaned = True
        remove_copies(self.root)

    def _tidy(self, saved: int) -> None:
        """Update the links to the newest and the best, then delete checkpoints no longer needed."""
        entries = self.all()
        # Keep the one just saved even if a later step exists: that one may be damaged, so that we resumed before it.
        delete = to_delete(entries, self.keep_best, self.mode, protect={saved})
        ranked = best_first([entry for entry in entries if entry.step not in delete], self.mode)
        point(self.root, LAST, folder_name(entries[-1].step))
        point(self.root, BEST, folder_name(ranked[0].step) if ranked else None)
        folders = find_checkpoints(self.root)
        for step in delete:
            try:
                delete_folder(folders[step])
            except OSError as error:
                _log.warning("could not delete %s: %s", folders[step], error.strerror)

    def _entry(self, step: int, path: Path) -> Entry:
        try:
            metrics = read_meta(path).get("metrics", {})
            value = metrics.get(self.monitor)
            return Entry(step, None if value is None else float(value), float(metrics.get("phase", 0.0)))
        except (CheckpointError, ValueError, TypeError, AttributeError, OverflowError):
            return Entry(step)  # damaged: skipped with the reason when it is read


def locate_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder at a path: itself, or the newest intact one in a folder of checkpoints.

    A path that ends in `last` or `best` is also found if that is a text file, a broken link, or missing.
    """
    path = follow(path)
    if (path / MANIFEST).exists():
        return path
    if path.name in (LAST, BEST) and not path.is_dir():
        return CheckpointManager(path.parent).load(path.name).path
    found, warnings = newest_intact(path)
    for warning in warnings:
        _log.warning(warning)
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the metrics {dict(metrics)!r}: {error}; pass one number per name"
        ) from error
