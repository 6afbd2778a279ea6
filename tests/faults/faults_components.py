"""What the experiments of the fault tests are made of: random data, dropout and batch norm, and a gate to stop at."""

import time
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from etude import Callback, register
from etude.data import DataSplits, TensorData

FEATURES, CLASSES, PATIENCE_S = 12, 3, 120


class Spoil:
    """Makes NaN of the batches whose numbers, counted from 0, are given."""

    def __init__(self, first: int | None, count: int) -> None:
        self.first, self.count, self.seen = first, count, 0

    def __call__(self, batch: Tensor) -> Tensor:
        number, self.seen = self.seen, self.seen + 1
        if self.first is None or not self.first <= number < self.first + self.count:
            return batch
        return batch * float("nan")


@register("data", "faults_points")
def points(
    samples: Annotated[int, Ge(0)] = 96,
    nan_from: int | None = None,
    nan_batches: int = 1_000_000,
    nan_validation: bool = False,
) -> DataSplits:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    train = TensorData(x, y, Spoil(nan_from, nan_batches))
    validation = TensorData(x[:40], y[:40], Spoil(0 if nan_validation else None, 1_000_000))
    return DataSplits(train, validation, num_classes=CLASSES)


@register("model", "faults_net")
def net(width: int = 24, dropout: float = 0.3) -> nn.Module:
    first, last = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
    drop = nn.Dropout(dropout) if dropout else nn.Identity()
    return nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), drop, last)


@register("callback", "faults_gate")
class Gate(Callback):
    """After step `at` says so by a file `reached` in `folder`, and waits there until it holds a file `open`."""

    def __init__(self, at: int, folder: str) -> None:
        super().__init__()
        self.at, self.folder = at, Path(folder)

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_step_end(self, report):
        if self.clock.step != self.at:
            return
        (self.folder / "reached").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / "open").exists():
            assert time.monotonic() < deadline, "nobody opened the gate"
            time.sleep(0.002)
