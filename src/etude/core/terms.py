"""A loss is sums and counts: what a task returns, and the only form in which the engine sees a loss.

The engine divides each sum once, by its count over all micro-batches and all ranks. So k micro-batches of b
samples give the gradient of one batch of k·b samples, whatever the masks and whatever the number of ranks.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
    reported: bool = field(default=True, repr=False)
    """False for a term that is trained but is no number of the run, such as a penalty."""
    optional: bool = field(default=False, repr=False)
    """True if there is no number at all where nothing was counted: a task may have no labels in an epoch."""

    @property
    def is_weighted(self) -> bool:
        """Whether the term is trained; a weight that is a tensor is not looked at."""
        return isinstance(self.weight, Tensor) or self.weight != 0


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
