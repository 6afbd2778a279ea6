"""Pass a run on to Weights & Biases."""

import uuid
from html import escape
from typing import Annotated, Any, Literal

from annotated_types import Gt

from etude.callbacks.sinks.base import ServiceSink, import_package, scalars, settings_of
from etude.callbacks.sinks.worker import PAUSE_S
from etude.config.registry import register
from etude.core import ConfigError
from etude.core.arguments import checked
from etude.engine.callback import RunInfo
from etude.monitor.events import Event, MediaLogged, MetricsEvent, RunEnded, RunStarted


class LogsBySteps(ServiceSink):
    """Base class of sinks to packages with the calls of wandb."""

    _run: Any = None
    """The run there."""
    _end_event: RunEnded | None = None

    def begin(self, run: RunInfo) -> None:
        """Forget an earlier run."""
        super().begin(run)
        self._run = self._end_event = None

    def log_events(self, events: list[Event]) -> None:
        """Log metrics and media by step."""
        for event in events:
            if isinstance(event, MetricsEvent):
                self._run.log(scalars(event), step=event.step)
            elif isinstance(event, MediaLogged):
                self._run.log({event.name: self._media(event)}, step=event.step)
            elif isinstance(event, RunEnded):
                self._end_event = event

    def _media(self, event: MediaLogged) -> Any:
        tool = import_package(self.label, self.label)
        if event.media == "matrix":
            rows = event.data["matrix"]
            names = [str(name) for name in event.data.get("classes") or range(len(rows))]
            table = [[name, *row] for name, row in zip(names, rows, strict=True)]
            return tool.Table(columns=["true", *names], data=table)
        return tool.Image(event.data) if event.media == "image" else tool.Html(f"<pre>{escape(event.data)}</pre>")


@register("callback", "wandb")
class WandbLogger(LogsBySteps):
    """Logs metrics, config, texts, matrices and the outcome to Weights & Biases; a resumed run has the same id.

    With `mode: offline` nothing is sent: `wandb sync` sends the folder later. Its files are in the run folder. Of log
    points that come faster than `points_per_s` only some are sent.
    """

    label = "wandb"
    package = "wandb"
    holds_last_step = True  # a validation may add to it

    @checked
    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        points_per_s: Annotated[float, Gt(0.0)] | None = 4.0,
    ) -> None:
        super().__init__(points_per_s)
        self._arguments: dict[str, Any] = {
            "project": project,
            "name": name,
            "entity": entity,
            "group": group,
            "tags": tags,
        }
        self.mode = mode

    def begin(self, run: RunInfo) -> None:
        """Check that there are credentials, which nobody could enter during the training."""
        import wandb

        super().begin(run)
        mode = self.mode or wandb.setup().settings.mode
        if mode == "online" and not wandb.login(verify=False, prompt=False):
            raise ConfigError("wandb is not logged in: run `wandb login`, set WANDB_API_KEY, or set mode: offline")
        self._is_online = mode == "online"

    def open_run(self, start: RunStarted) -> None:
        """Begin the run there, or continue it."""
        import wandb

        self.run_id = self.run_id or uuid.uuid4().hex[:8]
        self.save()
        # A process that is killed loses what wandb has not written to its file, by default that of 15 s.
        flush = "x_transaction_log_flush_interval"
        soon: dict[str, Any] = {flush: PAUSE_S} if flush in wandb.Settings.model_fields else {}
        known = {key: value for key, value in self._arguments.items() if value is not None}
        self._run = wandb.init(
            **{"name": start.name, **known},
            id=self.run_id,
            resume="allow" if self._is_online else None,
            reinit="create_new",
            dir=start.run_dir,
            mode=self.mode,
            config=settings_of(start),
            settings=wandb.Settings(console="off", silent=True, **soon),
        )

    def close_run(self) -> None:
        """Write the summary and end the run there."""
        end = self._end_event
        if end is not None:
            self._run.summary.update({**end.metrics, "status": end.status, "reason": end.message})
        self._run.finish(exit_code=int(end is None or end.status in ("failed", "interrupted")))
        self.save()
