"""`BasicTrainingLoop`: model, optimizer, scheduler, metrics and callbacks in one object, with `fit`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from etude.callbacks import LRSchedule
from etude.core import ConfigError
from etude.engine.callback import Callback, Logs
from etude.losses import LossStrategy
from etude.metrics import Accuracy, LossTracker
from etude.optim import Schedule
from etude.trainer.config import TrainerConfig
from etude.trainer.trainer import Trainer

Metric = LossTracker | Accuracy


class BasicTrainingLoop:
    """The shortest way to train: `BasicTrainingLoop(model, optimizer).fit(train_data, val_data, epochs=10)`.

    `metrics` are filled as training goes on. The first `LossTracker` and the first `Accuracy` follow training,
    the second of each follows validation. A torch scheduler is stepped once per epoch; a function of the step
    sets the rate of every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        metrics: Iterable[Metric] = (),
        callbacks: Iterable[Callback] = (),
        *,
        loss: LossStrategy | nn.Module | Callable[..., Any] | None = None,
        config: TrainerConfig | dict[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.metrics = list(metrics)
        self.callbacks = list(callbacks)
        self.loss = loss
        self.config = config
        self.progress = progress
        self.trainer: Trainer | None = None
        """The trainer of the last `fit`."""

    def add_callback(self, callback: Callback) -> None:
        """Add a callback at the end of the order."""
        self.callbacks.append(callback)

    def fit(self, train_data: Any, val_data: Any = None, epochs: int = 10) -> dict[str, float]:
        """Train and return the numbers of the last epoch."""
        callbacks: list[Callback] = [_MetricFeeder(self.metrics)] if self.metrics else []
        scheduler = self.scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            callbacks.append(LRSchedule(scheduler, interval="epoch"))
            scheduler = None
        self.trainer = Trainer(
            self.model,
            train_data,
            val_data,
            config=self.config,
            optimizer=self.optimizer,
            scheduler=scheduler,
            loss=self.loss,
            callbacks=callbacks + self.callbacks,
            progress=self.progress,
        )
        return self.trainer.train(num_epochs=epochs)


class _MetricFeeder(Callback):
    """Hands the numbers of each epoch to the metric objects a user brought."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._slots: list[tuple[Metric, str]] = []
        for kind, name in ((LossTracker, "loss"), (Accuracy, "accuracy")):
            found = [metric for metric in metrics if isinstance(metric, kind)]
            if len(found) > 2:
                raise ConfigError(f"at most two {kind.__name__}s: one for training, one for validation")
            self._slots += zip(found, (name, f"val_{name}"), strict=False)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002 - hook signature
        for metric, name in self._slots:
            if name in logs:
                metric.record(logs[name])
