"""Callbacks: the protocol and the order of its hooks.

A run calls the hooks in this order; within a hook, callbacks run in the order in which they are listed (but in
`on_train_end` those that pass on what others send, `listens`, come last):

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

Around everything that writes the model, `on_save_begin()` and `on_save_end()` are called. With `training.async_save` a
checkpoint is written while steps run; `on_checkpoint` is called after the step in which it is complete.

A callback may send the user a message with `notify` at any time: every callback receives it in `on_notice`. In a run
of several phases `on_phase_begin(phase, facts)` is called before the first step of each phase, but not again on a
resume.

Hooks outside a step (all but `on_step_begin`, `on_gradients`, `on_step_end`) draw random numbers from separate
generators, seeded by the run's seed, the hook and the step. They do not affect training, and a resumed run draws the
same ones.

Saving and validating are parts of the loop, not callbacks, so checkpoints do not depend on the order of callbacks.
Epochs are counted from zero. A hook that no callback overrides costs nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from etude.core import Clock, Control, Loader, StepReport, Task
from etude.core.model_record import RemembersArguments
from etude.core.monitor import Best
from etude.engine.learning_rate import LearningRate
from etude.engine.precision import MixedPrecision
from etude.monitor.events import Media

if TYPE_CHECKING:
    from etude.engine.callback_list import CallbackList
    from etude.engine.step import Step

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
    processes: int = 1
    """Processes that train together."""
    best: Best | None = None
    """The metric by which the run is judged, with its last and its best value so far; None if there is none."""
    divides_model: bool = False
    """Whether several processes divide the model: all of them must run it together."""


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
    step: "Step | None" = None
    """What trains: its last batches, precision, task; None in a validation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The `training` section; empty if the run has none."""


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


class Callback(RemembersArguments):
    """Base class: override the hooks you need. Set `self.control.stop`, `.save` or `.validate` to act on the loop."""

    control: Control
    shows_notices = False
    """True if `on_notice` shows its message to the user; if no callback does, messages are logged."""
    needs_model = False
    """True if it reads layers or weights of the model, so that a model that is a plain function is refused."""
    uses_all_parameters = True
    """False if it freezes parameters that the optimizer has, so that a step may leave them out."""
    gradients_every = 1
    """Steps between two calls of `on_gradients`; the steps in between can be captured as CUDA graphs."""
    runs_alone = False
    """True if it runs the model on one process by itself, so that a model that processes divide is refused."""
    listens = False
    """True if it passes on what other callbacks send: its `on_train_end` is called after theirs."""
    loads_shards = False
    """True if `load_state_dict` accepts tensors whose values are still in files (`etude.checkpoint.saved_tensor`)."""
    _siblings: "CallbackList | None" = None

    def __init__(self) -> None:
        self.control = Control()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it belongs to no run yet."""
        return {name: value for name, value in vars(self).items() if name != "_siblings"}

    def check_installed(self) -> None:
        """Raise ConfigError if a package that it needs is not installed; `etude config check` asks."""

    def prepare(self, model: nn.Module) -> None:
        """Called with the model before a `Trainer` creates its optimizer, for example to freeze parameters."""

    def bind(self, parts: RunParts) -> None:
        """Take what it needs from the components of a run; raise ConfigError if it cannot work in this run."""

    def trying(self, clock: Clock) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context of steps that are tried and undone, as by `find_lr`: no other hook is called in them.

        A callback that decides what a step trains sets it here as a run would at this time, and sets it back after it.
        """
        return nullcontext()

    def acts_in_steps(self) -> bool:
        """Return whether it needs training steps, so that it does nothing when a model is only validated."""
        return implements(self, "on_gradients")

    def on_train_begin(self, run: RunInfo) -> None:
        """Called once before the first step, after a checkpoint has been restored."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before the first step of an epoch, and again when a run resumes inside one."""

    def on_step_begin(self, step: int) -> None:
        """Called before every optimizer step with the number of steps taken so far."""

    def wants_gradients(self, step: int) -> bool:
        """Return whether `on_gradients` is called in the step after `step` steps: in every `gradients_every`-th."""
        return step % self.gradients_every == 0

    def on_gradients(self, gradients: Gradients) -> None:
        """Called in steps that `wants_gradients` chooses, after the backward pass; reading one waits for the device."""

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

    def on_media(self, name: str, media: Media, data: Any) -> None:
        """Called when a callback publishes a text, a matrix or a picture."""

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

    def publish(self, name: str, media: Media, data: Any) -> None:
        """Publish a text, a matrix (`{"classes": …, "matrix": …}`) or the path of a picture, for every callback.

        The run folder keeps it, and sinks and the dashboard show it, with the step.
        """
        if self._siblings is not None:
            self._siblings.on_media(name, media, data)

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
"""Names of all hooks."""


def implements(callback: Callback, method: str) -> bool:
    """Return whether a callback overrides a method."""
    own = getattr(callback, method)
    return getattr(own, "__func__", own) is not getattr(Callback, method)
