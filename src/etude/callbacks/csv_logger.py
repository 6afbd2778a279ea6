"""One CSV row per epoch."""

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from etude.callbacks.monitored import resolve
from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core import RunFolderError
from etude.core.files import write_text
from etude.engine.callback import Callback, Logs, RunInfo

logger = logging.getLogger("etude")

_STATE = record_of("CSVLogger", {"rows": Annotated[int, Ge(0)] | None})


@register("callback", "csv_logger")
class CSVLogger(Callback):
    """Writes the metrics of every epoch as a row of `filename`; a new metric becomes a new column.

    An existing file is replaced, unless `append` is set. A resumed run continues its own file: rows of repeated
    epochs are replaced. A relative path is inside the run folder, if there is one. A new column replaces the file
    atomically; a full disk loses rows until there is space again, but never ends the run.
    """

    def __init__(self, filename: str, append: bool = False) -> None:
        super().__init__()
        self.filename, self.append = filename, append
        self._run: RunInfo | None = None
        self._rows: list[Mapping[str, Any]] | None = None
        """Contents of the file; None until it has been started."""
        self._columns: list[str] = []
        """Those of the file; none if it has to be written again."""
        self._resumed: int | None = None
        """Rows of the file that a resumed run keeps."""

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return `filename`."""
        return (arguments["filename"],)

    def on_train_begin(self, run: RunInfo) -> None:
        """Find the run folder, and start the file."""
        self._run = run
        if run.clock.step == 0:
            self._rows = self._resumed = None
        if run.is_main:
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the row."""
        if self._run is not None and not self._run.is_main:
            return
        rows, row = self._begin(), {"epoch": epoch, **logs}
        rows.append(row)
        try:
            if set(row) <= set(self._columns):
                with self._path.open("a", encoding="utf-8", newline="") as file:
                    file.write(_as_csv(self._columns, [row]))
            else:
                self._write(rows)
        except OSError as error:
            self._columns = []
            logger.warning(f"cannot write {self._path}: {error.strerror or error}; training continues")

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows in the file."""
        return {"rows": self._resumed if self._rows is None else len(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that many rows."""
        check_kind(_STATE, state, "state")
        self._rows, self._resumed = None, state["rows"]

    @property
    def _path(self) -> Path:
        return resolve(self.filename, self._run)

    def _begin(self) -> list[Mapping[str, Any]]:
        """Return the rows; at first, the kept rows of an existing file."""
        if self._rows is None:
            path = self._path
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                rows: list[Mapping[str, Any]] = []
                if path.exists() and (self.append or self._resumed is not None):
                    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                    # The last line lacks its end if a process was killed while it wrote it.
                    rows.extend(csv.DictReader(lines if lines and lines[-1].endswith("\n") else lines[:-1]))
                self._rows = rows[: self._resumed]
                self._write(self._rows)
            except OSError as error:
                raise RunFolderError(
                    f"CSVLogger cannot write {path}: {error.strerror or error}; choose a writable filename"
                ) from error
        return self._rows

    def _write(self, rows: list[Mapping[str, Any]]) -> None:
        """Replace the file: a column for every metric of any row."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        write_text(self._path, _as_csv(columns, [{name: name for name in columns}, *rows] if rows else []))
        self._columns = columns


def _as_csv(columns: list[str], rows: list[Mapping[str, Any]]) -> str:
    """Return rows as lines; a metric that a row does not have is an empty cell.

    >>> _as_csv(["epoch", "loss", "val_loss"], [{"epoch": 0, "loss": 0.5}, {"epoch": 1, "val_loss": 0.7}]).splitlines()
    ['0,0.5,', '1,,0.7']
    """
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
