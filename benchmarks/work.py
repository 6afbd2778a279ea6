"""The work every contestant does: the same model, data and steps, and a probe that times them from inside."""

import contextlib
import fcntl
import math
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.counters import InstructionCounter

BATCH_SIZE = 64
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
LOG_EVERY = 100


class Batches:
    """Batches made beforehand. Not a plain list, which some trainers take for a list of loaders."""

    def __init__(self, data: Tensor, labels: Tensor) -> None:
        self._batches = list(zip(data.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


class Mark(NamedTuple):
    wall: float
    cpu: float
    instructions: int | None


class Probe:
    """Reads the clocks at two forward passes: before them lies the warm-up, between them `num_steps` whole steps."""

    def __init__(self, warmup: int, num_steps: int, counter: InstructionCounter) -> None:
        self.num_steps = num_steps
        self.marks: list[Mark] = []
        self._counter = counter
        self._calls = 0
        self._due = warmup + 1

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == self._due:
            self.marks.append(Mark(time.perf_counter(), time.process_time(), self._counter.read()))
            self._due += self.num_steps

    def per_step(self) -> Mark:
        """Return microseconds of wall and CPU time, and instructions, per step."""
        begin, end = self.marks[:2]
        steps = self.num_steps
        instructions = None
        if begin.instructions is not None and end.instructions is not None:
            instructions = (end.instructions - begin.instructions) // steps
        return Mark((end.wall - begin.wall) / steps * 1e6, (end.cpu - begin.cpu) / steps * 1e6, instructions)


class ProbedMLP(nn.Module):
    """32 → 64 → 10, with the probe in its forward pass: the same few nanoseconds for everyone."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.probe = probe

    def forward(self, x: Tensor) -> Tensor:
        self.probe()
        return self.layers(x)


@dataclass(frozen=True)
class Work:
    """What one contestant is given for one run of `num_steps` steps, which are one epoch."""

    data: Tensor
    labels: Tensor
    batches: Batches | None
    """The same batches for everyone, made beforehand; or None, then everyone loads from the tensors."""
    num_steps: int
    save_every: int
    """For those that save while they are timed: this falls into the timed stretch once."""
    folder: Path
    probe: Probe

    def model(self) -> ProbedMLP:
        torch.manual_seed(0)
        return ProbedMLP(self.probe)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate: a half cosine."""
        return 0.5 * (1.0 + math.cos(math.pi * min(step / self.num_steps, 1.0)))

    def optimizer(
        self, model: nn.Module, *, fused: bool | None = True
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return torch's AdamW and the schedule, stepped after every step."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)

    def cheapest_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches as someone would who writes the loop by hand and has the data in memory."""
        if self.batches is not None:
            yield from self.batches
            return
        for index in torch.randperm(len(self.data)).split(BATCH_SIZE):
            yield self.data[index], self.labels[index]

    def torch_loader(self) -> Batches | DataLoader[tuple[Tensor, ...]]:
        """Return the loader that other trainers are given: the batches themselves, or torch's DataLoader."""
        if self.batches is not None:
            return self.batches
        return DataLoader(TensorDataset(self.data, self.labels), batch_size=BATCH_SIZE, shuffle=True)


def make_data(num_steps: int) -> tuple[Tensor, Tensor]:
    """Return samples for so many steps, and labels that can be learnt from them."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(num_steps * BATCH_SIZE, 32, generator=generator)
    return data, data[:, :10].argmax(1)


@contextlib.contextmanager
def terminal(width: int = 120, height: int = 40) -> Iterator[None]:
    """Give this block a terminal for stdout and stderr, so that progress displays draw as they do for people.

    A process of its own reads what is drawn, as a terminal emulator would.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(master)
    term, os.environ["TERM"] = os.environ.get("TERM"), "xterm-256color"
    try:
        with (
            os.fdopen(slave, "w", buffering=1, encoding="utf-8") as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            yield
    finally:
        if term is None:
            del os.environ["TERM"]
        else:
            os.environ["TERM"] = term
        reader.wait()
