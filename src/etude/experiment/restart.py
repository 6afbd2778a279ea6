"""Runs whose processes an elastic launcher restarts: they continue in the folder in which they have begun."""

import os
from dataclasses import dataclass
from pathlib import Path

from etude.config import dump_yaml
from etude.distributed import World
from etude.experiment.config import ExperimentConfig
from etude.launched import launch_id, process_id
from etude.monitor import RunFolder
from etude.monitor.run_folder import default_runs_dir


def is_restart() -> bool:
    """Whether an elastic launcher has restarted this process after losing one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@dataclass(frozen=True, slots=True)
class Launch:
    """The launchers of the processes of a run, one for each machine."""

    launchers: tuple[str, ...]
    """Their ids; empty without a launcher that restarts processes."""
    world: World

    @classmethod
    def of(cls, world: World) -> "Launch":
        """Return the launchers of all processes."""
        return cls(tuple(dict.fromkeys(one for one in world.gather_text(launch_id()) if one)), world)

    def begun(self, config: ExperimentConfig, run_dir: str | Path | None) -> RunFolder | None:
        """Return the folder in which processes of these launchers have begun this run; None if it is new.

        A machine may be lost and another one come: one launcher in common is enough.
        """
        found = self._find(config, run_dir) if self.launchers and self.world.is_main else None
        path = self.world.share_text("" if found is None else str(found.path))
        return RunFolder(path) if path else None

    def _find(self, config: ExperimentConfig, run_dir: str | Path | None) -> RunFolder | None:
        runs = default_runs_dir(config.name)
        paths = [Path(run_dir)] if run_dir is not None else sorted(runs.glob("*"), reverse=True)
        text = dump_yaml(config.to_dict()).encode()
        return next((folder for folder in map(RunFolder, paths) if self._is_own(folder, text)), None)

    def _is_own(self, folder: RunFolder, config: bytes) -> bool:
        launchers, process = folder.read_launch()
        # this very process has begun it: a program that trains twice, not a restart
        if process == process_id() or not set(launchers) & set(self.launchers):
            return False
        return not folder.holds_run or folder.config_path.read_bytes() == config

    def note(self, folder: RunFolder) -> RunFolder:
        """Record these launchers in the folder of a run."""
        if self.launchers and self.world.is_main:
            folder.note_launch(self.launchers, process_id())
        return folder
