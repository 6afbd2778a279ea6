"""Small runs with an output_dir."""

import json
from pathlib import Path

import torch
from torch import nn

from etude import Callback, Trainer

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
STEPS = 3  # per epoch
COMPONENTS = Path(__file__).parents[1] / "cli" / "cli_components.py"
EXPERIMENT = f"""
imports: [{COMPONENTS}]
model: {{name: cli_net}}
data: {{name: cli_points}}
training:
  epochs: 2
  batch_size: 8
  device: cpu
"""


def trainer(folder, *, lr=0.01, callbacks=(), **options):
    torch.manual_seed(0)
    config = {"epochs": 2, "batch_size": 8, "learning_rate": lr, "device": "cpu", "log_interval": 1, "keep_best": 1}
    config |= options.pop("config", {})
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    return Trainer(
        model, (X, Y), (X, Y), config=config, callbacks=callbacks, output_dir=folder, progress=False, **options
    )


def files(folder):
    """Return every file with its bytes; which process held the lock last does not count."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


class Fail(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_step_begin(self, step):
        if step == self.step:
            raise RuntimeError("boom")


def read(folder, name):
    return json.loads((folder / name).read_text())
