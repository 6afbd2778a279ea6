"""Where a run stands: optimizer steps, epochs, position in the epoch, samples seen."""

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
    """Epochs completed; also the number of the epoch under way, counted from zero."""
    position: int = 0
    """Samples of the epoch under way that are consumed, over all ranks: the whole state of a loader."""
    samples: int = 0
    """Samples consumed since the start, over all ranks."""
    phase: int = 0
    """The phase of the curriculum, counted from 1; 0 without a curriculum."""
    validation_due: int = 0
    """1 if the validation after this step was cut off by a signal: a resumed run begins with it."""

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the counters from `state_dict`."""
        self.step, self.epoch = state["step"], state["epoch"]
        self.position, self.samples = state["position"], state["samples"]
        self.phase = state.get("phase", 0)  # checkpoints of runs before there were curricula have none
        self.validation_due = state.get("validation_due", 0)
