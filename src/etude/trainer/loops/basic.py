"""`BasicTrainingLoop`: model, optimizer, scheduler, metrics and callbacks in one object, with `fit`."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.callbacks import LRSchedule
from etude.core import Batch, CheckpointError, ConfigError, Terms
from etude.core.model import ModelCall
from etude.engine.callback import Callback, Logs
from etude.losses import LossStrategy, as_strategy, mean_of
from etude.metrics import LossTracker, Measure, MetricSet, TrainingMetrics
from etude.metrics.metric_set import MetricLike, build_metrics
from etude.optim import Schedule
from etude.trainer.arguments import LossLike, as_callbacks, as_loss
from etude.trainer.config import TrainerConfig
from etude.trainer.loops.epoch import check_keys
from etude.trainer.trainer import Trainer

MetricObject = LossTracker | TrainingMetrics | MetricLike
"""Accepted types of `metrics`: those of a `Trainer`, and objects that follow the loss."""

_STATE = ("clock", "precision", "log", "callbacks", "rng")


class BasicTrainingLoop:
    """The shortest way to train: `BasicTrainingLoop(model, optimizer).fit(train_data, val_data, epochs=10)`.

    `metrics` are those of a `Trainer`, measured in training and validation: results are called `f1` and `val_f1`. Of
    two with the same name the first one measures training, the second one validation; objects hold the values of the
    last epoch, a single one those of the training. So does a `LossTracker`. A `TrainingMetrics` follows both. A torch
    scheduler is stepped once per epoch; a function of the step sets the rate of every step.

    Every `fit` is a separate run that starts from the optimizer's base rate, unless `load_state_dict` was called. Only
    a torch scheduler, which has a state of its own, goes on where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        metrics: MetricObject | Iterable[MetricObject] = (),
        callbacks: Iterable[Callback] = (),
        *,
        loss: LossLike = None,
        val_loss: LossLike = None,
        config: TrainerConfig | dict[str, Any] | None = None,
        progress: bool = True,
        output_dir: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        """Set the options of every `fit`; `output_dir`, `overwrite` and `resume` are those of a `Trainer`."""
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        is_single = isinstance(metrics, (str, Mapping)) or not isinstance(metrics, Iterable)
        self.metrics = [metrics] if is_single and metrics is not None else list(metrics or ())  # type: ignore[arg-type]
        self.callbacks = as_callbacks(callbacks)
        self.loss, self.val_loss = loss, val_loss
        self.config = config
        self.progress = progress
        self._output: dict[str, Any] = {"output_dir": output_dir, "overwrite": overwrite, "resume": resume}
        self.trainer: Trainer | None = None
        """The trainer of the last `fit`."""
        self._restored: dict[str, Any] | None = None
        followed = (LossTracker, TrainingMetrics)
        self._trackers = [one for one in self.metrics if isinstance(one, LossTracker)]
        self._summaries = [one for one in self.metrics if isinstance(one, TrainingMetrics)]
        self._measures = _measures([one for one in self.metrics if not isinstance(one, followed)])
        if len(self._trackers) > 2:
            raise ConfigError("at most two of LossTracker: one for training and one for validation")

    def add_callback(self, callback: Callback) -> None:
        """Add a callback at the end of the order."""
        self.callbacks.append(callback)

    def fit(self, train_data: Any, val_data: Any = None, epochs: int = 10) -> dict[str, float]:
        """Train and return the metrics of the last epoch.

        `epochs` overrides `config.epochs`, also for the length of a schedule of the config.
        """
        callbacks: list[Callback] = []
        loss = as_strategy(as_loss(self.loss))
        if self._trackers:
            loss = _Observed(loss, self._trackers)
        if self._trackers or self._summaries:
            callbacks.append(_KeepMetrics(self._trackers, self._summaries))
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
            val_loss=self.val_loss,
            metrics=self._measures,
            callbacks=callbacks + self.callbacks,
            progress=self.progress,
            **self._output,
        )
        if self._restored is not None:
            _go_on(self.trainer, self._restored)
            self._restored = None
        return self.trainer.train(num_epochs=epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the last `fit`; model, optimizer and torch scheduler have their own state dicts."""
        if self.trainer is None:
            raise CheckpointError("there is nothing to save yet: call fit first")
        state = self.trainer.state
        parts = {name: getattr(state, name).state_dict() for name in _STATE[:-1]}
        return {
            **parts,
            "rng": state.random.state(),
            "data": {} if state.loader is None else state.loader.state_dict(),
            "metrics": self._measures.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `fit` continue from `state_dict`, up to `epochs` counted from the start."""
        check_keys(state, _STATE, "BasicTrainingLoop")
        self._restored = dict(state)


def _go_on(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Set a trainer to the progress in `state`; the user has restored the rest of a checkpoint."""
    for name in _STATE[:-1]:
        getattr(trainer.state, name).load_state_dict(state[name])
    trainer.state.random.load(state["rng"])
    trainer.task.measures.load_state_dict(state.get("metrics", {}))
    if trainer.state.loader is not None:
        trainer.state.loader.load_state_dict(state.get("data", {}))
    trainer.output.is_resumed = True


def _measures(metrics: list[Any]) -> MetricSet:
    """Return the metrics of training and of validation: of two with the same name, the first and the second."""
    training: dict[str, Measure] = {}
    validation: dict[str, Measure] = {}
    for place, metric in enumerate(metrics):
        for name, built in build_metrics(
            [metric] if not isinstance(metric, Mapping) else metric, f"metrics.{place}"
        ).items():
            if name in validation:
                raise ConfigError(f"at most two of {name}: one for training and one for validation")
            (validation if name in training else training)[name] = built
    return MetricSet({name: validation.get(name) or copy.deepcopy(one) for name, one in training.items()}, training)


class _Observed(LossStrategy):
    """A loss that also updates the user's trackers: the first one in training, the second one in validation."""

    def __init__(self, loss: LossStrategy, trackers: list[LossTracker]) -> None:
        self.loss = loss
        self.trackers = trackers

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model as the wrapped loss does."""
        return self.loss.run(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the wrapped loss."""
        terms = self.loss.terms(output, batch, metrics=metrics)
        watched = self.trackers[:1] if torch.is_grad_enabled() else self.trackers[1:]
        with torch.no_grad():
            for tracker in watched:
                tracker.update(_loss_of(terms))
        return terms

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the counts of the wrapped loss."""
        return self.loss.counts(batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the wrapped loss derives."""
        return self.loss.derived(means)

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and labels as the wrapped loss does."""
        return self.loss.judged(output, batch)


def _loss_of(terms: Terms) -> Tensor:
    weighted = [term for term in terms.values() if isinstance(term.weight, Tensor) or term.weight != 0]
    return torch.stack([mean_of(term) * term.weight for term in weighted]).sum()


class _KeepMetrics(Callback):
    """Resets the metrics at every epoch, so that they hold the values of the last one."""

    def __init__(self, trackers: list[LossTracker], summaries: list[TrainingMetrics]) -> None:
        super().__init__()
        self._trackers, self._summaries = trackers, summaries

    def on_epoch_begin(self, epoch: int) -> None:
        for tracker in self._trackers[:1]:
            tracker.reset()
        for summary in self._summaries:
            summary.current_epoch = epoch
            summary.reset_epoch()

    def on_step_end(self, report: Any) -> None:  # noqa: ARG002 - hook signature
        for summary in self._summaries:
            summary.current_batch += 1

    def on_validation_begin(self, epoch: int) -> None:  # noqa: ARG002 - hook signature
        for tracker in self._trackers[1:]:
            tracker.reset()

    def on_validation_cut_off(self, epoch: int) -> None:
        """Nothing to undo: the next validation starts with a reset."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002 - hook signature
        for summary in self._summaries:
            summary.update_train_metrics(logs["loss"], logs.get("accuracy", float("nan")))
            if "val_loss" in logs:
                summary.update_val_metrics(logs["val_loss"], logs.get("val_accuracy", float("nan")))
