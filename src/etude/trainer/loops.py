"""Loops for people who write the outer loop themselves: one epoch of training at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from etude.callbacks import GradientMonitor, LRSchedule
from etude.core import Clock, ConfigError, DataBatch, Loader, Task
from etude.core.calling import unwrap
from etude.core.random import rng_state, set_rng_state
from etude.core.terms import Decides
from etude.core.whole import as_whole
from etude.data import DataLoader, explain_worker_failure
from etude.distributed import World
from etude.engine.accumulation import GradientAccumulator
from etude.engine.callback import Callback, CallbackList, RunInfo
from etude.engine.evaluation import evaluate
from etude.engine.flops import ForwardFlops
from etude.engine.interrupt import Interrupts
from etude.engine.ledger import Ledger, Tally
from etude.engine.loop import Loop, Plan
from etude.engine.precision import Precision
from etude.engine.recovery import explain_out_of_memory, explain_single_sample
from etude.engine.schedule import LearningRate
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import LossStrategy, SupervisedTask, as_strategy
from etude.losses.wrapped import check_loss_arguments
from etude.metrics import LossTracker, TrainingMetrics
from etude.optim import Schedule
from etude.trainer.arguments import (
    as_callbacks,
    as_epochs,
    as_loss,
    as_tensors,
    check_functions,
    check_model,
    check_optimizer,
    check_scheduler,
    check_task,
)
from etude.trainer.assembly import follow_parameters
from etude.trainer.callback_checks import check_callbacks, check_rates, check_validation
from etude.trainer.config import TrainerConfig
from etude.trainer.device import resolve_device
from etude.trainer.epoch_loop import EpochLoop, check_keys
from etude.trainer.epoch_progress import EpochProgress, wants_progress
from etude.trainer.feeding import make_loader, num_batches
from etude.trainer.functions import Action, ComputeLoss, FollowMetrics, Forward, FunctionTask, function_step
from etude.trainer.results import EpochResult, cross_entropy_of, epoch_result

logger = logging.getLogger("etude")

MAX_SKIPPED_STEPS = 20


class TrainingLoop(EpochLoop):
    """Training by epochs, with objects (`train_epoch`) or with plain functions (`run_epoch`, `run`).

    The callbacks' `on_train_begin` comes with the first epoch of a model, `on_train_end` with `finish()`, or at the end
    of a `with` block or of `run`. After an epoch `should_stop` says whether a callback asked to stop.
    """

    def __init__(
        self,
        log_interval: int = 100,
        clip_gradients: bool = False,
        max_grad_norm: float = 1.0,
        *,
        loss_strategy: LossStrategy | nn.Module | Callable[..., Any] | None = None,
        task: Task | None = None,
        gradient_accumulator: GradientAccumulator | None = None,
        gradient_monitor: GradientMonitor | None = None,
        callbacks: Iterable[Callback] = (),
        use_amp: bool = False,
        device: str | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        """Set what every epoch has in common.

        Args:
            log_interval: steps between log points.
            clip_gradients: clip the global gradient norm to `max_grad_norm`; both may be changed between epochs.
            max_grad_norm: see `clip_gradients`.
            loss_strategy: the loss of `train_epoch`; `run` and `run_epoch` are given theirs.
            task: replaces `loss_strategy` by full control, such as a `MultiTask`.
            gradient_accumulator: micro-batches per step.
            gradient_monitor: one more callback.
            callbacks: called in this order.
            use_amp: mixed precision in bf16.
            device: where `train_epoch` trains (the CPU by default); plain functions stay where they are unless given.
            seed: of the order of data that is no loader yet.
            progress: show a line for the epoch under way; by default on a terminal only.
        """
        super().__init__()
        if loss_strategy is not None and task is not None:
            raise ConfigError("loss_strategy and task both say what is trained; keep one of them")
        check_task(task)
        if not isinstance(gradient_accumulator, GradientAccumulator | None):
            raise ConfigError(
                f"gradient_accumulator must be a GradientAccumulator(optimizer, steps), found {gradient_accumulator!r}"
            )
        self.log_interval = as_whole("log_interval", log_interval, least=1)
        self.clip_gradients = clip_gradients
        self.max_grad_norm = max_grad_norm
        self.task: Task = task if task is not None else SupervisedTask(as_strategy(as_loss(loss_strategy)))
        self.accumulator = gradient_accumulator if gradient_accumulator is not None else GradientAccumulator()
        self.gradient_monitor = gradient_monitor
        self.callbacks = (*as_callbacks(callbacks), *as_callbacks(gradient_monitor))
        self.given_device = None if device is None else resolve_device(device)
        self.device = self.given_device if self.given_device is not None else torch.device("cpu")
        self.precision = Precision("bf16" if use_amp else "fp32", self.device)
        self.seed = as_whole("seed", seed, least=0)
        self.clock = Clock()
        self.ledger = Ledger()
        self._progress = [EpochProgress(progress)] if wants_progress(progress, self.callbacks) else []
        self._trains: object = None  # the model, or the function in place of one, of the run under way
        self._has_begun = self._is_restored = False
        self._flops: ForwardFlops | None = None
        self._logs: dict[str, float] = {}

    @property
    def clip_norm(self) -> float | None:
        """The norm that gradients are clipped to; None if they are not."""
        if self.clip_gradients and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, got {self.max_grad_norm}")
        return self.max_grad_norm if self.clip_gradients else None

    @property
    def tokens(self) -> float:
        """Tokens seen since the start."""
        return self.ledger.tokens

    # ------------------------------------------------------------------------------------------------ objects

    def train_epoch(
        self,
        model: nn.Module,
        dataloader: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Schedule | torch.optim.lr_scheduler.LRScheduler | None = None,
        epoch: int = 0,
        val_dataloader: Any = None,
    ) -> EpochResult:
        """Train one epoch and return its numbers; the scheduler advances with every optimizer step.

        With `val_dataloader` the epoch ends with a validation, whose numbers (`val_loss` …) callbacks receive and the
        result holds in `parts`.

        Raises DataError if the loader is empty, TrainingError if numbers stay non-finite or memory runs out, and
        KeyboardInterrupt after the current step if a signal asked to stop.
        """
        check_model(model)
        check_optimizer(optimizer)
        if scheduler is not None:
            check_scheduler(scheduler)
        epoch = as_whole("epoch", epoch, least=0)
        self._check_accumulator(optimizer)
        self._take(unwrap(model))
        model.to(self.device)
        follow_parameters(optimizer)
        callbacks = self._listed()
        schedule = None
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            callbacks.append(LRSchedule(scheduler, interval="step"))
        else:
            schedule = scheduler
        check_callbacks(callbacks, self.task, model)
        if schedule is not None:
            check_rates(callbacks)
        check_validation(callbacks, val_dataloader, "train_epoch(val_dataloader=…)")
        updater = Updater(optimizer, clip_norm=self.clip_norm, precision=self.precision)
        if self._flops is None or self._flops.model is not unwrap(model):
            self._flops = ForwardFlops(model)
        step = Step(model, self.task, updater, self.precision, metrics=True, flops=self._flops)
        model.train()
        start, samples, tokens = time.perf_counter(), self.clock.samples, self.tokens
        logs = self._run(
            step,
            self._loader(as_tensors(dataloader, model), self.device, training=True),
            callbacks,
            epoch,
            rate=LearningRate(optimizer, schedule),
            validate=self._validation(
                as_tensors(val_dataloader, model), model, self.task, self.precision, self.device
            ),
        )
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

        Callbacks, clipping, accumulation and mixed precision are those of the loop. What needs the parameters
        (clipping, accumulation) or the layers (`GradientMonitor`, `ModelCheckpoint`) is refused if they are not known:
        pass a module, its method, or the `step` method of an optimizer. With accumulation `compute_loss` is taken for a
        mean over samples. The epoch is `metrics.current_epoch`, or the next one if that has been trained already.
        """
        check_functions(model_forward=model_forward, compute_loss=compute_loss)
        check_loss_arguments(compute_loss)
        check_functions(optimizer_step=optimizer_step, zero_gradients=zero_gradients)
        device = self.given_device
        step = function_step(
            model_forward,
            compute_loss,
            optimizer_step,
            zero_gradients,
            clip_norm=self.clip_norm,
            precision=self.precision,
            device=device,
            accumulates=self.accumulator.most > 1,
            metrics=True,
        )
        assert isinstance(step.tasks, FunctionTask)
        optimizer = step.updater.optimizer if isinstance(step.updater, Updater) else None
        self._check_accumulator(optimizer)
        known = None if isinstance(step.model, nn.Identity) else step.model
        self._take(model_forward if known is None else unwrap(known))
        callbacks = self._listed(FollowMetrics(metrics, step.tasks))
        check_callbacks(callbacks, step.tasks, known)
        check_validation(callbacks, val_loader, "run(val_loader=…)")
        device = step.updater.device if device is None else device
        whole = FunctionTask(model_forward, compute_loss, by_samples=True)
        logs = self._run(
            step,
            self._loader(train_loader, device, training=True),
            callbacks,
            max(metrics.current_epoch, self.clock.epoch),
            rate=LearningRate(optimizer, None),
            validate=self._validation(val_loader, step.model, whole, step.precision, device),
            total_epochs=total_epochs,
        )
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
        """Slice the data into batches in order, hand each to `compute_batch_loss`, and return the average loss.

        The function does the whole step, update included, and returns the loss of its batch. Raises ConfigError if the
        loop has settings that only a step of its own could follow.
        """
        cannot = {
            "clip_gradients": self.clip_gradients,
            "gradient_accumulator": self.accumulator.most > 1,
            "use_amp": self.precision.name != "fp32",
            "callbacks": bool(self.callbacks),
        }
        if given := [name for name, is_set in cannot.items() if is_set]:
            raise ConfigError(
                f"run_epoch_manual leaves the whole step to compute_batch_loss, so {' and '.join(given)} cannot act; "
                f"leave them out, or use run_epoch"
            )
        loader = DataLoader(train_data, train_labels, batch_size, shuffle=False, device=self.given_device)
        tracker = LossTracker()
        for number, batch in enumerate(loader, start=1):
            assert isinstance(batch, DataBatch)
            tracker.update(compute_batch_loss(batch.data, batch.labels))  # type: ignore[arg-type]
            if number % self.log_interval == 0:
                recent = tracker.get_recent_average()
                logger.info("epoch %d/%d batch %d/%d loss %.4f", epoch, total_epochs, number, len(loader), recent)
        return tracker.get_average()

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: clock, numbers in flight, callbacks, loss scale and random generators.

        Model, optimizer and a torch scheduler have states of their own; a schedule function follows the clock.
        """
        return {
            "clock": self.clock.state_dict(),
            "ledger": self.ledger.state_dict(),
            "precision": self.precision.state_dict(),
            "callbacks": self._listed().state_dict(),
            "rng": rng_state(),
            "loss": self.task.decisions() if isinstance(self.task, Decides) else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: the next epoch is the one that was under way, from the step where it stood."""
        check_keys(state, ("clock", "ledger", "precision", "callbacks", "rng", "loss"), "TrainingLoop")
        if isinstance(self.task, Decides):
            self.task.decide(state["loss"])
        self.clock.load_state_dict(state["clock"])
        self.ledger.load_state_dict(state["ledger"])
        self.precision.load_state_dict(state["precision"])
        self._listed().load_state_dict(state["callbacks"])
        set_rng_state(state["rng"])
        self._is_restored, self._has_begun, self._trains = True, False, None

    def finish(self) -> None:
        """End the run: callbacks close their files, warn and sample text. The next epoch goes on where it ended."""
        if self._has_begun:
            self._has_begun = False
            self._listed().on_train_end(self._logs)

    # ------------------------------------------------------------------------------------------------ parts

    def _run(
        self,
        step: Step,
        loader: Loader,
        callbacks: CallbackList,
        epoch: int,
        *,
        rate: LearningRate,
        validate: Callable[..., dict[str, float]] | None,
        total_epochs: int | None = None,
    ) -> dict[str, float]:
        """Run one epoch of the engine's loop and return its numbers."""
        clock, ledger, optimizer = self.clock, self.ledger, rate.optimizer
        if not (self._is_restored and clock.epoch == epoch):
            clock.epoch, clock.position = epoch, 0
            ledger.window, ledger.epoch = Tally(), Tally()
        resumed, self._is_restored = self._is_restored, False
        self.control.begin()
        # Nothing is saved here, so that functions without a known optimizer can be trained too.
        parts: Any = (step.model, optimizer, step.precision, clock, ledger, callbacks, World(), self.seed)
        state = TrainState(*parts)
        plan = Plan(epochs=epoch + 1, log_interval=self.log_interval, max_skipped_steps=MAX_SKIPPED_STEPS)
        accumulated, device = self.accumulator.steps_at(epoch), step.updater.device
        memory = explain_out_of_memory(
            batch_size=None, grad_accum_steps=accumulated, precision=step.precision.name, device=device
        )
        with Interrupts(logger.warning) as interrupts, explain_worker_failure(), explain_single_sample(), memory:
            loop = Loop(
                state,
                step,
                loader,
                plan,
                learning_rate=rate,
                accumulator=self.accumulator,
                callbacks=callbacks,
                validate=None if validate is None else partial(validate, interrupts=interrupts),
                interrupts=interrupts,
            )
            try:
                if not self._has_begun:
                    batches = num_batches(loader)
                    per_epoch = None if batches is None else -(-batches // accumulated)
                    info = RunInfo("train", step.model, optimizer, clock, device, total_epochs, None, per_epoch, None)
                    info.resumed = resumed
                    callbacks.on_train_begin(info)
                    self._has_begun = True
                logs = loop.run()
                if interrupts.requested:
                    raise KeyboardInterrupt
            except BaseException as error:
                self._has_begun = False
                callbacks.on_exception(error)
                raise
        if "loss" not in logs:  # a callback stopped the epoch before its end
            ledger.flush()
            logs = loop.numbers.of(ledger.epoch) | logs
        self._logs = logs
        return logs

    def _listed(self, *more: Callback) -> CallbackList:
        return CallbackList((*self.callbacks, *self._progress, *more), self.control)

    def _take(self, trains: object) -> None:
        """Begin a new run if another model is to be trained than before."""
        if self._trains is not None and self._trains != trains:
            self.finish()
            self._forget()
        self._trains = trains

    def _forget(self) -> None:
        self.clock, self.ledger, self._has_begun = Clock(), Ledger(), False

    def _loader(self, source: Any, device: torch.device, *, training: bool) -> Loader:
        return make_loader(source, TrainerConfig(seed=self.seed), device, World(), training=training)

    def _validation(
        self, source: Any, model: nn.Module, task: Task, precision: Precision, device: torch.device
    ) -> Callable[..., dict[str, float]] | None:
        if source is None:
            return None
        loader = self._loader(source, device, training=False)
        return partial(evaluate, model, task, loader, precision=precision)

    def _check_accumulator(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self.accumulator.optimizer is not None and self.accumulator.optimizer is not optimizer:
            raise ConfigError("the gradient accumulator was made for another optimizer than the one given")
