"""Run folders as a trainer leaves them, made without training."""

import json
from pathlib import Path
from typing import Any

START = 1_700_000_000.0


def make_run(
    folder: Path,
    records: list[dict[str, Any]] | None = None,
    *,
    state: str | None = "finished",
    config: str = "name: toy\ntraining:\n  epochs: 2\n",
    events: list[dict[str, Any]] | None = None,
    **start: Any,
) -> Path:
    """Write a run folder; `start` are more facts of its first event."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    first = {
        "time": START,
        "kind": "start",
        "step": 0,
        "epoch": 0,
        "name": "toy",
        "monitor": "val_loss",
        "mode": "min",
    }
    last = {"time": START + 1000, "kind": "end", "step": 10, "epoch": 1, "status": state}
    write(folder / "events.jsonl", [first | start, *(events or []), *([last] if state else [])])
    write(folder / "metrics.jsonl", records or [])
    return folder


def write(path: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    """Write records as lines."""
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def train(step: int, time: float | None = None, **values: Any) -> dict[str, Any]:
    """Return the record of a log point."""
    return {"step": step, "epoch": 0, "split": "train", "time": START + step if time is None else time, **values}
