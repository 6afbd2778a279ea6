"""Profiling an experiment: its first steps in a run folder that is removed, and the profile of them."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.callbacks.profiler import SETTLING, TRACED, Profiler
from etude.callbacks.profiling.profile import Profile
from etude.config import Selection
from etude.config.registry import Component
from etude.core import ConfigError, RunFolderError, TrainingError
from etude.distributed import before_joining
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.experiment.build import build_trainer
from etude.experiment.config import ExperimentConfig, load_experiment_config
from etude.experiment.opened import joined_world
from etude.monitor import RunFolder, default_run_dir
from etude.trainer import Trainer, TrainerConfig

SETTLE = 5
"""Steps between the first log point, which may measure the device, and the first profiled step."""
_IN_STEPS = ("prepare", "on_step_begin", "on_gradients", "on_step_end", "device_update", "numbers", "on_log")


def profile_experiment(
    experiment: str | Path | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    steps: int = 20,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[Profile, Path]:
    """Train an experiment for as many steps as a profile needs; return the profile, and the folder of its files.

    `steps` are profiled. The folder is `profiles/EXPERIMENT/TIME` by default. Nothing is validated, callbacks that
    send metrics elsewhere are left out, and no run folder remains. Raises KeyboardInterrupt if a signal stops it,
    TrainingError if the run ends before the profile is complete, RunFolderError if the profile cannot be written.
    """
    with before_joining():
        config = (
            experiment
            if isinstance(experiment, ExperimentConfig)
            else load_experiment_config(experiment, overrides=overrides)
        )
    with joined_world(config.training.device) as world:
        if world.size > 1:
            raise ConfigError(
                "etude profile trains in one process; start it without torchrun, or add the callback profiler to a run"
            )
        with _folders(config, out) as (path, folder):
            profiler = _OnlyProfile(config.training, steps, path)
            shortened, left_out = _shortened(config, steps, profiler.needed)
            if left_out:
                say(f"left out: {', '.join(left_out)}")
            trainer = build_trainer(shortened, folder=folder, world=world, progress=False, callbacks=[profiler])
            say(f"{config.name}: profiling up to {profiler.needed} steps on {trainer.machine.device}")
            trainer.train(_epochs(trainer, profiler.needed))
            if profiler.profile is None:
                if trainer.was_interrupted:
                    raise KeyboardInterrupt
                reason = trainer.callbacks.control.reason
                raise TrainingError(
                    f"the run ended after {trainer.state.clock.step} steps{f' ({reason})' * bool(reason)}, before the "
                    "profile was complete; pass fewer --steps, or remove what ends it"
                )
            if profiler.problem is not None:
                say(str(profiler.profile))
                reason = getattr(profiler.problem, "strerror", None) or str(profiler.problem)
                raise RunFolderError(f"cannot write the profile to {path}: {reason}; choose another --out")
            return profiler.profile, path


class _OnlyProfile(Profiler):
    """Saves one checkpoint in the profiled steps, to time it, and ends the run after them."""

    def __init__(self, training: TrainerConfig, steps: int, folder: Path) -> None:
        super().__init__(start=steps + SETTLE, steps=steps, folder=str(folder.resolve()))
        self.needed = self.start + 2 * steps + SETTLING + TRACED
        self._training = training
        self.problem: Exception | None = None
        """Why the profile could not be written."""

    def bind(self, parts: RunParts) -> None:
        """Keep the settings of the experiment: those of the run differ."""
        super().bind(parts)
        self.settings = dict(self._training)

    def begin(self, run: RunInfo) -> None:
        """Ask for a checkpoint."""
        super().begin(run)
        self.control.save = True

    def finish(self, run: RunInfo) -> None:
        """End the run, as if by a signal: it is not complete."""
        super().finish(run)
        self.control.request_stop("profiled", by_signal=True)

    def write(self, folder: Path) -> None:
        """Keep the reason if the files cannot be written: `profile_experiment` reports it."""
        try:
            super().write(folder)
        except (OSError, RuntimeError) as error:
            self.problem = error

    def on_train_end(self, result: Logs) -> None:  # noqa: ARG002
        """Stop watching: `profile_experiment` says why there is no profile."""
        self._leave()


@contextlib.contextmanager
def _folders(config: ExperimentConfig, out: str | Path | None) -> Iterator[tuple[Path, RunFolder]]:
    """Return the folder of the result, and a run folder in it that is removed at the end."""
    path = Path(out) if out is not None else default_run_dir(config.name, "profiles")
    folder = RunFolder.create(path / ".run", overwrite=True)
    try:
        yield path, folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is a profile in it
            os.removedirs(path) if out is None else path.rmdir()


def _shortened(config: ExperimentConfig, steps: int, needed: int) -> tuple[ExperimentConfig, list[str]]:
    """Return a config with a log point in the profiled steps, without validation; and the callbacks left out."""
    training: TrainerConfig = config.sections["training"]
    changes: dict[str, Any] = {
        "log_interval": min(training.log_interval, steps),
        "validate_interval": 0,
        "validate_every_steps": None,
        "sanity_val_batches": 0,
        "checkpoint_dir": None,
        "max_steps": None if training.max_steps is None else max(training.max_steps, needed),
        "restore_best": False,
    }
    callbacks: list[Selection] = config.sections.get("callbacks") or []
    sends = [one for one in callbacks if getattr(one.component.factory, "listens", False)]
    kept = [one for one in callbacks if one not in sends and _is_in_steps(one.component)]
    left_out = [one.component.name for one in sends]
    sections = {**config.sections, "training": training.model_copy(update=changes), "callbacks": kept}
    return replace(config, sections=sections), left_out


def _is_in_steps(callback: Component) -> bool:
    """Whether a callback may cost time in steps; not if it acts on epochs and validations only, or profiles itself."""
    methods = ((getattr(callback.factory, name, None), getattr(Callback, name)) for name in _IN_STEPS)
    return callback.name != "profiler" and any(own is not usual for own, usual in methods)


def _epochs(trainer: Trainer, needed: int) -> int | None:
    """Return the number of epochs that have enough steps; None if those of the config do."""
    total, per_epoch = trainer.total_steps, trainer.loaders.steps_per_epoch
    return -(-needed // per_epoch) if total is not None and total < needed and per_epoch else None
