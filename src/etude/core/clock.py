"""Progress of a run (steps, epochs, position in the epoch, samples) and requests to the loop between steps."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Clock:
    """All counters of a run; everything that depends on time (schedule, data order) is a function of these.

    >>> clock = Clock(step=3, epoch=0, position=192, samples=192)
    >>> Clock(**clock.state_dict()) == clock
    True
    """

    step: int = 0
    """Optimizer steps attempted, skipped ones included."""
    epoch: int = 0
    """Epochs completed; also the zero-based number of the current epoch."""
    position: int = 0
    """Samples of the current epoch consumed so far, over all ranks: the whole state of a loader."""
    samples: int = 0
    """Samples consumed since the start, over all ranks."""
    phase: int = 0
    """The phase of the run, counted from 1; 0 if it has no phases."""
    validation_due: int = 0
    """1 if a signal interrupted the validation after this step: a resumed run starts by repeating it."""

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the counters from `state_dict`."""
        self.step, self.epoch = state["step"], state["epoch"]
        self.position, self.samples = state["position"], state["samples"]
        self.phase = state.get("phase", 0)  # older checkpoints lack `phase`
        self.validation_due = state.get("validation_due", 0)


@dataclass(slots=True)
class Control:
    """Requests that the loop acts on after the current step; callbacks and signal handlers set them."""

    stop: bool = False
    """End the run after this step, with everything saved."""
    save: bool = False
    """Write a checkpoint after this step."""
    validate: bool = False
    """Run validation after this step."""
    reason: str = ""
    """Why `stop` was set, as a message for the user."""
    interrupted: bool = False
    """Whether a signal, such as Ctrl-C, set `stop`."""

    def begin(self) -> None:
        """Clear the request and reason of an earlier training call."""
        self.stop, self.reason, self.interrupted = False, "", False

    def request_stop(self, reason: str, *, by_signal: bool = False) -> None:
        """Ask the loop to stop; the first reason given is kept."""
        if not self.stop:
            self.stop, self.reason, self.interrupted = True, reason, by_signal
