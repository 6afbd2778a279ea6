"""Training loops for users who write the outer loop themselves: one epoch at a time."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.callbacks import GradientMonitor
from etude.core import ConfigError, DataBatch, Task
from etude.core.arguments import as_whole
from etude.core.model import unwrap
from etude.data import TensorData, make_loader
from etude.distributed.parallel import check_whole
from etude.engine.callback import Callback
from etude.engine.learning_rate import LearningRate
from etude.engine.step import GradientAccumulator, Step
from etude.engine.update import Updater
from etude.losses.wrapped import check_loss_arguments
from etude.metrics import LossTracker, MetricSet, TrainingMetrics
from etude.optim import Schedule
from etude.trainer.arguments import (
    LossLike,
    MetricsLike,
    as_callbacks,
    as_epochs,
    check_functions,
    check_model,
    measure,
    plain_task,
)
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.loops.engine_loop import EngineLoop, Epoch
from etude.trainer.loops.epoch import EpochProgress, UnusedLoss, check_validation, wants_progress
from etude.trainer.loops.functions import Action, ComputeLoss, FollowMetrics, Forward, FunctionTask, function_step
from etude.trainer.loops.results import EpochResult, cross_entropy_of, epoch_result
from etude.trainer.machine import Machine
from etude.trainer.optimization import check_optimizer, follow_parameters
from etude.trainer.output import Output
from etude.trainer.schedule import check_scheduler, function_of

logger = logging.getLogger("etude")


class TrainingLoop(EngineLoop):
    """Training by epochs, with objects (`train_epoch`) or with plain functions (`run_epoch`, `run`).

    `on_train_begin` of the callbacks is called with the first epoch of a model, `on_train_end` by `finish()`, or at
    the end of a `with` block or of `run`. After an epoch `should_stop` tells whether a callback asked to stop.
    """

    def __init__(
        self,
        log_interval: int = 100,
        clip_gradients: bool = False,
        max_grad_norm: float = 1.0,
        *,
        loss_strategy: LossLike = None,
        val_loss: LossLike = None,
        task: Task | None = None,
        metrics: MetricsLike = (),
        train_metrics: bool | list[str] | None = None,
        gradient_accumulator: GradientAccumulator | None = None,
        gradient_monitor: GradientMonitor | None = None,
        callbacks: Iterable[Callback] = (),
        use_amp: bool = False,
        device: str | None = None,
        seed: int = 0,
        progress: bool | None = None,
        output_dir: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """Set the options of every epoch.

        Args:
            log_interval: steps between log points.
            clip_gradients: clip the global gradient norm to `max_grad_norm`; both may be changed between epochs.
            max_grad_norm: see `clip_gradients`.
            loss_strategy: the loss of `train_epoch`; `run` and `run_epoch` take a loss function instead.
            val_loss: another loss for `val_dataloader` of `train_epoch`.
            task: replaces `loss_strategy` by full control over how model and batch become loss terms.
            metrics: measured in validation, as those of a `Trainer`.
            train_metrics: measure all of them, or these, in training too; by default in epochs without a validation.
            gradient_accumulator: micro-batches per step.
            gradient_monitor: one more callback.
            callbacks: called in this order.
            use_amp: mixed precision in bf16.
            device: where `train_epoch` trains (the CPU by default); plain functions are not moved unless it is given.
            seed: of the order of data that is not a loader.
            progress: show a line for the current epoch; by default only on a terminal.
            output_dir: the run folder, as that of a `Trainer`: numbers, events and a checkpoint after every epoch, from
                which `load_checkpoint` continues.
            overwrite: remove the existing run in `output_dir` when training starts.
        """
        if not isinstance(gradient_accumulator, GradientAccumulator | None):
            raise ConfigError(
                f"gradient_accumulator must be a GradientAccumulator(optimizer, steps), found {gradient_accumulator!r}"
            )
        steps, seed = as_whole("log_interval", log_interval, least=1), as_whole("seed", seed, least=0)
        config = TrainerConfig(log_interval=steps, seed=seed)
        machine = Machine("cpu" if device is None else device, "bf16" if use_amp else "fp32")
        listed = (*as_callbacks(callbacks), *as_callbacks(gradient_monitor))
        line = EpochProgress(progress) if wants_progress(progress, listed) else False
        made = plain_task(loss_strategy, task, "loss_strategy")
        measure(made, metrics, train_metrics is None or train_metrics, validates=True)
        self._always_measures = train_metrics is not None
        self._has_warned = False
        super().__init__(
            made,
            gradient_accumulator if gradient_accumulator is not None else GradientAccumulator(),
            listed,
            machine,
            config,
            Output(output_dir, config, machine, "train", line, overwrite),
        )
        self.val_task = None if val_loss is None else plain_task(val_loss, None)
        """The task of validation, if it is another one."""
        self._unused = UnusedLoss(self)
        if self.val_task is not None:
            self.val_task.measure(made.measures)
        self.clip_gradients = clip_gradients
        self.max_grad_norm = max_grad_norm
        self.gradient_monitor = gradient_monitor
        self._is_placed = device is not None

    @property
    def clip_norm(self) -> float | None:
        """The norm that gradients are clipped to; None without clipping."""
        if self.clip_gradients and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, got {self.max_grad_norm}")
        return self.max_grad_norm if self.clip_gradients else None

    def finish(self) -> None:
        """End the run: callbacks close their files, warn and sample text. A later epoch continues from here."""
        super().finish()
        self._unused.say()

    def _choose_metrics(self, validation: Any) -> None:
        """Measure in training too if this epoch has no validation."""
        if isinstance(measures := self.task.measures, MetricSet):
            measures.trains = self._always_measures or validation is None

    # ------------------------------------------------------------------------------------------------ objects

    def _warn_of_processes(self) -> None:
        """Warn, once, if this is one of several processes: the model is not trained together with theirs."""
        number = os.environ.get("WORLD_SIZE", "1")
        if number != "1" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "TrainingLoop trains a model of its own in each of %s processes; Trainer and BasicTrainingLoop train "
                "one model together",
                number,
            )

    def train_epoch(
        self,
        model: nn.Module,
        dataloader: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        epoch: int = 0,
        val_dataloader: Any = None,
    ) -> EpochResult:
        """Train one epoch and return its metrics; the scheduler advances with every optimizer step.

        With `val_dataloader` the epoch ends with a validation, whose metrics (`val_loss` …) callbacks receive and the
        result holds in `parts`.

        Raises DataError if the loader is empty, TrainingError if updates stay non-finite or memory runs out, and
        KeyboardInterrupt after the current step if a signal asked to stop.
        """
        check_model(model)
        check_whole(model)
        self._warn_of_processes()
        check_optimizer(optimizer, model.parameters())
        self._choose_metrics(val_dataloader)
        if scheduler is not None:
            check_scheduler(scheduler)
        if self.val_task is not None:
            self._unused.trained(validates=val_dataloader is not None)
        epoch = as_whole("epoch", epoch, least=0)
        self._check_accumulator(optimizer)
        self._take(unwrap(model))
        self.task.join(unwrap(model))
        machine = self.machine
        model.to(machine.device)
        self.task.extend(optimizer)
        follow_parameters(optimizer)
        callbacks = self._listed(*self._drivers(scheduler))
        check_validation(callbacks, val_dataloader, "train_epoch(val_dataloader=…)")
        names = ("dataloader", "val_dataloader")
        updater = Updater(optimizer, clip_norm=self.clip_norm, precision=machine.precision)
        made = Epoch(
            Step(model, self.task, updater, machine.precision, metrics=True),
            Loaders(dataloader, val_dataloader, config=self.config, machine=machine, model=model, names=names),
            callbacks,
            machine,
            LearningRate(optimizer, function_of(scheduler)),
            model,
            validated=self.task if self.val_task is None else self.val_task,
        )
        model.train()
        start, samples, tokens = time.perf_counter(), self.clock.samples, self.tokens
        logs = self._run(epoch, made)
        duration_s = time.perf_counter() - start
        samples, tokens = self.clock.samples - samples, self.tokens - tokens
        return epoch_result(epoch, logs, duration_s, samples, tokens, nll=cross_entropy_of(self.task, logs))

    # ------------------------------------------------------------------------------------------------ functions

    def run_epoch(
        self,
        model_forward: Forward,
        compute_loss: ComputeLoss,
        optimizer_step: Action,
        zero_gradients: Action,
        train_loader: Any,
        metrics: TrainingMetrics,
        val_loader: Any = None,
        *,
        total_epochs: int | None = None,
    ) -> None:
        """Train one epoch from plain functions; `metrics` receives the mean loss and accuracy.

        Callbacks, clipping, accumulation and mixed precision are those of the loop. Features that need the parameters
        (clipping, accumulation) or the layers (`GradientMonitor`, `ModelCheckpoint`) are refused if these are
        unknown: pass a module, its method, or the `step` method of an optimizer. With accumulation `compute_loss` is
        treated as a mean over samples. The epoch is `metrics.current_epoch`, or the next one if that has been trained
        already.
        """
        if self.val_task is not None:
            raise ConfigError("val_loss= is for train_epoch; functions validate with compute_loss, remove val_loss")
        check_functions(model_forward=model_forward, compute_loss=compute_loss)
        check_loss_arguments(compute_loss)
        self._choose_metrics(val_loader)
        check_functions(optimizer_step=optimizer_step, zero_gradients=zero_gradients)
        step = function_step(
            model_forward,
            compute_loss,
            optimizer_step,
            zero_gradients,
            clip_norm=self.clip_norm,
            precision=self.machine.precision,
            device=self.machine.device if self._is_placed else None,
            accumulates=self.accumulator.most > 1,
            metrics=True,
        )
        assert isinstance(step.task, FunctionTask)
        validated = FunctionTask(model_forward, compute_loss, by_samples=True)
        for one in (step.task, validated):
            one.measure(self.task.measures)
        optimizer = step.updater.optimizer if isinstance(step.updater, Updater) else None
        self._check_accumulator(optimizer)
        known = None if isinstance(step.model, nn.Identity) else step.model
        self._take(model_forward if known is None else unwrap(known))
        callbacks = self._listed(FollowMetrics(metrics, step.task))
        check_validation(callbacks, val_loader, "run(val_loader=…)")
        machine = self.machine if self._is_placed else self.machine.at(step.updater.device)
        epoch = Epoch(
            step,
            Loaders(train_loader, val_loader, config=self.config, machine=machine),
            callbacks,
            machine,
            LearningRate(optimizer, None),
            known,
            validated=validated,
            total_epochs=total_epochs,
        )
        logs = self._run(max(metrics.current_epoch, self.clock.epoch), epoch)
        metrics.update_train_metrics(logs["loss"], logs.get("accuracy", float("nan")))
        if "val_loss" in logs:
            metrics.update_val_metrics(logs["val_loss"], logs.get("val_accuracy", float("nan")))

    def run(
        self,
        model_forward: Forward,
        compute_loss: ComputeLoss,
        optimizer_step: Action,
        zero_gradients: Action,
        train_loader: Any,
        num_epochs: int,
        metrics: TrainingMetrics,
        val_loader: Any = None,
    ) -> None:
        """Train `num_epochs` epochs from plain functions, fewer if a callback asks to stop (see `run_epoch`)."""
        functions = (model_forward, compute_loss, optimizer_step, zero_gradients)
        if not self._is_restored:
            self._forget()
        for epoch in range(self.clock.epoch, as_epochs(num_epochs)):
            metrics.current_epoch = epoch
            self.run_epoch(*functions, train_loader, metrics, val_loader, total_epochs=num_epochs)
            if self.should_stop:
                break
        self.finish()

    def run_epoch_manual(
        self,
        train_data: Tensor,
        train_labels: Tensor,
        batch_size: int,
        compute_batch_loss: Callable[[Tensor, Tensor], float | Tensor],
        epoch: int,
        total_epochs: int,
    ) -> float:
        """Slice the data into batches in order, pass each to `compute_batch_loss`, and return the average loss.

        The function does the whole step, update included, and returns the loss of its batch. Raises ConfigError if
        the loop has settings that only its own step could apply.
        """
        cannot = {
            "clip_gradients": self.clip_gradients,
            "gradient_accumulator": self.accumulator.most > 1,
            "use_amp": self.machine.precision.name != "fp32",
            "callbacks": bool(self.callbacks),
            "output_dir": self.output.folder is not None,
            "metrics": self.task.measures.wants(training=False),
        }
        if given := [name for name, is_set in cannot.items() if is_set]:
            raise ConfigError(
                f"run_epoch_manual leaves the whole step to compute_batch_loss, so {' and '.join(given)} would have "
                "no effect; remove them, or use run_epoch"
            )
        device = self.machine.device if self._is_placed else None
        loader = make_loader(TensorData(train_data, train_labels), batch_size, shuffle=False, device=device)
        tracker = LossTracker()
        for number, batch in enumerate(loader, start=1):
            assert isinstance(batch, DataBatch)
            tracker.update(compute_batch_loss(batch.data, batch.labels))  # type: ignore[arg-type]
            if number % self.log_interval == 0:
                recent = tracker.get_recent_average()
                logger.info("epoch %d/%d batch %d/%d loss %.4f", epoch, total_epochs, number, len(loader), recent)
        return tracker.get_average()

    def _check_accumulator(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self.accumulator.optimizer is not None and self.accumulator.optimizer is not optimizer:
            raise ConfigError(
                "the gradient accumulator was created for another optimizer; pass the same optimizer to both"
            )
