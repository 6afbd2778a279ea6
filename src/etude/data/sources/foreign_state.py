"""The position state of third-party loaders, so that a resume need not read batches again."""

import logging
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader as TorchLoader, IterableDataset

from etude.core.errors import DataError
from etude.data.sources.global_rng import Preserved
from etude.data.sources.rng import owned_generators
from etude.data.sources.worker_process import WorkerStart

logger = logging.getLogger("etude")

ADDRESS = " object at 0x"
EXACT = (
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "TakeExamplesIterable",
    "SkipExamplesIterable",
    "RepeatExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
)
"""Stages of Hugging Face iterable datasets whose state is that of the returned samples."""
RECOMPUTED = ("MappedExamplesIterable", "FilteredExamplesIterable", "RebatchedArrowExamplesIterable")
"""Stages that recompute some samples on a resume: the same ones if they draw no random numbers."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a position state, like torchdata's StatefulDataLoader: the state after its last batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from this state in the next iteration."""
        ...


@runtime_checkable
class StatefulIterator(Protocol):
    """An iterator with its own state, like those of grain: plain data, or bytes."""

    def __next__(self) -> Any:
        """Return the next batch."""
        ...

    def get_state(self) -> Any:
        """Return the state after the batch returned last."""
        ...

    def set_state(self, state: Any) -> Any:
        """Continue from this state."""
        ...


@runtime_checkable
class CountsEpochs(Protocol):
    """Like litdata's StreamingDataLoader: an iteration is the next epoch, or continues if `restore` is set."""

    current_epoch: int
    restore: bool


class _IteratorState:
    """The state of an iterator, as a dict of plain data."""

    def __init__(self, batches: StatefulIterator) -> None:
        self._batches: StatefulIterator | None = batches
        self._last: Any = None

    def close(self, batches: object) -> None:
        """Keep the state, and release this iterator with its threads and processes."""
        if self._batches is not None and self._batches is batches:
            self._last, self._batches = self._batches.get_state(), None

    def state_dict(self) -> dict[str, Any]:
        state = self._last if self._batches is None else self._batches.get_state()
        return {"bytes": state.decode("latin-1")} if isinstance(state, bytes) else {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self._batches is not None
        text = state_dict.get("bytes")
        self._batches.set_state(state_dict["state"] if text is None else text.encode("latin-1"))


class _Reading:
    """The reader of a stateful object: its initial state, and the latest iteration."""

    def __init__(self) -> None:
        self.initial: dict[str, Any] | None = None
        self.iteration: object = None


_READINGS: dict[int, _Reading] = {}
"""By identity: a dataclass, for example, cannot be hashed."""


def _reading_of(keeper: Stateful) -> _Reading:
    """Return the shared entry of this object; a new one each time, so no state, if its end cannot be detected."""
    if id(keeper) not in _READINGS:
        try:
            weakref.finalize(keeper, _READINGS.pop, id(keeper), None)
        except TypeError:  # a class with slots and no weak references
            return _Reading()
        _READINGS[id(keeper)] = _Reading()
    return _READINGS[id(keeper)]


class SourceState:
    """The state of a source, its dataset or its iterator that exactly determines its next batches.

    - A dataset is used in a plain torch DataLoader without workers, which does not read ahead.
    - A Hugging Face dataset is not used if it has a shuffle buffer, which states do not include. If it maps or
      filters, it is used as long as nothing is drawn.
    - Worker processes must draw nothing: their generators are not part of a state.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        dataset = getattr(source, "dataset", None)
        self._keeper: Stateful | None = source if isinstance(source, Stateful) else None
        self._is_dataset = type(source) is TorchLoader and not source.num_workers
        if self._is_dataset and isinstance(dataset, IterableDataset) and isinstance(dataset, Stateful):
            self._keeper = dataset
        names = {type(one).__name__ for one in _examples(dataset)}
        self.recomputes = not names.isdisjoint(RECOMPUTED)
        """Whether the state is usable only if nothing has been drawn since the epoch began."""
        if not names <= {*EXACT, *RECOMPUTED}:
            self._keeper = None
        if isinstance(source, TorchLoader) and source.num_workers and owned_generators(dataset, source.collate_fn):
            self._keeper = None
        self._iteration: object = None

    @property
    def is_kept(self) -> bool:
        """Whether there is a state."""
        return self._keeper is not None

    def now(self) -> dict[str, Any] | None:
        """Return the state after the batch returned last; None if there is no usable one.

        Grain's DataLoader compares the repr of its data source, which by default contains a memory address.
        """
        start = getattr(self._source, "worker_init_fn", None)
        if self._keeper is None or (isinstance(start, WorkerStart) and start.has_drawn):
            return None
        if _reading_of(self._keeper).iteration is not self._iteration:
            return None  # another reader of the same source: the state is that reader's
        with Preserved():
            state = self._keeper.state_dict()
        if isinstance(self._keeper, _IteratorState) and ADDRESS in repr(state):
            name = type(self._source).__name__
            _warn_once(f"a resume will read batches again: the data source of a {name} has no custom `__repr__`")
            return None
        return state

    def begin(self, epoch: int, state: dict[str, Any] | None) -> None:
        """Let the next iteration of the source continue from a state, or start at the beginning of an epoch.

        Raises DataError if the state is refused.
        """
        keeper = self._keeper
        if keeper is None or isinstance(keeper, _IteratorState):
            return
        reading = _reading_of(keeper)
        reading.iteration = self._iteration = object()
        if isinstance(keeper, CountsEpochs):
            keeper.current_epoch, keeper.restore = epoch, False
        if self._is_dataset:
            # A dataset may restart at the last state that was set, so every epoch sets it.
            reading.initial = keeper.state_dict() if reading.initial is None else reading.initial
            state = reading.initial if state is None else state
        if state is not None:
            self._load(keeper, state)
            if isinstance(keeper, CountsEpochs):
                keeper.restore = True  # also at the end of the epoch, when nothing is left

    def follow(self, batches: Any, state: dict[str, Any] | None) -> bool:
        """Use the iteration that has begun; return False if it is at the beginning.

        Raises DataError if it has its own state and refuses this one.
        """
        if isinstance(batches, StatefulIterator) and not isinstance(self._source, Stateful):
            self._keeper = _IteratorState(batches)
            _reading_of(self._keeper).iteration = self._iteration = object()
            if state is not None:
                self._load(self._keeper, state)
        return self._keeper is not None and state is not None

    def close(self, batches: object) -> None:
        """End an iteration; the state is kept."""
        if isinstance(self._keeper, _IteratorState):
            self._keeper.close(batches)

    def _load(self, keeper: Stateful, state: dict[str, Any]) -> None:
        try:
            keeper.load_state_dict(state)
        except Exception as error:
            name = type(keeper if self._is_dataset else self._source).__name__
            raise DataError(
                f"cannot resume: a {name} does not accept the state of the checkpoint; use the data of the saved "
                f"run ({error!r:.200})"
            ) from error


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _examples(dataset: Any) -> Iterator[Any]:
    """Yield the stages of a Hugging Face dataset, the last first."""
    steps = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        one = steps.pop()
        if one is not None:
            yield one
            steps += [getattr(one, "ex_iterable", None), *getattr(one, "ex_iterables", ())]
