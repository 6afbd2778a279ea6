"""Does the advice of `etude profile` help? Each kind is provoked, followed, and profiled again.

python -m benchmarks.advice [--quick] [--json FILE] [--device cuda]
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import (
    NOT_RUN,
    Table,
    in_short,
    last_line,
    median,
    progress,
    publish,
    read_options,
    take_device,
)

ROUNDS, QUICK_ROUNDS = 4, 1
COMPONENTS = '''
import time
import torch
from torch import nn
from etude import DataSplits, TensorData, register

class Slow(torch.utils.data.Dataset):
    """Samples that take a while to make."""

    def __init__(self, work_us):
        self.work_us = work_us

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.work_us * 1e-6)
        return torch.full((64,), index / 4096), index % 4

@register("data", "slow")
def slow(work_us: float = 100.0) -> DataSplits:
    return DataSplits(Slow(work_us), num_classes=4)

@register("data", "random_rows")
def random_rows(features: int = 64, rows: int = 8192) -> DataSplits:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0))
    return DataSplits(TensorData(x, torch.arange(rows) % 4), num_classes=4)

@register("model", "elementwise")
class Elementwise(nn.Module):
    """A few matrix products and many elementwise kernels."""

    def __init__(self, features: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(64, features)
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.last = nn.Linear(features, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            x = x + torch.tanh(y) * torch.sigmoid(y) + torch.sin(y) * torch.exp(-y * y)
        return self.last(x)
'''


def mlp(width: int, depth: int = 2, features: int = 64) -> dict[str, Any]:
    return {"name": "mlp", "in_features": features, "hidden": [width] * depth, "out_features": 4}


def rows(features: int = 64) -> dict[str, Any]:
    return {"name": "random_rows", "features": features}


TRAINING = {"epochs": 50, "num_threads": 1, "batch_size": 64, "log_interval": 100, "checkpoint_interval": 50}
CPU = {
    "training.num_workers": {"model": mlp(256), "data": {"name": "slow", "work_us": 200.0}},
    "training.prefetch": {"model": mlp(64, features=4096), "data": rows(4096), "training": {"batch_size": 256}},
    "training.num_threads": {"model": mlp(1024), "data": rows(), "training": {"batch_size": 512}},
    "optimizer.kernel": {"model": mlp(512, 6), "data": rows(), "optimizer": {"name": "adamw", "kernel": "loop"}},
    "training.log_interval": {"model": mlp(64), "data": rows(), "training": {"log_interval": 1}},
    "training.save_every_steps": {"model": mlp(64), "data": rows(), "training": {"save_every_steps": 10}},
    "training.checkpoint_interval": {
        "model": mlp(64),
        "data": rows(),
        "training": {"batch_size": 4096, "checkpoint_interval": 1},
    },
}
CUDA = {
    "training.num_workers": CPU["training.num_workers"],
    "training.prefetch": {"model": mlp(256, features=16384), "data": rows(16384), "training": {"batch_size": 1024}},
    "training.pin_memory": {
        "model": mlp(256, features=16384),
        "data": rows(16384),
        "training": {"batch_size": 1024, "pin_memory": False},
    },
    "training.capture": {"model": mlp(256, 8), "data": rows(), "training": {"capture": "off"}},
    "training.precision": {
        "model": mlp(4096, 6),
        "data": rows(),
        "training": {"batch_size": 4096, "precision": "fp32", "save_checkpoints": False},
    },
    "training.compile": {
        "model": {"name": "elementwise"},
        "data": rows(),
        "training": {"batch_size": 4096, "save_checkpoints": False},
    },
    "optimizer.kernel": {
        "model": mlp(2048, 8),
        "data": rows(),
        "optimizer": {"name": "adamw", "kernel": "loop"},
        "training": {"capture": "off", "save_checkpoints": False},
    },
    "training.log_interval": CPU["training.log_interval"],
    "training.save_every_steps": CPU["training.save_every_steps"],
}
"""The setting that advice should name → an experiment that needs it."""


def profiled(folder: Path, steps: int, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "etude", "profile", "experiment.yaml", *overrides]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--out", "out"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    found: dict[str, Any] = json.loads((folder / "out/profile.json").read_text())
    return found


def measured(setting: str, experiment: dict[str, Any], device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Profile an experiment, follow the advice about a setting, and profile it again, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "components.py").write_text(COMPONENTS)
        training = {**TRAINING, **experiment.get("training", {}), "device": device}
        whole = {"optimizer": {"name": "adamw"}, **experiment, "training": training, "imports": ["components.py"]}
        (folder / "experiment.yaml").write_text(json.dumps(whole))
        first = profiled(folder, steps)
        advice = {one["change"]: one["saves"] for one in first["advice"]}
        change = next((one for one in advice if one.startswith(setting)), None)
        if change is None:
            return {"advice": setting, NOT_RUN: f"not given, but {', '.join(advice) or 'none'}"}
        overrides = re.findall(r"\S+=\S+", change.partition(" (")[0])
        before, after, promised = [first["step_ms"]], [], [advice[change]]
        for _ in range(rounds):
            after.append(profiled(folder, steps, *overrides)["step_ms"])
            again = profiled(folder, steps)
            before.append(again["step_ms"])
            promised += [one["saves"] for one in again["advice"] if one["change"].startswith(setting)]
    old, new = min(before), min(after)  # of turns that other programs disturbed the least
    row = {"advice": " ".join(overrides), "before": old, "after": new, "saved": 100 * (1 - new / old)}
    return {**row, "at most": 100 * (median(promised) or 0.0)}


def main(argv: Sequence[str] | None = None) -> None:
    device, rest = take_device(argv)
    options = read_options(__doc__, rest)
    rounds, steps = (QUICK_ROUNDS, 5) if options.quick else (ROUNDS, 50)
    columns = {"advice": "", "before": ".3f", "after": ".3f", "saved": ".0f", "at most": ".0f"}
    how = (
        f"Milliseconds per step, the best of {rounds} profiles of {steps} steps in turns, and what the advice saved in "
        "per cent; last, what it promised at most."
    )
    table = Table("The advice of `etude profile`, followed", columns, how)
    for setting, experiment in (CUDA if device.type == "cuda" else CPU).items():
        progress(f"advice: {setting}")
        try:
            table.rows.append(measured(setting, experiment, device.type, rounds, steps))
        except RuntimeError as error:
            table.rows.append({"advice": setting, NOT_RUN: in_short(error)})
    publish("advice", [table], options, device=device.type)


if __name__ == "__main__":
    main()
