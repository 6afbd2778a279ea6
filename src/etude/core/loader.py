"""The loader interface of the engine: batches of an epoch from a position on, and the position after each batch."""

from collections.abc import Iterator, Mapping, Set
from typing import Any, Protocol, runtime_checkable

from etude.core.batch import Batch


class BatchIterator(Protocol):
    """Batches of one epoch. `position` belongs to the batch returned last, however many are prefetched."""

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
        """Stop prefetching and release its resources; safe to call twice."""
        ...


@runtime_checkable
class Loader(Protocol):
    """A source of batches whose order is a pure function of (seed, epoch, position)."""

    def __len__(self) -> int:
        """Batches in one full epoch."""
        ...

    def iterate(self, epoch: int, position: int = 0) -> BatchIterator:
        """Return the batches of `epoch` from sample `position` on (a value of `BatchIterator.position`)."""
        ...


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader whose own state makes resuming faster than a position alone."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch returned last, as plain data; {} if there is none."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use this state when `iterate` is called with the epoch and position it belongs to."""
        ...


@runtime_checkable
class ChoosesStreams(Protocol):
    """A loader of named streams whose selection can change during a run."""

    def choose(
        self,
        weights: Mapping[str, float] | None = None,
        sequence_length: int | None = None,
        only: Set[str] | None = None,
        position: int | None = None,
    ) -> bool:
        """Set what is read from sample `position` of the current epoch on; None: from the next `iterate` on.

        Returns whether this changes anything. If so, the iterator of the epoch has been moved to the position.

        None restores the loader's original proportions, sequence length and streams.
        """
        ...
