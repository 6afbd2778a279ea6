"""Callbacks: the protocol, the order of its hooks, and the list that calls them.

A run calls the hooks in this order; within a hook, callbacks run in the order in which they are listed:

    prepare(model)                                  # before the optimizer is created
    bind(parts)                                     # when the run is put together, before a checkpoint is loaded
    on_train_begin(run)
    for each epoch:
        on_epoch_begin(epoch)
        for each step:
            on_step_begin(step)                     # its batches have been loaded
            on_gradients(gradients)                 # between the backward pass and the update
            [device_update()(skipped)]              # after the update, inside the step
            on_step_end(report)                     # nothing has been read from the device yet
            numbers() · on_log(record)              # every `log_interval` steps: plain numbers
            [on_validation_begin · on_validation_end] [on_checkpoint]   # if asked for, or every N steps
        on_validation_begin(epoch) · on_validation_end(epoch, metrics) or on_validation_cut_off(epoch)
        on_epoch_end(epoch, logs)                   # training and validation numbers of the epoch
        on_checkpoint(path)
    on_exception(error)                             # instead of what follows the error
    on_train_end(result)

Around everything that writes the model, `on_save_begin()` and `on_save_end()` are called.

A callback may send the user a message with `notify` at any time: every callback receives it in `on_notice`. In a run
of several phases `on_phase_begin(phase, facts)` is called before the first step of each phase, but not again on a
resume.

Hooks outside a step (all but `on_step_begin`, `on_gradients`, `on_step_end`) draw random numbers from separate
generators, seeded by the run's seed, the hook and the step. They do not affect training, and a resumed run draws the
same ones.

Saving and validating are parts of the loop, not callbacks, so checkpoints do not depend on the order of callbacks.
Epochs are counted from zero. A hook that no callback overrides costs nothing.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Clock, ConfigError, Control, Loader, StepReport, Task
from etude.core.monitor import Best
from etude.core.run_layout import output_problems
from etude.core.spelling import did_you_mean
from etude.engine.precision import MixedPrecision
from etude.engine.update import LearningRate

logger = logging.getLogger("etude")

Logs = Mapping[str, float]
"""Metrics by name: loss, accuracy, lr, grad_norm, samples_per_s …; validation metrics start with `val_`."""


@dataclass(slots=True)
class RunInfo:
    """What a callback may read about the run."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    clock: Clock
    device: torch.device
    total_epochs: int | None
    total_steps: int | None
    """Optimizer steps of the whole run; None if it is unlimited."""
    steps_per_epoch: int | None
    run_dir: Path | None
    """Run folder, or None if nothing is written."""
    is_main: bool = True
    """True on the one process that writes files and prints."""
    resumed: bool = False
    best: Best | None = None
    """The metric by which the run is judged, with its last and its best value so far; None if there is none."""


@dataclass(slots=True)
class RunParts:
    """The components of a run. Every callback receives them before training starts, and may keep what it needs."""

    model: nn.Module | None
    """None if the model is a plain function that belongs to no module."""
    task: Task
    train_loader: Loader | None = None
    """The training loader, before batches are moved to the device."""
    val_loader: Loader | None = None
    learning_rate: LearningRate | None = None
    has_schedule: bool = False
    """Whether a schedule of the run sets the learning rate of every step."""


