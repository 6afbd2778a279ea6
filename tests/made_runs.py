"""Run folders as a run leaves them, written by hand: finished, running, dead, cut off or full of NaN."""

import json
import time
from pathlib import Path
from typing import Any


def make_run(
    folder: Path,
    losses: list[float | None] = (1.0, 0.5, 0.25, 0.5),
    *,
    state: str = "finished",
    config: dict[str, Any] | None = None,
    started: float | None = None,
    per_epoch: int = 2,
    beat_age_s: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a run with a log point per step and a validation (twice the loss) per epoch; None is a NaN."""
    folder.mkdir(parents=True)
    began = time.time() - 100 if started is None else started
    settings = {"name": "toy", "training": {"epochs": 2, "seed": 0}, "optimizer": {"name": "adamw", "lr": 0.1}}
    (folder / "config.yaml").write_text(json.dumps(settings | (config or {})))
    metrics, best, last = [], None, None
    for step, loss in enumerate(losses, 1):
        place = {"step": step, "epoch": (step - 1) // per_epoch, "time": began + step}
        bad = {"nonfinite": ["loss"]} if loss is None else {}
        metrics.append(
            {**place, "split": "train", "samples": 8 * step, "loss": loss, "lr": 0.1, **(extra or {}), **bad}
        )
        if step % per_epoch == 0:
            value = None if loss is None else 2 * loss
            bad = {"nonfinite": ["val_loss"]} if loss is None else {}
            last = {"value": value, "step": step, "epoch": step // per_epoch}
            best = last if value is not None and (best is None or value < best["value"]) else best
            metrics.append({**place, "split": "val", "val_loss": value, **bad})
            metrics.append({**place, "split": "epoch", "loss": loss, "val_loss": value, "epoch_s": 2.0, **bad})
    lines(folder / "metrics.jsonl", metrics)
    start = {"time": began, "kind": "start", "step": 0, "epoch": 0, "message": "toy started", "name": "toy"}
    start |= {"total_steps": 4, "total_epochs": 2, "steps_per_epoch": per_epoch, "parameters": 1234, "device": "cpu"}
    events = [start | {"monitor": "val_loss", "mode": "min"}]
    ends = state not in ("running", "lost")
    if ends:
        events.append({"time": began + len(losses), "kind": "end", "step": len(losses), "status": state})
    lines(folder / "events.jsonl", events)
    beat = {"time": time.time() - beat_age_s, "state": state if ends else "running", "step": len(losses)}
    beat |= {"epoch": len(losses) // per_epoch, "monitor": "val_loss", "mode": "min", "best": best, "last": last}
    (folder / "status.json").write_text(json.dumps(beat | {"interval_s": 5.0}))
    (folder / "env.json").write_text(json.dumps({"versions": {"torch": "2.11"}, "time": str(began)}))
    if state == "finished":
        result = {"status": state, "step": len(losses), "monitor": "val_loss", "mode": "min"}
        (folder / "result.json").write_text(json.dumps(result | {"best": best, "last": last}))
    return folder


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
