"""Runs the engine's loop one epoch at a time: progress, running an epoch, and saved state."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.callbacks.swapped import OptimizerWeights
from etude.core import Clock, ConfigError, Task
from etude.core.loader import StatefulLoader
from etude.core.model import unwrap
from etude.core.random import RunRandom, rng_state, set_rng_state
from etude.engine.callback import Callback, RunInfo, RunParts
from etude.engine.callback_list import CallbackList
from etude.engine.learning_rate import LearningRate
from etude.engine.loop import Loop, Plan
from etude.engine.state import Saver, TrainState
from etude.engine.step import GradientAccumulator, Step
from etude.engine.step_log import RunningSums, StepLog
from etude.engine.stopping import Interrupts
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.loops.epoch import EpochLoop, check_keys
from etude.trainer.machine import Machine
from etude.trainer.output import Output
from etude.trainer.sanity_check import check_validation
from etude.trainer.schedule import drivers_of

_STATE = ("clock", "log", "precision", "callbacks", "rng", "loss")


@dataclass(slots=True)
class Epoch:
    """The inputs of one epoch."""

    step: Step
    loaders: Loaders
    callbacks: CallbackList
    machine: Machine
    rate: LearningRate
    model: nn.Module | None
    """None if training uses functions that belong to no module."""
    validated: Task
    """The task that is evaluated on the validation data."""
    total_epochs: int | None = None


class EngineLoop(EpochLoop):
    """A run whose epochs are counted by the caller."""

    def __init__(
        self,
        task: Task,
        accumulator: GradientAccumulator,
        callbacks: tuple[Callback, ...],
        machine: Machine,
        config: TrainerConfig,
        output: Output,
    ) -> None:
        super().__init__()
        self.task = task
        self.accumulator = accumulator
        self.callbacks = callbacks
        self._modes = OptimizerWeights()
        self.machine = machine
        self.config = config
        self.output = output
        self.log_interval = config.log_interval
        self.clock = Clock()
        self.log = StepLog()
        self._data = _LoaderState()
        self._driven: tuple[Any, list[Callback]] | None = None
        self._trains: object = None  # the model, or the function in place of one, of the current run
        self._has_begun = self._is_restored = False
        self._logs: dict[str, float] = {}

    @property
    def tokens(self) -> float:
        """Tokens seen since the start."""
        return self.log.tokens

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the progress: clock, running sums, callbacks, loss scale, random generators and loader state.

        Model, optimizer and a torch scheduler have their own state dicts; a schedule function depends on the clock.
        """
        return {
            "clock": self.clock.state_dict(),
            "log": self.log.state_dict(),
            "precision": self.machine.precision.state_dict(),
            "callbacks": self._listed().state_dict(),
            "rng": rng_state(),
            "loss": self.task.decisions(),
            "metrics": self.task.measures.state_dict(),
            "data": self._data.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`: the next epoch is the interrupted one, from the step it had reached."""
        check_keys(state, _STATE, "TrainingLoop")
        self.task.decide(state["loss"])
        self.task.measures.load_state_dict(state.get("metrics", {}))
        self.clock.load_state_dict(state["clock"])
        self.log.load_state_dict(state["log"])
        self.machine.precision.load_state_dict(state["precision"])
        self._listed().load_state_dict(state["callbacks"])
        set_rng_state(state["rng"])
        self._data.load_state_dict(state.get("data", {}))
        self._is_restored, self._has_begun, self._trains = True, False, None

    def load_checkpoint(
        self, path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None
    ) -> None:
        """Continue from a checkpoint, or the newest intact one of a run folder: `state_dict`, model and optimizer.

        The next epoch is `clock.epoch`, from the step it had reached. A torch scheduler is restored too if given.
        """
        model.to(self.machine.device)
        callbacks = self._listed(*self._drivers(scheduler))
        checkpoint = self.output.read(Path(path), self.task.check_facts)
        metrics = checkpoint.metrics
        self._state(model, optimizer, callbacks, self.task).restore(checkpoint)
        self.output.loaded(checkpoint.path, metrics)
        self._is_restored, self._has_begun, self._trains = True, False, unwrap(model)

    def finish(self) -> None:
        """End the run: callbacks close their files, warn and sample text. A later epoch continues from here."""
        if self._has_begun:
            self._has_begun = False
            callbacks = self._listed()
            callbacks.on_train_end(self._logs)
            with self.output.held(self.clock, self.config):
                self.output.finish(self.clock, callbacks, self._logs, self.task.files())

    # ------------------------------------------------------------------------------------------------ an epoch

    def _run(self, number: int, epoch: Epoch) -> dict[str, float]:
        """Run one epoch of the engine's loop and return its metrics."""
        step, loaders, machine, rate = epoch.step, epoch.loaders, epoch.machine, epoch.rate
        callbacks = epoch.callbacks
        assert loaders.train is not None
        has_schedule = rate.schedule is not None
        settings = dict(self.config) | {"log_interval": self.log_interval}
        callbacks.bind(RunParts(epoch.model, step.task, *loaders.sources, rate, has_schedule, step, settings))
        resumed = self._go_to(number)
        if self.clock.step == 0:
            for task in (step.task, epoch.validated):
                task.begin_run()
        self._data.use(loaders.sources[0])
        self.control.begin()
        state = self._state(step.model, rate.optimizer, callbacks, step.task)
        saver = self._saver(state, epoch)
        plan = Plan(
            epochs=number + 1, log_interval=self.log_interval, max_skipped_steps=self.config.max_skipped_steps
        )
        with (
            self.output.held(self.clock, self.config),
            machine.training(self.accumulator.steps_at(number)),
            Interrupts(self.output.say) as interrupts,
        ):
            validate = None
            if loaders.validation is not None:
                validate = partial(machine.evaluate, step.model, epoch.validated, loaders.validation, interrupts)
            loop = Loop(
                state,
                step,
                loaders.train,
                plan,
                learning_rate=rate,
                accumulator=self.accumulator,
                validate=validate,
                saver=saver,
                interrupts=interrupts,
            )
            try:
                if not self._has_begun:
                    callbacks.on_train_begin(self._info(epoch, resumed))
                    self._has_begun = True
                    if loaders.validation is not None and epoch.model is not None:
                        trials = self.config.sanity_val_batches
                        check_validation(epoch.model, epoch.validated, loaders.validation, trials, machine)
                logs = loop.run()
                if interrupts.requested:
                    raise KeyboardInterrupt
            except BaseException as error:
                self._has_begun = False
                callbacks.on_exception(error)
                raise
        if "loss" not in logs:  # a callback stopped the epoch before its end
            self.log.flush()
            logs = self.log.numbers(self.log.epoch, step) | logs
        self._logs = logs
        return logs

    def _go_to(self, number: int) -> bool:
        """Begin an epoch, unless it is the restored one; return whether a run was restored."""
        resumed, self._is_restored = self._is_restored, False
        if not (resumed and self.clock.epoch == number):
            self.clock.epoch, self.clock.position = number, 0
            self.log.window, self.log.epoch = RunningSums(), RunningSums()
        return resumed

    def _state(self, model: nn.Module, optimizer: Any, callbacks: CallbackList, task: Task) -> TrainState:
        """Return the state of the run; without a known optimizer nothing can be saved."""
        precision, world = self.machine.precision, self.machine.world
        parts = model, optimizer, precision, self.clock, self.log, callbacks, world
        state = TrainState(*parts, self.config.seed, task, loader=self._data)
        state.random = _ProgramRandom(0)
        return state

    def _saver(self, state: TrainState, epoch: Epoch) -> Saver | None:
        if self.output.saves(self.config) and (epoch.model is None or epoch.rate.optimizer is None):
            raise ConfigError(
                "output_dir saves model and optimizer, which are unknown here; pass a module's forward and an "
                "optimizer's step method, or remove output_dir"
            )
        return self.output.saver(state, self.config, self.task.facts())

    def _info(self, epoch: Epoch, resumed: bool) -> RunInfo:
        batches, accumulated = epoch.loaders.num_batches, self.accumulator.steps_at(self.clock.epoch)
        return RunInfo(
            name=self.output.name,
            model=epoch.step.model,
            optimizer=epoch.rate.optimizer,
            clock=self.clock,
            device=epoch.machine.device,
            total_epochs=epoch.total_epochs,
            total_steps=None,
            steps_per_epoch=None if batches is None else -(-batches // accumulated),
            run_dir=self.output.path,
            resumed=resumed,
            processes=epoch.machine.world.size,
            best=self.output.judge.best,
        )

    def _listed(self, *more: Callback) -> CallbackList:
        return CallbackList((*self.callbacks, self._modes, *self.output.callbacks, *more), self.control)

    def _drivers(self, scheduler: Any) -> list[Callback]:
        """Return the callbacks that a scheduler needs, the same ones for every epoch."""
        if self._driven is None or self._driven[0] is not scheduler:
            self._driven = scheduler, drivers_of(scheduler)
        return self._driven[1]

    def _take(self, trains: object) -> None:
        """Begin a new run if another model is trained than before."""
        if self._trains is not None and self._trains != trains:
            self.finish()
            self._forget()
        self._trains = trains

    def _forget(self) -> None:
        self.clock, self.log, self._has_begun = Clock(), StepLog(), False
        self._modes = OptimizerWeights()


class _LoaderState:
    """The state of the training loader, if it has one; each epoch brings its loader, possibly after the state."""

    def __init__(self) -> None:
        self._loader: StatefulLoader | None = None
        self._saved: dict[str, Any] = {}

    def use(self, loader: object) -> None:
        self._loader = loader if isinstance(loader, StatefulLoader) else None
        if self._loader is not None:
            self._loader.load_state_dict(self._saved)
        self._saved = {}

    def state_dict(self) -> dict[str, Any]:
        return self._saved if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader, self._saved = None, dict(state)


class _ProgramRandom(RunRandom):
    """The program's own generators: an epoch that the user calls draws from them."""

    def state(self) -> dict[str, Any]:
        return rng_state()

    def load(self, state: dict[str, Any]) -> None:
        set_rng_state(state)