@dataclass(slots=True)
class Gradients:
    """The gradients of a step, summed over all ranks, before division and clipping."""

    model: nn.Module
    """Its parameters hold them in `grad`. It may be wrapped (`etude.core.model.unwrap`)."""
    params: Sequence[nn.Parameter]
    """The parameters that the step updates."""
    count: Tensor | float
    precision: MixedPrecision

    @property
    def divisor(self) -> Tensor | float:
        """The divisor that turns `grad` into the gradient of the averaged loss."""
        return self.precision.unscale(self.count)

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled (fp16): occasional overflows are then normal, and the scale adapts."""
        return self.precision.scaler is not None


class Callback:
    """Base class: override the hooks you need. Set `self.control.stop`, `.save` or `.validate` to act on the loop."""

    control: Control
    shows_notices = False
    """True if `on_notice` shows its message to the user; if no callback does, messages are logged."""
    needs_model = False
    """True if it reads layers or weights of the model, so that a model that is a plain function is refused."""
    uses_all_parameters = True
    """False if it freezes parameters that the optimizer has, so that a step may leave them out."""
    _siblings: "CallbackList | None" = None

    def __init__(self) -> None:
        self.control = Control()

    def prepare(self, model: nn.Module) -> None:
        """Called with the model before a `Trainer` creates its optimizer, for example to freeze parameters."""

    def bind(self, parts: RunParts) -> None:
        """Take what it needs from the components of a run; raise ConfigError if it cannot work in this run."""

    def acts_in_steps(self) -> bool:
        """Return whether it needs training steps, so that it does nothing when a model is only validated."""
        return implements(self, "on_gradients")

    def on_train_begin(self, run: RunInfo) -> None:
        """Called once before the first step, after a checkpoint has been restored."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before the first step of an epoch, and again when a run resumes inside one."""

    def on_step_begin(self, step: int) -> None:
        """Called before every optimizer step with the number of steps taken so far."""

    def on_gradients(self, gradients: Gradients) -> None:
        """Called in every step after the backward pass; reading a gradient waits for the device."""

    def on_step_end(self, report: StepReport) -> None:
        """Called after every optimizer step; reading a tensor of the report waits for the device."""

    def on_log(self, record: Logs) -> None:
        """Called every `log_interval` steps with the averages since the last call."""

    def on_validation_begin(self, epoch: int) -> None:
        """Called before validation."""

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Called after validation; names start with `val_`."""

    def on_validation_cut_off(self, epoch: int) -> None:
        """Called instead of `on_validation_end` when a signal interrupted the validation; a resumed run repeats it.

        A callback that overrides `on_validation_begin` undoes its effect here. If it does not override this hook,
        validations are not interrupted: the run stops after them.
        """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch and its validation."""

    def on_save_begin(self) -> None:
        """Called before the model and all state are read for a checkpoint, or the model for a file of its own."""

    def on_save_end(self) -> None:
        """Called when they have been written, or writing has failed."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint is safely on disk."""

    def on_exception(self, error: BaseException) -> None:
        """Called when the run ends with an error."""

    def on_train_end(self, result: Logs) -> None:
        """Called once at the end of a run, unless it ended with an error."""

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Called before the first step of a phase; metrics of different phases are not comparable."""

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Called when a callback notifies the user: with the message, and with facts for programs."""

    def device_update(self) -> Callable[[Tensor], None] | None:
        """Return a function that every step calls after its update, or None.

        Its argument is 1 on the device if the update was skipped. It may become part of a CUDA graph: it must only
        change tensors in place, must not read one, and must not decide anything by values of the host.
        """
        return None

    def numbers(self) -> Logs:
        """Return metrics to add to the record of a log point, right before `on_log`."""
        return {}

    def outcome(self) -> Mapping[str, Any]:
        """Return facts to add to `result.json` when the run is finished."""
        return {}

    def notify(self, message: str, **facts: Any) -> None:
        """Notify the user: the display shows the message, the run folder keeps it; without a display it is logged.

        It is a warning, unless the fact `event` names another kind of event.
        """
        if self._siblings is not None:
            self._siblings.on_notice(message, facts)
        else:
            logger.warning(message)

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG003
        """Return the files it writes when constructed with these arguments (or with such attributes).

        Before a run starts they are compared with the run's own files and with those of the other callbacks.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, strings, lists, dicts and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    def facts(self) -> Mapping[str, Any]:
        """Return plain data that every checkpoint keeps in its `meta.json`, beside the data of the task."""
        return {}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the stored data of the checkpoint at `place` contradicts this run."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
_CALLED = (
    *HOOKS,
    "prepare",
    "bind",
    "device_update",
    "numbers",
    "outcome",
    "state_dict",
    "load_state_dict",
    "facts",
    "check_facts",
)
"""Names of all hooks."""


def implements(callback: Callback, method: str) -> bool:
    """Return whether a callback overrides a method."""
    own = getattr(callback, method)
    return getattr(own, "__func__", own) is not getattr(Callback, method)


def check_methods(callback: Callback) -> None:
    """Raise ConfigError if a callback has a method `on_…` that is not a hook, or a hook with a wrong signature.

    The hooks are those of the library's classes. Classes that do not derive from Callback may have other methods.
    """
    ours = [kind for kind in type(callback).__mro__ if issubclass(kind, Callback)]
    known = {name for kind in ours if kind.__module__.startswith("etude.") for name in vars(kind)}
    for kind in ours:
        for name, value in vars(kind).items():
            is_method = isinstance(value, (FunctionType, classmethod, staticmethod))
            if name.startswith("on_") and name not in known and is_method:
                raise ConfigError(
                    f"{kind.__name__}.{name} would never be called: it is not a "
                    f"hook{did_you_mean(name, HOOKS) or ';'} rename it; a method that you call yourself must not "
                    "start with on_"
                )
    for name in _CALLED:
        method = getattr(callback, name)
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise ConfigError(
                f"{type(callback).__name__}.{name} would be called but never run; remove async and yield from it"
            )
        _, *arguments = inspect.signature(getattr(Callback, name)).parameters
        try:
            inspect.signature(method).bind(*arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(callback).__name__}.{name} must accept the arguments ({', '.join(arguments)}): {error}"
            ) from None


class CallbackList:
    """Calls each hook of each callback in the listed order; also usable in a training loop of your own.

    >>> class Count(Callback):
    ...     epochs = 0
    ...     def on_epoch_end(self, epoch, logs): self.epochs += 1
    >>> count = Count()
    >>> CallbackList([count]).on_epoch_end(0, {"loss": 0.5})
    >>> count.epochs
    1
    """

    def __init__(self, callbacks: Iterable[Callback] = (), control: Control | None = None) -> None:
        self.control = control if control is not None else Control()
        self.around: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
        """Returns the context in which a hook is called, given its name."""
        self._callbacks: list[Callback] = []
        self._hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in HOOKS}
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Callback) -> None:
        """Add a callback at the end of the order and give it this list's control.

        Raises ConfigError if it has a method `on_…` that is not a hook, or that does not take the arguments of its
        hook.
        """
        if not type(callback).__module__.startswith("etude."):
            check_methods(callback)
        callback.control = self.control
        callback._siblings = self
        self._callbacks.append(callback)
        for name in HOOKS:
            if implements(callback, name):
                self._hooks[name].append(getattr(callback, name))

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def hooks(self, name: str) -> list[Callable[..., None]]:
        """Return the overridden methods of one hook: empty if no callback implements it."""
        return self._hooks[name]

    def owners(self, name: str) -> set[int]:
        """Return the ids of the callbacks that override a hook."""
        return {id(one) for one in self._callbacks if getattr(one, name) in self._hooks[name]}

    def bind(self, parts: RunParts) -> None:
        """Pass the components of a run to every callback; raise ConfigError if one cannot work in this run."""
        for callback in self._callbacks:
            if parts.model is None and (callback.needs_model or implements(callback, "on_gradients")):
                name = type(callback).__name__
                raise ConfigError(
                    f"{name} needs the model's layers: pass a module, or a method of it, as model_forward"
                )
            callback.bind(parts)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that calls a hook of every callback: `callbacks.on_epoch_end(epoch, logs)`."""
        if name not in HOOKS:
            raise AttributeError(f"CallbackList has no attribute '{name}'")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> None:
        if hooks := self._hooks[name]:
            with self.around(name):
                for hook in hooks:
                    hook(*args)

    def on_train_begin(self, run: RunInfo) -> None:
        """Call the hook of every callback; before that, raise ConfigError if two would write the same file."""
        outputs = [(type(one).__name__, name) for one in self._callbacks for name in one.writes(vars(one))]
        for writer, problem in output_problems(outputs, run.run_dir):
            raise ConfigError(f"{writer}: {problem}; choose another file name")
        self._call("on_train_begin", run)

    def on_exception(self, error: BaseException) -> None:
        """Call the hook of every callback, even if an earlier one fails, so that all files are closed."""
        for hook in self._hooks["on_exception"]:
            try:
                with self.around("on_exception"):
                    hook(error)
            except Exception:
                logger.exception("on_exception of a callback failed, after %s: %s", type(error).__name__, error)

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Call the hook of every callback; log the message if no callback shows it."""
        self._call("on_notice", message, facts)
        if not any(callback.shows_notices for callback in self._callbacks):
            logger.log(logging.INFO if "event" in facts else logging.WARNING, message)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return the context in which the model is read and written to a file."""
        self._call("on_save_begin")
        try:
            yield
        finally:
            self._call("on_save_end")

    def device_updates(self) -> list[Callable[[Tensor], None]]:
        """Return the functions that a step calls after its update."""
        found = (callback.device_update() for callback in self._callbacks)
        return [one for one in found if one is not None]

    def numbers(self) -> dict[str, float]:
        """Return the metrics that callbacks add to the record of a log point."""
        if not (givers := [callback for callback in self._callbacks if implements(callback, "numbers")]):
            return {}
        with self.around("numbers"):
            return {name: value for callback in givers for name, value in callback.numbers().items()}

    def facts(self) -> dict[str, Any]:
        """Return the facts of all callbacks."""
        return {name: value for callback in self._callbacks for name, value in callback.facts().items()}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Let every callback compare the stored data of the checkpoint at `place` with its own."""
        for callback in self._callbacks:
            callback.check_facts(saved, place)

    def outcome(self) -> dict[str, Any]:
        """Return the facts that callbacks add to the result of the run."""
        return {name: value for callback in self._callbacks for name, value in callback.outcome().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback, by class name and index among callbacks of that class."""
        with self.around("state_dict"):
            return {key: callback.state_dict() for key, callback in self.by_key().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callbacks that existed when the state was saved; new ones keep their initial state."""
        for key, callback in self.by_key().items():
            if saved := state.get(key):
                callback.load_state_dict(saved)

    def by_key(self) -> dict[str, Callback]:
        """Return the callbacks under the keys of `state_dict`."""
        keyed: dict[str, Callback] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            keyed[f"{name}.{sum(key.startswith(f'{name}.') for key in keyed)}"] = callback
        return keyed
