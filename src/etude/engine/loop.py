"""The loop: epochs of steps, and logging, validating, saving and stopping between steps. It does no mathematics."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from etude.core import Batch, Control, DataError, Loader
from etude.core.spans import span
from etude.engine.learning_rate import LearningRate
from etude.engine.meter import measure
from etude.engine.state import Saver, TrainState
from etude.engine.step import GradientAccumulator, Step
from etude.engine.stopping import OTHER_PROCESS, FiniteCheck, Interrupted, Interrupts, StopPoll


@dataclass(frozen=True, slots=True)
class Plan:
    """When the loop ends and what it does between steps. Intervals of 0 or None mean never."""

    epochs: int | None = 1
    max_steps: int | None = None
    log_interval: int = 100
    """In steps."""
    validate_interval: int = 1
    """In epochs."""
    checkpoint_interval: int = 1
    """In epochs."""
    validate_every_steps: int | None = None
    save_every_steps: int | None = None
    max_skipped_steps: int = 20
    """Consecutive non-finite updates that are tolerated."""


class Loop:
    """Drives one run from its current state to the end of its plan."""

    def __init__(
        self,
        state: TrainState,
        step: Step,
        loader: Loader,
        plan: Plan,
        *,
        learning_rate: LearningRate,
        accumulator: GradientAccumulator | None = None,
        validate: Callable[[], dict[str, float]] | None = None,
        saver: Saver | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.state = state
        self.clock = state.clock
        self.log = state.log
        self.step = step
        self.loader = loader
        self.plan = plan
        self.learning_rate = learning_rate
        self.accumulator = accumulator if accumulator is not None else GradientAccumulator()
        self.callbacks = state.callbacks
        self.control: Control = self.callbacks.control
        self.validate = validate
        self.saver = saver
        self.interrupts = interrupts if interrupts is not None else Interrupts()
        self.stop_poll = StopPoll(self.interrupts, state.world)
        self.finite = FiniteCheck(state.log, step, plan.max_skipped_steps)
        self.logs: dict[str, float] = {}
        """Metrics of the last epoch or validation."""
        self._logs_at = -1  # the step they belong to: a checkpoint stores only metrics of its own step
        self._val_logs: dict[str, float] = {}
        self._validated_at = -1
        beginning, undoing = map(self.callbacks.owners, ("on_validation_begin", "on_validation_cut_off"))
        self._may_cut_off = beginning <= undoing  # otherwise effects of `on_validation_begin` would not be undone
        self._cut_off = False
        self._connect()

    def _connect(self) -> None:
        """Connect the step and the callbacks with each other and with the state."""
        self.callbacks.around = self.state.aside
        self.step.clock = self.clock
        self.step.watchers = self.callbacks.watchers()
        self.step.after_update = self.callbacks.device_updates()
        self.step.objective.connect(self.callbacks)
        self.step.notice, self.step.warn = partial(self._notify, event="execution"), self._notify

    def run(self) -> dict[str, float]:
        """Train until the plan is complete or a stop is requested; save; return the last metrics."""
        try:
            return self._run()
        except Exception:
            if self.saver is not None:
                self.saver.join()  # a checkpoint of an earlier step is completed
            raise

    def _run(self) -> dict[str, float]:
        self._poll()
        try:
            while not self._finished():
                self._run_epoch()
        finally:
            self.step.objective.end_run()
            self.step.batches = ()  # their memory is free again
        if self.clock.position and not self.control.stop:
            self._end_inside_epoch()
        if not self.control.stop:
            self.finite.run(self.clock.step)
        self._save()
        self._settle()
        if (log := self.state.world.log) is not None:
            self._notify_all(log.exchange())
        return self.logs

    def _run_epoch(self) -> None:
        if self.clock.position == 0:
            self.step.task.measures.begin(training=True)
        self.callbacks.on_epoch_begin(self.clock.epoch)
        if self.clock.validation_due:
            self._validate_and_save()
            if self._finished():  # interrupted again, or stopped because of the metrics
                return
        self._run_steps()
        if not self._finished():
            self._end_epoch()

    def _run_steps(self) -> None:
        """Run the remaining steps of the epoch."""
        clock, control = self.clock, self.control
        on_step_begin, on_step_end = (self.callbacks.hooks(name) for name in ("on_step_begin", "on_step_end"))
        batches = self.loader.iterate(clock.epoch, clock.position)
        self.log.restart_timer()
        due = self._next_due()
        try:
            for micro_batches in self._timed(self.accumulator.group(batches, clock.epoch)):
                end = batches.position
                for before in on_step_begin:
                    before(clock.step)
                if batches.position != end:  # a hook rewound the loader to read other data from here on
                    continue
                self.step.changed_settings = self.learning_rate.set(clock.step)
                report = self.step(micro_batches)
                clock.step += 1
                self.log.add(report, measure(micro_batches), clock.step, clock.position, end)
                clock.samples += end - clock.position
                clock.position = end
                for hook in on_step_end:
                    hook(report)
                if clock.step >= due or control.stop or control.save or control.validate or self.interrupts.requested:
                    self._between_steps()
                    due = self._next_due()
                    if self._finished():
                        return
        finally:
            batches.close()

    def _end_epoch(self) -> None:
        clock, plan, epoch = self.clock, self.plan, self.clock.epoch
        if clock.position == 0:
            raise DataError("the training loader gave no batch: its data is empty, or drop_last dropped all of it")
        tally = self.log.take_epoch()
        self.finite.streak(clock.step)
        self._notify(self.finite.epoch(tally, epoch + 1))
        due = _every(plan.validate_interval, epoch + 1) or epoch + 1 == plan.epochs
        validation = self._validate() if due else {}
        if self._cut_off:
            self.log.epoch = tally  # the end of the epoch has not been processed: a resumed run does all of it
            return
        self.step.objective.end_epoch(tally.means())
        logs = (
            self.log.numbers(tally, self.step)
            | self._measured()
            | self._rates()
            | {"epoch_s": tally.seconds}
            | self._phase()
        )
        self._set_logs(logs | validation)
        self.callbacks.on_epoch_end(epoch, self.logs)
        clock.epoch, clock.position = epoch + 1, 0
        if _every(plan.checkpoint_interval, epoch + 1) or self.control.save:
            self._save()

    def _end_inside_epoch(self) -> None:
        """Summarise the epoch that `max_steps` ended early; it is not complete, so it is not closed."""
        self.log.flush()
        self._notify(self.finite.epoch(self.log.epoch, self.clock.epoch + 1))
        logs = self.log.numbers(self.log.epoch, self.step) | self._measured() | self._rates() | self._validate()
        if not self._cut_off:
            self._set_logs(logs)

    def _measured(self) -> dict[str, float]:
        """Return the training metrics of the epoch so far."""
        return self.step.task.measures.results(self.state.world, self.step.updater.device, training=True)

    def _rates(self) -> dict[str, float]:
        """Return the learning rates, and other settings that have a schedule."""
        return self.step.updater.rates() | self.learning_rate.others()

    def _between_steps(self) -> None:
        plan, step = self.plan, self.clock.step
        if _every(plan.log_interval, step):
            with span("logging"):
                self._log_point()
        self._poll()
        self._validate_and_save()

    def _log_point(self) -> None:
        window = self.log.take_window()
        record = self.log.numbers(window, self.step)
        self.stop_poll.slow_rank.add(window)
        self.finite.streak(self.clock.step)
        position = {"step": self.clock.step, "epoch": self.clock.epoch, "samples": self.clock.samples}
        rates = self._rates()
        self.callbacks.on_log({**position, **self._phase(), **record, **rates, **self.callbacks.numbers()})

    def _poll(self) -> None:
        is_writing = self.saver is not None and self.saver.is_writing
        if asked := self.stop_poll.asked(self.clock.step, is_writing=is_writing):
            self.control.request_stop(asked, by_signal=True)
        if self.stop_poll.all_written:
            self._settle()
        self._notify_all(self.stop_poll.warnings)

    def _validate_and_save(self) -> None:
        plan, control, step = self.plan, self.control, self.clock.step
        if control.validate or self.clock.validation_due or _every(plan.validate_every_steps, step):
            control.validate = False
            logs = self._validate()
            self.clock.validation_due = int(self._cut_off)
            if not self._cut_off:
                self._set_logs(logs)
        if _every(plan.save_every_steps, step) or control.save:
            self._save()

    def _validate(self) -> dict[str, float]:
        if self.validate is None:
            return {}
        if self._validated_at != self.clock.step:  # only once, even if an epoch or the run ends at such a step
            self.log.flush()
            self.callbacks.on_validation_begin(self.clock.epoch)
            self.interrupts.may_cut_off = self._may_cut_off
            try:
                with span("validation"):
                    numbers = self.validate()
            except Interrupted:
                self._cut_off = True
                self.callbacks.on_validation_cut_off(self.clock.epoch)
                self.control.request_stop(self.interrupts.requested or OTHER_PROCESS, by_signal=True)
                return {}
            finally:
                self.interrupts.may_cut_off = False
            self._val_logs = {f"val_{name}": value for name, value in numbers.items()} | self._phase()
            self.callbacks.on_validation_end(self.clock.epoch, self._val_logs)
            if not math.isfinite(self._val_logs.get("val_loss", 0.0)):
                self._notify("the validation loss is not finite: look for NaN in the validation data or the weights")
            self._validated_at, self.clock.validation_due = self.clock.step, 0
            self.log.restart_timer()
        return self._val_logs

    def _notify(self, message: str, **facts: str) -> None:
        """Notify the user through callbacks: a warning, unless `event` names another kind of event."""
        log = self.log.world.log
        if message and log is not None and not facts:
            log.add(message)  # shown by rank 0, once, if that has not the same to say
        if message and self.log.world.is_main:
            self.callbacks.on_notice(message, {"step": self.clock.step, **facts})

    def _notify_all(self, messages: list[str]) -> None:
        for message in messages:
            self.callbacks.on_notice(message, {"step": self.clock.step})

    def _save(self) -> None:
        self.control.save = False
        if self.saver is None:
            return
        metrics = self.logs if self._logs_at == self.clock.step else {}
        with span("saving"):
            self._settle()
            if (path := self.saver.save(metrics)) is not None:
                self.callbacks.on_checkpoint(path)
        self.log.restart_timer()

    def _settle(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one, and report it."""
        if self.saver is not None and (path := self.saver.settle()) is not None:
            self.callbacks.on_checkpoint(path)

    def _set_logs(self, logs: dict[str, float]) -> None:
        self.logs, self._logs_at = logs, self.clock.step

    def _phase(self) -> dict[str, float]:
        """Return the phase of the run, if it has phases: metrics of different phases are not comparable."""
        return {"phase": float(self.clock.phase)} if self.clock.phase else {}

    def _finished(self) -> bool:
        clock, plan = self.clock, self.plan
        return (
            self.control.stop
            or (plan.epochs is not None and clock.epoch >= plan.epochs)
            or (plan.max_steps is not None and clock.step >= plan.max_steps)
        )

    def _next_due(self) -> int:
        """Return the next step after which there is something to do: steps before it skip all checks."""
        step, plan = self.clock.step, self.plan
        intervals = (plan.log_interval, plan.validate_every_steps, plan.save_every_steps)
        dues = [step - step % interval + interval for interval in intervals if interval]
        if plan.max_steps is not None:
            dues.append(plan.max_steps)
        is_alone = self.state.world.size == 1
        # A single process looks after every step whether its checkpoint is complete; several ask each other.
        dues.append(step + 1 if is_alone and self.saver is not None and self.saver.pending else self.stop_poll.due)
        return min(dues)

    def _timed(self, groups: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield from `groups`, counting the time spent waiting for data."""
        while True:
            start = time.perf_counter()
            with span("data"):
                group = next(groups, None)
            self.log.add_wait(time.perf_counter() - start)
            if group is None:
                return
            yield group


def _every(interval: int | None, count: int) -> bool:
    return interval is not None and interval > 0 and count % interval == 0
