"""Pass a run on to Trackio."""

import uuid
from typing import Annotated

from annotated_types import Gt

from etude.callbacks.sinks.base import settings_of
from etude.callbacks.sinks.wandb import LogsBySteps
from etude.config.registry import register
from etude.core.arguments import checked
from etude.engine.callback import RunInfo
from etude.monitor.events import RunStarted


@register("callback", "trackio")
class TrackioLogger(LogsBySteps):
    """Logs metrics, config, texts and matrices to Trackio, in a local database or the space `space_id`.

    A resumed run continues the run of the same name. Of log points that come faster than `points_per_s` only some are
    logged.
    """

    label = "trackio"
    package = "trackio"

    @checked
    def __init__(
        self,
        project: str = "etude",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        points_per_s: Annotated[float, Gt(0.0)] | None = 1.0,
    ) -> None:
        super().__init__(points_per_s)
        self.project, self.name, self.group, self.space_id = project, name, group, space_id

    def begin(self, run: RunInfo) -> None:
        """Choose a name: Trackio continues runs by name."""
        super().begin(run)
        self.run_id = self.run_id or self.name or f"{run.name}-{uuid.uuid4().hex[:8]}"

    def open_run(self, start: RunStarted) -> None:
        """Begin the run there, or continue it."""
        import trackio

        if self._written and self.space_id is None:
            self._forget_lost()
        self.save()
        self._run = trackio.init(
            self.project,
            name=self.run_id,
            group=self.group,
            space_id=self.space_id,
            resume="allow" if self._written else "never",
            config=settings_of(start),
            embed=False,
        )

    def _forget_lost(self) -> None:
        """Log again what a killed process had passed to Trackio, which writes half a second later."""
        from trackio.sqlite_storage import SQLiteStorage

        kept = dict.fromkeys(self._written, -1)
        for log in SQLiteStorage.get_logs(self.project, self.run_id):
            for curve in {name.partition("/")[0] for name in log} | {f"media/{name}" for name in log}:
                if curve in kept:
                    kept[curve] = max(kept[curve], int(log["step"]))
        self._written = {curve: min(step, kept[curve]) for curve, step in self._written.items()}

    def close_run(self) -> None:
        """End the run there."""
        self._run.finish()
