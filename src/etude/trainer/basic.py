"""`BasicTrainingLoop`: model, optimizer, scheduler, metrics and callbacks in one object, with `fit`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.callbacks import LRSchedule
from etude.core import Batch, ConfigError, Terms
from etude.core.calling import ModelCall, targets_of
from etude.engine.callback import Callback
from etude.losses import LossStrategy, as_strategy, logits_of, mean_of
from etude.metrics import Accuracy, LossTracker, Meter
from etude.optim import Schedule
from etude.trainer.config import TrainerConfig
from etude.trainer.trainer import Trainer


class BasicTrainingLoop:
    """The shortest way to train: `BasicTrainingLoop(model, optimizer).fit(train_data, val_data, epochs=10)`.

    `metrics` see every batch. The first `LossTracker` and the first `Accuracy` follow training, the second of each
    follows validation; they hold the numbers of the last epoch. A torch scheduler is stepped once per epoch; a
    function of the step sets the rate of every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        metrics: Iterable[Meter] = (),
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
        callbacks: list[Callback] = []
        loss = as_strategy(self.loss)
        if self.metrics:
            loss = _Observed(loss, self.metrics)
            callbacks.append(_ResetMetrics(loss))
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
            loss=loss,
            callbacks=callbacks + self.callbacks,
            progress=self.progress,
        )
        return self.trainer.train(num_epochs=epochs)


class _Observed(LossStrategy):
    """A loss that shows every batch to the metric objects a user brought, those of training or of validation."""

    def __init__(self, loss: LossStrategy, metrics: list[Meter]) -> None:
        self.loss = loss
        self.training: list[Meter] = []
        self.validation: list[Meter] = []
        for kind in (LossTracker, Accuracy):
            found = [metric for metric in metrics if isinstance(metric, kind)]
            if len(found) > 2:
                raise ConfigError(f"at most two of {kind.__name__}: one for training and one for validation")
            self.training += found[:1]
            self.validation += found[1:]

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model as the loss itself does."""
        return self.loss.run(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the loss itself."""
        terms = self.loss.terms(output, batch, metrics=metrics)
        for metric in self.training if torch.is_grad_enabled() else self.validation:
            if isinstance(metric, LossTracker):
                metric.update(mean_of(terms["loss"]))
            elif isinstance(metric, Accuracy):
                metric.update(logits_of(output), targets_of(batch)[0])
        return terms

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the counts of the loss itself."""
        return self.loss.counts(batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the numbers that the loss itself derives."""
        return self.loss.derived(means)


class _ResetMetrics(Callback):
    """Begins the metrics anew with every epoch, so that they hold the numbers of the last one."""

    def __init__(self, observed: _Observed) -> None:
        super().__init__()
        self._observed = observed

    def on_epoch_begin(self, epoch: int) -> None:  # noqa: ARG002 - hook signature
        for metric in self._observed.training:
            metric.reset()

    def on_validation_begin(self, epoch: int) -> None:  # noqa: ARG002 - hook signature
        for metric in self._observed.validation:
            metric.reset()
