"""Which phases of a curriculum have begun, and when: all that has to be saved of a curriculum."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from etude.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """When a phase began."""

    phase: str
    epoch: float
    """The epoch at which it began, counted from 1; a fraction if that was inside an epoch."""
    step: int
    """The steps that had been taken by then."""


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """The phases that have begun, in order. `Curriculum.advance` returns the next state and changes nothing.

    >>> state = CurriculumState((PhaseStart("code", 1.0, 0),))
    >>> CurriculumState.from_dict(state.to_dict()) == state
    True
    """

    starts: tuple[PhaseStart, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as lists, strings and numbers."""
        return {"begun": [asdict(entry) for entry in self.starts]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "CurriculumState":
        """Return the state that `to_dict` wrote."""
        try:
            entries = [(str(entry["phase"]), float(entry["epoch"]), int(entry["step"])) for entry in state["begun"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved curriculum cannot be read: {error!r}; resume from another checkpoint"
            ) from None
        return cls(tuple(PhaseStart(*entry) for entry in entries))
