"""The state that a loader made elsewhere keeps of its position, so that a resume need not read batches again."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from etude.core.errors import DataError
from etude.data.sources.global_rng import Preserved
from etude.data.sources.rng import owned_generators
from etude.data.sources.worker_process import WorkerStart

EXACT = (
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "TakeExamplesIterable",
    "SkipExamplesIterable",
)
"""Steps of Hugging Face's iterable datasets whose state is that of the samples handed out."""

_BEGUN: dict[int, object] = {}
"""The iteration that began last, by what keeps its state."""


@runtime_checkable
class Stateful(Protocol):
    """What goes on where it was, as torchdata's StatefulDataLoader: its state is that after the last batch it gave."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state now."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from this state in the next iteration."""
        ...


class SourceState:
    """The state of a source, if it or its dataset keeps one by which its next batches are exactly the same.

    - A dataset counts in a plain torch DataLoader without workers: that reads no further than its batches.
    - One of Hugging Face counts if it is read as it is: states leave out what a shuffle buffer holds, and are ahead of
      the samples that `map` and `filter` have handed out.
    - With worker processes, nothing may be drawn in them: their generators are not part of a state.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        dataset = getattr(source, "dataset", None)
        self._keeper: Stateful | None = source if isinstance(source, Stateful) else None
        self._is_dataset = type(source) is TorchLoader and not source.num_workers
        if self._is_dataset and isinstance(dataset, IterableDataset) and isinstance(dataset, Stateful):
            self._keeper = dataset
        if any(type(one).__name__ not in EXACT for one in _examples(dataset)):
            self._keeper = None
        if isinstance(source, TorchLoader) and source.num_workers and owned_generators(dataset, source.collate_fn):
            self._keeper = None
        self._initial: dict[str, Any] | None = None
        self._iteration: object = None

    @property
    def is_kept(self) -> bool:
        """Whether there is one."""
        return self._keeper is not None

    def now(self) -> dict[str, Any] | None:
        """Return the state after the batch handed out last; None if there is none that can be used."""
        start = getattr(self._source, "worker_init_fn", None)
        if self._keeper is None or (isinstance(start, WorkerStart) and start.has_drawn):
            return None
        if _BEGUN.get(id(self._keeper)) is not self._iteration:
            return None  # somebody else reads the same source: its state is theirs
        with Preserved():
            return self._keeper.state_dict()

    def begin(self, state: dict[str, Any] | None) -> bool:
        """Let the next iteration go on from a state; return False if it will begin at the beginning.

        Raises DataError if the state is refused.
        """
        keeper = self._keeper
        if keeper is None:
            return False
        _BEGUN[id(keeper)] = self._iteration = object()
        wanted = state
        if self._is_dataset:
            # A dataset may begin where it was once set to again and again, so every epoch sets it.
            self._initial = keeper.state_dict() if self._initial is None else self._initial
            wanted = self._initial if state is None else state
        if wanted is not None:
            try:
                keeper.load_state_dict(wanted)
            except Exception as error:
                raise DataError(
                    f"cannot resume: a {type(keeper).__name__} does not take the state of the checkpoint; has the data "
                    f"changed? ({error!r:.200})"
                ) from error
        return state is not None


def _examples(dataset: Any) -> Iterator[Any]:
    """Yield the steps that a dataset of Hugging Face takes its samples through, the last first."""
    one = getattr(dataset, "_ex_iterable", None)
    while one is not None:
        yield one
        one = getattr(one, "ex_iterable", None)
