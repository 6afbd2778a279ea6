"""The folder of a sweep as `etude sweep` leaves it, made without optuna."""

import json
from pathlib import Path
from typing import Any

from page_runs import EVIL, START, make

SPACE = {"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}, "model.act": {"values": ["relu", EVIL]}}


def trial(number: int, state: str, value: float | None, **more: Any) -> dict[str, Any]:
    params = {"optimizer.lr": 10.0 ** -(1 + number % 3), "model.act": SPACE["model.act"]["values"][number % 2]}
    place = {"number": number, "state": state, "value": value, "params": params, "runs": [f"trial-{number:04d}"]}
    return {**place, "start": START, "end": None if state == "running" else START + 60, "error": "", **more}


def write_trials(folder: Path, trials: list[dict[str, Any]], **more: Any) -> None:
    """Write the file of a sweep."""
    facts = {"name": "toy", "metric": "val_loss", "mode": "min", "total": 8, "time": START, "space": SPACE}
    content = {**facts, "importance": {"optimizer.lr": 0.75, "model.act": 0.25}, "trials": trials, **more}
    (folder / "trials.json").write_text(json.dumps(content))


def make_sweep(root: Path, key: str = "search") -> list[dict[str, Any]]:
    """Write a sweep of six trials with their runs; return the trials."""
    trials = [trial(number, "complete", value) for number, value in enumerate((0.9, 0.5, 0.7, 0.4))]
    trials += [trial(4, "pruned", 1.5), trial(5, "failed", None, error=f"it broke {EVIL}"), trial(6, "running", 0.6)]
    for one in trials:
        state = "finished" if one["state"] == "complete" else "interrupted"
        make(root, f"{key}/trial-{one['number']:04d}", name="toy", seed=one["number"], steps=100, state=state)
    write_trials(root / key, trials)
    return trials
