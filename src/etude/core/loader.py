"""What the engine needs of a loader: batches of an epoch from a position on, and the position after each."""

from collections.abc import Iterator, Mapping, Set
from typing import Any, Protocol, runtime_checkable

from etude.core.batch import Batch


class BatchIterator(Protocol):
    """Batches of one epoch. `position` always belongs to the batch handed out last, however much is prefetched."""

    @property
    def position(self) -> int:
        """Samples of this epoch consumed so far over all ranks, including the batch returned last."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Return self."""
        ...

    def __next__(self) -> Batch:
        """Return the next batch of this rank."""
        ...

    def close(self) -> None:
        """Stop any prefetching and release its resources; safe to call twice."""
        ...


@runtime_checkable
class Loader(Protocol):
    """A source of batches whose order is a pure function of (seed, epoch, position)."""

    def __len__(self) -> int:
        """Batches in one whole epoch."""
        ...

    def iterate(self, epoch: int, position: int = 0) -> BatchIterator:
        """Return the batches of `epoch` from sample `position` on (a value of `BatchIterator.position`)."""
        ...


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that resumes faster with a state of its own than by a position alone."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch handed out last, in plain data; {} if there is none."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the state when `iterate` is called with the epoch and the position that it belongs to."""
        ...


@runtime_checkable
class ChoosesStreams(Protocol):
    """A loader of named streams of data, of which a run may choose others as it goes on."""

    def choose(
        self,
        weights: Mapping[str, float] | None = None,
        sequence_length: int | None = None,
        only: Set[str] | None = None,
        position: int | None = None,
    ) -> bool:
        """Set what is read from sample `position` of the epoch under way on, without one from the next `iterate` on.

        Returns whether that is something else than before. The iterator of the epoch then stands at the position.

        None stands for what the loader was made with: its proportions, its sequence length, all its streams.
        """
        ...
