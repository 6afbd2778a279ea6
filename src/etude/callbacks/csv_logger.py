"""One CSV row per epoch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from etude.callbacks.paths import resolve
from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core import RunFolderError
from etude.engine.callback import Callback, Logs, RunInfo
from etude.monitor import CsvSink, read_rows
from etude.monitor.sinks import rewrite_csv

_STATE = record_of("CSVLogger", {"rows": Annotated[int, Ge(0)] | None})


@register("callback", "csv_logger")
class CSVLogger(Callback):
    """Writes the numbers of every epoch as a row of `filename`; a new number becomes a new column.

    A file that is there is replaced, unless `append` is set. A resumed run goes on in its own file: rows of epochs
    that are trained again are replaced. A relative path lies in the run folder, if there is one.
    """

    def __init__(self, filename: str, append: bool = False) -> None:
        super().__init__()
        self.filename, self.append = filename, append
        self._run: RunInfo | None = None
        self._sink: CsvSink | None = None
        self._rows: int | None = None
        """Rows the file has; None until it has been begun."""

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return `filename`."""
        return (arguments["filename"],)

    def on_train_begin(self, run: RunInfo) -> None:
        """Learn where the run folder is, and begin the file."""
        self._close()
        self._run = run
        if run.clock.step == 0:
            self._rows = None
        if run.is_main:
            self._sink = self._open()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the row."""
        if self._run is not None and not self._run.is_main:
            return
        if self._sink is None:
            self._sink = self._open()
        self._sink.write({"epoch": epoch, **logs})
        self._rows = (self._rows or 0) + 1

    def on_train_end(self, result: Logs) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows the file has."""
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that many rows."""
        check_kind(_STATE, state, "state")
        self._close()
        self._rows = state["rows"]

    def _open(self) -> CsvSink:
        path, rows = resolve(self.filename, self._run), self._rows
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if rows is not None:
                index = itertools.count()
                rewrite_csv(path, keep=lambda _: next(index) < rows)
            elif not self.append:
                path.unlink(missing_ok=True)
            self._rows = len(read_rows(path))
        except OSError as error:
            raise RunFolderError(
                f"CSVLogger cannot write {path}: {error.strerror or error}; give a writable filename"
            ) from error
        return CsvSink(path)

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None
