"""Metrics as a table for other programs, and as a picture of many rows."""

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from etude.dashboard.catalogue import Run
from etude.dashboard.parsing import parse
from etude.dashboard.series import PART_BYTES, RunSeries
from etude.monitor.reading import METRICS, Follower

_PLACE = ("split", "step", "epoch", "time", "samples", "tokens")


def csv_lines(runs: list[Run], names: list[str], split: str | None) -> Iterator[bytes]:
    """Yield a CSV table with every record that has one of the metrics, a part at a time."""
    yield _csv([["run", *_PLACE, *names]])
    for run in runs:
        follower = Follower(run.path / METRICS)
        while lines := follower.lines(PART_BYTES):
            if follower.restarts:
                return  # replaced by a resume: what follows would not fit what was sent
            yield _csv(
                [run.key, *(record.get(key) for key in _PLACE), *(record.get(name) for name in names)]
                for record in parse(lines)
                if split in (None, record.get("split")) and any(name in record for name in names)
            )


def heatmap(series: RunSeries, split: str, prefix: str, axis: str, pixels: int) -> dict[str, Any]:
    """Return a row for every metric whose name starts with `prefix`, with the highest value of every bucket."""
    names = [name for name in series.names(split) if name.startswith(prefix)]
    rows = [series.points(split, name, axis) for name in names]
    x = np.unique(np.concatenate([row.x for row in rows])) if rows else np.empty(0)
    if len(x) > pixels:
        x = np.linspace(x[0], x[-1], pixels + 1)[1:]
    cells = np.full((len(rows), len(x)), np.nan)
    for cell, row in zip(cells, rows, strict=True):
        np.fmax.at(cell, np.minimum(np.searchsorted(x, row.x), len(x) - 1), row.high)
    return {"rows": [name[len(prefix) :] for name in names], "x": x, "cells": cells, "name": prefix}


def _csv(rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")
