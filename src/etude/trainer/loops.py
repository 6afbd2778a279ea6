"""Loops for people who write the outer loop themselves: one epoch of training or validation at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.callbacks import GradientMonitor, LRSchedule
from etude.core import Batch, Clock, ConfigError, DataBatch, DataError, TrainingError
from etude.core.calling import unwrap
from etude.core.tokens import count_tokens, token_ids
from etude.data import DataLoader
from etude.distributed import World
from etude.engine.accumulation import GradientAccumulator
from etude.engine.callback import Callback, CallbackList
from etude.engine.evaluation import evaluate
from etude.engine.flops import ForwardFlops
from etude.engine.interrupt import Interrupts
from etude.engine.ledger import Ledger
from etude.engine.loop import Loop, Plan
from etude.engine.precision import Precision
from etude.engine.recovery import check_finite, explain_out_of_memory, explain_single_sample
from etude.engine.schedule import LearningRate
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import LossStrategy, SupervisedTask, as_strategy
from etude.metrics import LossTracker, TrainingMetrics
from etude.optim import Schedule
from etude.trainer.config import TrainerConfig
from etude.trainer.device import resolve_device
from etude.trainer.feeding import make_loader
from etude.trainer.functions import Action, ComputeLoss, Forward, function_step
from etude.trainer.results import EpochResult

logger = logging.getLogger("etude")

MAX_SKIPPED_STEPS = 20


class TrainingLoop:
    """Training by epochs, with objects (`train_epoch`) or with plain functions (`run_epoch`, `run`)."""

    def __init__(
        self,
        log_interval: int = 100,
        clip_gradients: bool = False,
        max_grad_norm: float = 1.0,
        *,
        loss_strategy: LossStrategy | nn.Module | Callable[..., Any] | None = None,
        gradient_accumulator: GradientAccumulator | None = None,
        gradient_monitor: GradientMonitor | None = None,
        callbacks: Iterable[Callback] = (),
        use_amp: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        """Set what every epoch has in common; `use_amp` is mixed precision in bf16."""
        if log_interval < 1:
            raise ConfigError(f"log_interval must be at least 1, got {log_interval}")
        self.log_interval = log_interval
        self.clip_norm = max_grad_norm if clip_gradients else None
        self.task = SupervisedTask(as_strategy(loss_strategy))
        self.accumulator = gradient_accumulator if gradient_accumulator is not None else GradientAccumulator()
        self.gradient_monitor = gradient_monitor
        self.callbacks = (*callbacks, *([] if gradient_monitor is None else [gradient_monitor]))
        self.device = resolve_device(device)
        self.precision = Precision("bf16" if use_amp else "fp32", self.device)
        self.seed = seed
        self.clock = Clock()
        self.tokens = 0.0
        """Tokens seen since the start."""
        self._flops: ForwardFlops | None = None

    def train_epoch(
        self,
        model: nn.Module,
        dataloader: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        epoch: int = 0,
    ) -> EpochResult:
        """Train one epoch and return its numbers; the scheduler advances with every optimizer step.

        Raises DataError if the loader is empty, TrainingError if numbers stay non-finite or memory runs out, and
        KeyboardInterrupt after the current step if a signal asked to stop.
        """
        if self.accumulator.optimizer not in (None, optimizer):
            raise ConfigError("the gradient accumulator was made for another optimizer than the one given")
        model.to(self.device)
        callbacks = CallbackList(self.callbacks)
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            callbacks.append(LRSchedule(scheduler, interval="step"))
            schedule = None
        else:
            schedule = scheduler
        loader = make_loader(dataloader, TrainerConfig(seed=self.seed), self.device, World(), training=True)
        self.clock.epoch, self.clock.position = epoch, 0
        ledger = Ledger()
        ledger.tokens = self.tokens
        state = TrainState(model, optimizer, self.precision, self.clock, ledger, callbacks, World(), self.seed)
        updater = Updater(optimizer, clip_norm=self.clip_norm, precision=self.precision)
        if self._flops is None or self._flops.model is not unwrap(model):
            self._flops = ForwardFlops(model)
        step = Step(model, self.task, updater, self.precision, metrics=True, flops=self._flops)
        plan = Plan(epochs=epoch + 1, log_interval=self.log_interval, max_skipped_steps=MAX_SKIPPED_STEPS)
        start, samples, tokens = time.perf_counter(), self.clock.samples, self.tokens
        with (
            Interrupts(logger.warning) as interrupts,
            explain_single_sample(),
            explain_out_of_memory(
                batch_size=None, grad_accum_steps=1, precision=self.precision.name, device=self.device
            ),
        ):
            loop = Loop(
                state,
                step,
                loader,
                plan,
                learning_rate=LearningRate(optimizer, schedule),
                accumulator=self.accumulator,
                callbacks=callbacks,
                interrupts=interrupts,
            )
            model.train()
            try:
                logs = loop.run()
            except BaseException as error:
                callbacks.on_exception(error)
                raise
        self.tokens = ledger.tokens
        if interrupts.requested:
            raise KeyboardInterrupt
        duration_s = time.perf_counter() - start
        nll = self.task.strategy.cross_entropy(logs)
        return _result(epoch, logs, nll, duration_s, self.clock.samples - samples, self.tokens - tokens)

    def run_epoch(
        self,
        model_forward: Forward,
        compute_loss: ComputeLoss,
        optimizer_step: Action,
        zero_gradients: Action,
        train_loader: DataLoader,
        metrics: TrainingMetrics,
    ) -> None:
        """Train one epoch from plain functions; `metrics` receives the mean loss and accuracy."""
        step = function_step(
            model_forward, compute_loss, optimizer_step, zero_gradients, clip_norm=self.clip_norm, metrics=True
        )
        callbacks = CallbackList() if self.gradient_monitor is None else CallbackList([self.gradient_monitor])
        if callbacks and isinstance(step.model, nn.Identity):
            raise ConfigError("a gradient monitor needs the layers: pass a module as model_forward, or its method")
        step.watchers = callbacks.hooks("on_gradients")
        ledger = Ledger()
        metrics.reset_epoch()
        train_loader.reset()
        if not train_loader.has_next():
            raise DataError("the training loader gave no batch: its data is empty, or drop_last dropped all of it")
        while train_loader.has_next():
            report = step([train_loader.next()])
            ledger.add(report)
            callbacks.on_step_end(report)
            metrics.current_batch += 1
            if metrics.current_batch % self.log_interval == 0:
                logs = ledger.take_window().logs()
                try:
                    check_finite(ledger.bad_streak, MAX_SKIPPED_STEPS, metrics.current_batch)
                except TrainingError as error:
                    callbacks.on_exception(error)
                    raise
                callbacks.on_log(logs)
                logger.info("epoch %d batch %d loss %.4f", metrics.current_epoch, metrics.current_batch, logs["loss"])
        means = ledger.take_epoch().means()
        callbacks.on_epoch_end(metrics.current_epoch, means)
        metrics.update_train_metrics(means["loss"], means.get("accuracy", float("nan")))

    def run(
        self,
        model_forward: Forward,
        compute_loss: ComputeLoss,
        optimizer_step: Action,
        zero_gradients: Action,
        train_loader: DataLoader,
        num_epochs: int,
        metrics: TrainingMetrics,
    ) -> None:
        """Train `num_epochs` epochs from plain functions."""
        for epoch in range(num_epochs):
            metrics.current_epoch = epoch
            self.run_epoch(model_forward, compute_loss, optimizer_step, zero_gradients, train_loader, metrics)

    def run_epoch_manual(
        self,
        train_data: Tensor,
        train_labels: Tensor,
        batch_size: int,
        compute_batch_loss: Callable[[Tensor, Tensor], float | Tensor],
        epoch: int,
        total_epochs: int,
    ) -> float:
        """Slice the data into batches in order, hand each to `compute_batch_loss`, and return the average loss.

        The function does the whole step, update included, and returns the loss of its batch.
        """
        loader = DataLoader(train_data, train_labels, batch_size, shuffle=False)
        tracker = LossTracker()
        for number, batch in enumerate(loader, start=1):
            assert isinstance(batch, DataBatch)
            tracker.update(compute_batch_loss(batch.data, batch.labels))  # type: ignore[arg-type]
            if number % self.log_interval == 0:
                recent = tracker.get_recent_average()
                logger.info("epoch %d/%d batch %d/%d loss %.4f", epoch, total_epochs, number, len(loader), recent)
        return tracker.get_average()


class ValidationLoop:
    """Evaluation by epochs: eval mode, no gradients."""

    def __init__(
        self,
        loss_strategy: LossStrategy | nn.Module | Callable[..., Any] | None = None,
        *,
        use_amp: bool = False,
        device: str = "cpu",
    ) -> None:
        self.task = SupervisedTask(as_strategy(loss_strategy))
        self.device = resolve_device(device)
        self.precision = Precision("bf16" if use_amp else "fp32", self.device)

    def validate_epoch(self, model: nn.Module, dataloader: Any, epoch: int = 0) -> EpochResult:
        """Return the numbers of one pass over the loader."""
        model.to(self.device)
        loader = make_loader(dataloader, TrainerConfig(), self.device, World(), training=False)
        counting = _Counting(loader)
        start = time.perf_counter()
        logs = evaluate(model, self.task, counting, precision=self.precision)
        duration_s, nll = time.perf_counter() - start, self.task.strategy.cross_entropy(logs)
        return _result(epoch, logs, nll, duration_s, counting.samples, float(counting.tokens))


class _Counting:
    """A loader that remembers how many samples and tokens its last epoch had."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Any = None
        self.tokens: Tensor | int = 0

    def __len__(self) -> int:
        return len(self.loader)

    def iterate(self, epoch: int, position: int = 0) -> Any:
        self.batches = self.loader.iterate(epoch, position)
        self.tokens = 0
        return self._counted()

    def _counted(self) -> Iterator[Batch]:
        try:
            for batch in self.batches:
                if (ids := token_ids(batch)) is not None:
                    self.tokens = self.tokens + count_tokens(batch, ids)
                yield batch
        finally:
            self.batches.close()

    @property
    def samples(self) -> int:
        return int(self.batches.position)


def _result(
    epoch: int, logs: Mapping[str, float], nll: float | None, duration_s: float, samples: int, tokens: float
) -> EpochResult:
    return EpochResult(
        epoch=epoch,
        loss=logs["loss"],
        duration_s=duration_s,
        num_samples=samples,
        accuracy=logs.get("accuracy"),
        lr=logs.get("lr"),
        grad_norm_min=logs.get("grad_norm_min"),
        grad_norm_max=logs.get("grad_norm_max"),
        skipped=int(logs.get("skipped", 0)),
        nll=nll,
        num_tokens=int(tokens),
        mfu=logs.get("mfu"),
        data_wait=logs.get("data_wait"),
    )
