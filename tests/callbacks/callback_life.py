"""A run in miniature: drives callbacks through the hooks in the order the protocol states."""

import functools
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from etude.core import Clock, StepReport
from etude.engine.callback import Callback, Gradients, RunInfo
from etude.engine.callback_list import CallbackList
from etude.engine.precision import MixedPrecision
from etude.multitask.gradients import TaskGradients, TaskGradientWatcher

STEPS = 4
"""Steps per epoch; a log point after every second one."""


def report(lr: float = 0.1) -> StepReport:
    one = torch.ones(())
    return StepReport({"loss": one}, {"loss": 1.0}, norm=one, divisor=1.0, skipped=one * 0, lr=lr)


def task_gradients(step: int) -> TaskGradients:
    """Return the products of made-up gradients of two tasks."""
    vectors = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
    return TaskGradients(("code", "quality"), vectors @ vectors.T, step)


@functools.cache
def tokenizer_file() -> str:
    """Make a byte-level tokenizer that knows few words, outside the folders of the tests; return its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def one(two):\n    return two\n"] * 9, trainer)
    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    tokenizer.save(f"{folder.name}/tokenizer.json")
    return f"{folder.name}/tokenizer.json"


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that are removed when the tests end."""


def val_loss(epoch: int) -> float:
    """Falls, rises, falls to its minimum in epoch 5, rises for good; not finite once."""
    return math.nan if epoch == 2 else 1.0 + abs(epoch - 5) / 10 + (0.3 if epoch == 3 else 0.0)


@dataclass
class Life:
    """One process's part of a run."""

    folder: Path
    is_main: bool = True
    with_validation: bool = True
    clock: Clock = field(default_factory=Clock)
    resumed: bool = False
    total_epochs: int = 10

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.lrs: list[float] = []

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def run_info(self) -> RunInfo:
        steps = self.total_epochs * STEPS
        return RunInfo(
            "life", self.model, self.optimizer, self.clock, torch.device("cpu"), self.total_epochs, steps, STEPS,
            self.folder, is_main=self.is_main, resumed=self.resumed,
        )  # fmt: skip

    def epoch(self, callbacks: CallbackList) -> dict[str, float]:
        """Go through one epoch and return its logs."""
        epoch = self.clock.epoch
        callbacks.on_epoch_begin(epoch)
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            torch.manual_seed(self.clock.step)
            self.model(torch.randn(8, 3)).sum().backward()  # a gradient that the weights have no part in
            for callback in callbacks:
                if isinstance(callback, TaskGradientWatcher) and callback.wants_task_gradients(self.clock.step):
                    callback.on_task_gradients(task_gradients(self.clock.step))
            callbacks.on_step_begin(self.clock.step)
            callbacks.on_gradients(Gradients(self.model, list(self.model.parameters()), 8.0, MixedPrecision("fp32")))
            self.optimizer.zero_grad()  # the weights are set below, by epoch
            self.optimizer.step()
            self.clock.step += 1
            self.clock.samples += 8
            self.clock.position += 8
            callbacks.on_step_end(report(self.lr))
            self.lrs.append(self.lr)
            if self.clock.step % 2 == 0:
                place = {"step": self.clock.step, "epoch": epoch, "samples": self.clock.samples}
                record = {**place, "loss": 1 / self.clock.step, "lr": 0.1, "samples_per_s": 100.0}
                callbacks.on_log({**record, **callbacks.numbers()})
        with torch.no_grad():
            self.model.weight.fill_(epoch + 0.5)
        logs = {"loss": 1 / (epoch + 1), "accuracy": epoch / 10, "lr": 0.1, "grad_norm": 1.0, "skipped": 0}
        if self.with_validation and epoch != 1:  # no validation in epoch 1
            callbacks.on_validation_begin(epoch)
            metrics = {"val_loss": val_loss(epoch), "val_accuracy": epoch / 20}
            callbacks.on_validation_end(epoch, metrics)
            logs |= metrics
        callbacks.on_epoch_end(epoch, logs)
        self.clock.epoch, self.clock.position = epoch + 1, 0
        callbacks.on_checkpoint(self.folder / "checkpoints" / f"step-{self.clock.step:08d}")
        return logs

    def whole(self, *callbacks: Callback) -> CallbackList:
        """Begin, train to the end or until a callback asks to stop, end."""
        listed = CallbackList(callbacks)
        listed.on_train_begin(self.run_info())
        while self.clock.epoch < self.total_epochs and not listed.control.stop:
            self.epoch(listed)
        listed.on_train_end({"loss": 0.1})
        return listed
