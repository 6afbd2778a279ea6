"""What the loops by epochs have in common: whether to stop, the end of a run, and states that were saved."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Self

from etude.core import CheckpointError, Control


class EpochLoop(ABC):
    """A loop whose user writes the outer one: it asks `should_stop`, and ends the run by `finish` or a `with` block."""

    def __init__(self) -> None:
        self.control = Control()

    @property
    def should_stop(self) -> bool:
        """Whether a callback asked to stop, as `EarlyStopping` does; the reason is in `control.reason`."""
        return self.control.stop

    @abstractmethod
    def finish(self) -> None:
        """End the run: callbacks close their files and warn."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()


def check_keys(state: Mapping[str, Any], keys: Collection[str], owner: str) -> None:
    """Raise CheckpointError unless a saved state has all of its parts."""
    if missing := [key for key in keys if key not in state]:
        raise CheckpointError(f"this is not the state of a {owner}: it has no {', '.join(missing)}")
