"""Pass a run on to MLflow."""

import logging
import re
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt

from etude.callbacks.sinks.base import ServiceSink, scalars, settings_of
from etude.config.registry import register
from etude.core.arguments import checked
from etude.monitor.events import Event, MediaLogged, MetricsEvent, RunEnded, RunStarted
from etude.monitor.reading import flat
from etude.monitor.run_folder import RunFolder

_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 500
"""Limits of MLflow for one request."""


@register("callback", "mlflow")
class MLflowLogger(ServiceSink):
    """Logs metrics, parameters, texts, matrices, config.yaml and the status to an MLflow tracking server or database.

    A resumed run continues its MLflow run. Of log points that come faster than `points_per_s` only some are logged.
    """

    label = "mlflow"
    package = "mlflow"
    pause_s = 2.0  # one request of many metrics costs a database little more than one of few

    @checked
    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "etude",
        name: str | None = None,
        points_per_s: Annotated[float, Gt(0.0)] | None = 1.0,
    ) -> None:
        """Without `tracking_uri` MLflow finds it, by the variable MLFLOW_TRACKING_URI or its own default.

        A request takes a database 4 ms of CPU time or more, and 0.5 ms per log point: they are sent every 2 seconds.
        """
        super().__init__(points_per_s)
        self.tracking_uri, self.experiment, self.name = tracking_uri, experiment, name
        self._client: Any = None
        self._status = "KILLED"

    def open_run(self, start: RunStarted) -> None:
        """Begin the run there, or continue it."""
        from mlflow import MlflowClient

        self._status = "KILLED"
        # It logs a traceback for every request that fails; the sink reports the first in one line.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        client = self._client = MlflowClient(self.tracking_uri)
        if not self.run_id:
            self.run_id = client.create_run(self._experiment_id(), run_name=self.name or start.name).info.run_id
            self.save()
        else:
            client.update_run(self.run_id, status="RUNNING")
        self._log_params(start)
        if start.run_dir is not None and (config := RunFolder(start.run_dir).config_path).exists():
            client.log_artifact(self.run_id, str(config))

    def _experiment_id(self) -> str:
        """Return the id of the experiment, which is made if there is none; another run may make it meanwhile."""
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(self.experiment)) is None:
            try:
                return str(self._client.create_experiment(self.experiment))
            except MlflowException:
                if (found := self._client.get_experiment_by_name(self.experiment)) is None:
                    raise
        return str(found.experiment_id)

    def log_events(self, events: list[Event]) -> None:
        """Log metrics by step, many in one request, and media as artifacts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), value, int(event.time * 1000), event.step)
            for event in events
            if isinstance(event, MetricsEvent)
            for name, value in scalars(event).items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST_METRICS])
        for event in events:
            if isinstance(event, MediaLogged):
                self._log_media(event)
            elif isinstance(event, RunEnded):
                self._status = _STATUS[event.status]

    def close_run(self) -> None:
        """Write how the run ended."""
        self._client.set_terminated(self.run_id, self._status)

    def _log_params(self, start: RunStarted) -> None:
        """Log the config; parameters that are there already cannot be changed."""
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        given = {_name(name): str(value)[:_MOST_CHARACTERS] for name, value in flat(settings_of(start)).items()}
        params = [Param(name, value) for name, value in given.items() if name not in known]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + _MOST_PARAMS])

    def _log_media(self, event: MediaLogged) -> None:
        place = f"{_name(event.name)}/step-{event.step:08d}"
        if event.media == "text":
            self._client.log_text(self.run_id, event.data, f"{place}.txt")
        elif event.media == "matrix":
            self._client.log_dict(self.run_id, event.data, f"{place}.json")
        else:
            self._client.log_artifact(self.run_id, event.data, str(Path(place).parent))


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows.

    >>> _name("val/top@5")
    'val/top_5'
    """
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
