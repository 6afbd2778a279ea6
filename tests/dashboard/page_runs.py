"""A folder of runs for the page: seeds, several tasks, layers, phases, a resume, NaN, matrices, texts, evil names."""

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_790_000_000.0
PER_EPOCH = 100
SPIKE = 305
EVIL = '<img src=x onerror="document.title=1">'
LAYERS = ("conv1.weight", "conv2.weight", "fc.weight")
CLASSES = ("cat", "dog", EVIL)


def write_lines(path: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def train_record(step: int, loss: float | None, rate: float = 0.1, time: float | None = None) -> dict[str, Any]:
    place = {"step": step, "epoch": step // PER_EPOCH, "split": "train", "time": time or START + step}
    rates = {"samples_per_s": 640.0, "data_wait": 0.3, "lr": rate}
    return {**place, "samples": 64 * step, "tokens": 640 * step, "loss": loss, "grad_norm": 1 / step, **rates}


def make(
    root: Path,
    key: str,
    *,
    name: str = "",
    rate: float = 0.1,
    seed: int = 0,
    steps: int = 400,
    state: str = "finished",
) -> Path:
    """Write a run of `steps` log points and a validation every `PER_EPOCH`."""
    folder = root / key
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    config = {"name": name or key, "optimizer": {"learning_rate": rate}, "training": {"seed": seed, "epochs": 4}}
    (folder / "config.yaml").write_text(json.dumps(config))
    total = {"total_steps": 400, "total_epochs": 4, "steps_per_epoch": PER_EPOCH, "parameters": 1000}
    first = {"kind": "start", "time": START, "step": 0, "epoch": 0, "name": name or key, "device": "cpu", **total}
    events: list[dict[str, Any]] = [{**first, "monitor": "val_loss", "mode": "min"}]
    records, best = [], None
    for step in range(1, steps + 1):
        loss = 2 * math.exp(-step * rate / 40) + 0.1 + 0.02 * rng.random()
        records.append(train_record(step, 50.0 if step == SPIKE else loss, rate))
        if step % PER_EPOCH == 0:
            value = {"val_loss": loss * 1.1, "val_accuracy": 1 - loss / 3}
            records.append({**{key: records[-1][key] for key in ("step", "epoch", "time")}, "split": "val", **value})
            best = {"value": loss * 1.1, "step": step, "epoch": step // PER_EPOCH}
            path = f"checkpoints/step-{step:08d}"
            events.append({"kind": "checkpoint", "time": START + step, "step": step, "epoch": 0, "path": path})
    events.append({"kind": "end", "time": START + steps, "step": steps, "epoch": 4, "status": state, "message": ""})
    judged = {"monitor": "val_loss", "mode": "min", "best": best, "last": best}
    status = {"time": START + steps, "state": state, "step": steps, "epoch": steps // PER_EPOCH, **judged}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "env.json").write_text(json.dumps({"torch": "2.11", "git": {"commit": f"abc{seed}"}}))
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "events.jsonl", events)
    return folder


def edit(path: Path, change: Any) -> None:
    """Change every record of a file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [change(record) for record in records])


def make_tasks(root: Path) -> None:
    """Write a run of two tasks with phases, a resume, a warning, gradients of layers, texts and a matrix."""
    folder = make(root, "several/tasks", seed=7)

    def add(record: dict[str, Any]) -> dict[str, Any]:
        if record["split"] == "val":
            return {**record, "val_parse/loss": 0.5, "val_name/loss": 0.7}
        own = {"parse/loss": 0.4, "parse/weight": 0.25, "name/loss": 0.6, "name/weight": 0.75}
        norms = {f"grad_norm/{layer}": 10.0**-i for i, layer in enumerate(LAYERS)}
        return {**record, **own, **norms}

    edit(folder / "metrics.jsonl", add)
    place = {"time": START + 5, "epoch": 0}
    more = [
        {"kind": "phase", **place, "step": 0, "message": "phase 1", "phase": "first"},
        {"kind": "phase", **place, "step": 200, "message": "phase 2", "phase": "second"},
        {"kind": "resume", **place, "step": 150, "message": "resumed", "resumed": True},
        {"kind": "warning", **place, "step": 250, "message": "the gradient vanishes"},
    ]
    write_lines(folder / "events.jsonl", more, "a")
    media = []
    for step in (100, 200, 300):
        matrix = {"classes": CLASSES, "matrix": [[step, 1, 0], [2, step, 3], [0, 4, step]]}
        media.append({"step": step, "epoch": 0, "name": "confusion_matrix", "media": "matrix", "data": matrix})
        text = f"sample at {step} <script>document.title='evil'</script>"
        media.append({"step": step, "epoch": 0, "name": "samples", "media": "text", "data": text})
    write_lines(folder / "media.jsonl", [{"time": START, "kind": "media", **one} for one in media])


def make_all(root: Path) -> None:
    """Write all runs."""
    for rate in (0.1, 0.3):
        for seed in (0, 1):
            make(root, f"sweep/rate{rate}-seed{seed}", name="mlp", rate=rate, seed=seed)
    make_tasks(root)
    make(root, "evil/<b>&amp;", name=EVIL, seed=3, steps=120, state="failed")
    bad = make(root, "not/finite", seed=4)
    edit(bad / "metrics.jsonl", lambda one: {**one, "loss": None} if one["step"] == 50 and "loss" in one else one)
