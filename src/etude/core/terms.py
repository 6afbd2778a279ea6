"""A loss is sums and counts: what a task returns, and the only form in which the engine sees a loss.

The engine divides each sum once, by its count over all micro-batches and all ranks. So k micro-batches of b
samples give the gradient of one batch of k·b samples, whatever the masks and whatever the number of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.errors import TrainingError


@dataclass(slots=True)
class LossTerm:
    """One term of a loss: `weight · sum / count`, before the division.

    A term of weight 0 is a metric: it is summed, reduced and reported like the others, and has no gradient.
    """

    sum: Tensor
    """Sum over the elements that count (0-dim; with gradient history unless the weight is 0)."""
    count: Tensor | float
    """How many elements the sum runs over: a number, or a 0-dim tensor if it depends on the data."""
    weight: Tensor | float = 1.0
    """The factor of this term in the objective."""


Terms = dict[str, LossTerm]
"""Terms by name. The objective is Σ weight·sum/count; the term of a single-task loss is called "loss"."""


def check_terms(terms: Any) -> None:
    """Raise TrainingError unless this is what a task returns.

    >>> check_terms({"loss": LossTerm(Tensor([2.0]).sum(), 1)})
    """
    found = list(terms.values()) if isinstance(terms, dict) else [terms]
    if not isinstance(terms, dict) or not all(isinstance(term, LossTerm) for term in found):
        wrong = next((type(term).__name__ for term in found if not isinstance(term, LossTerm)), "LossTerm")
        raise TrainingError(
            f"a task, and `terms` of a loss strategy, returns a dict of LossTerm(sum, count), such as "
            f'{{"loss": LossTerm(loss_sum, len(labels))}}, found {"a dict of " * isinstance(terms, dict)}{wrong}'
        )


@runtime_checkable
class Task(Protocol):
    """What the engine trains: turns a model and a batch into terms.

    `metrics` asks for the terms of weight 0 as well (always in evaluation, in training if configured).
    """

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool) -> Terms:
        """Run the model on the batch and return its terms."""
        ...


@runtime_checkable
class CountsAhead(Protocol):
    """A task that knows its counts from the batch alone.

    Needed by tasks with several weighted terms under gradient accumulation: each term has to be divided
    by its own count over the whole step before the first backward pass.
    """

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term without running the model, or None if it cannot be known."""
        ...


@runtime_checkable
class Derives(Protocol):
    """A task that knows numbers which follow from the averages of its terms, as perplexity does from the loss."""

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return such numbers by name."""
        ...


@runtime_checkable
class Decides(Protocol):
    """A task that decides something by its first batches, such as the loss; a resumed run does not do so again."""

    def decisions(self) -> dict[str, Any]:
        """Return what has been decided as plain data; nothing if nothing has."""
        ...

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Replace all decisions by those that `decisions` returned."""
        ...


@runtime_checkable
class SeveralTasks(Protocol):
    """A task that is several: its terms are called `<task>/…`, and not every batch has all of them."""

    tasks: Mapping[str, Any]
    """What is known of each task, by its name."""
    version: int
    """Changes whenever other tasks become active."""

    def weighted_terms(self, batch: Batch) -> list[str]:
        """Return the names of the weighted terms that a batch has, in order; the batch may have no samples."""
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model on a batch as training does."""
        ...

    def numbers(self) -> Mapping[str, float]:
        """Return numbers of its own for a log point, such as the weights of the tasks."""
        ...


@runtime_checkable
class SwitchesTasks(Protocol):
    """Several tasks of which a run switches some on and off as it goes on: what a curriculum acts on."""

    def activate(self, weights: Mapping[str, float], variants: Mapping[str, str] | None = None) -> None:
        """Train the tasks that have a weight, with that weight and in the given forms; all others rest."""
        ...

    def streams(self) -> frozenset[str] | None:
        """Return the streams of data that active tasks read; None if one of them reads any."""
        ...


@runtime_checkable
class Measures(Protocol):
    """A task with metrics that are more than averages: it counts while it is evaluated."""

    def start_measuring(self) -> None:
        """Begin to count."""
        ...

    def stop_measuring(self) -> None:
        """Stop counting, after an error."""
        ...

    def measured(self, reduce: Callable[[Tensor], Tensor]) -> Mapping[str, float]:
        """Return the metrics and stop counting; `reduce` adds counts up over ranks."""
        ...


def derive(task: Any, means: Mapping[str, float]) -> dict[str, float]:
    """Return the averages, and after them the numbers that a task derives from them.

    >>> derive(None, {"loss": 0.5})
    {'loss': 0.5}
    """
    return in_order(task, {**means, **(task.derived(means) if isinstance(task, Derives) else {})})


def in_order(task: Any, numbers: dict[str, float]) -> dict[str, float]:
    """Return numbers of several tasks in the order of the tasks, whichever came first in the data.

    Numbers that belong to no task come before. Those of a single task stay as they are.
    """
    if not isinstance(task, SeveralTasks):
        return numbers
    places = {name: place for place, name in enumerate(task.tasks)}
    return dict(sorted(numbers.items(), key=lambda item: places.get(item[0].rpartition("/")[0], -1)))
