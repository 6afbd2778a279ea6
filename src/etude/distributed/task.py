"""A task as one of several ranks runs it: all ranks have the same terms, and one may have no samples."""

import json

from torch import Tensor, nn

from etude.core.batch import Batch, map_tensors
from etude.core.errors import TrainingError
from etude.core.task import Task
from etude.core.terms import LossTerm, Terms
from etude.distributed.parallel import idle_output
from etude.distributed.world import World


class RankTask(Task):
    """Runs a task on this rank's share of a batch.

    The last batch of an epoch may leave a rank without samples. It takes part in the step with sums and counts of 0,
    under the names that the other ranks use: the ranks tell each other at their first batch.
    """

    def __init__(self, task: Task, world: World) -> None:
        self.task = task
        self.world = world
        self._weighted: dict[str, bool] = {}
        """Names of all terms, in the order of every rank, and whether each has a weight."""

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of this rank's samples; raise TrainingError if they are others than before."""
        idle = is_empty(batch)
        # Either way through the model first: the ranks meet there too, and must meet in the same order.
        zero = idle_output(model) if idle else None
        terms = {} if idle else self.task(model, batch, metrics=metrics)
        if not self._weighted:
            self._weighted = self._agree(terms)
        if zero is not None:
            return {
                name: LossTerm(zero if weighted else zero.detach(), 0.0, float(weighted))
                for name, weighted in self._weighted.items()
            }
        if terms.keys() != self._weighted.keys():
            raise TrainingError(
                f"the terms of the loss changed from {', '.join(self._weighted)} to {', '.join(terms)}; with several "
                f"processes every batch must have the same ones: give a term that does not apply sum 0 and count 0"
            )
        return {name: terms[name] for name in self._weighted}

    def _agree(self, terms: Terms) -> dict[str, bool]:
        mine = {name: term.is_weighted for name, term in terms.items()}
        agreed: dict[str, bool] = {}
        for text in self.world.gather_text(json.dumps(mine)):
            for name, weighted in json.loads(text).items():
                agreed.setdefault(name, weighted)
        return agreed


def is_empty(batch: Batch) -> bool:
    """Whether a batch has tensors, and no sample in any of them.

    >>> import torch
    >>> is_empty({"x": torch.zeros(0, 3)}), is_empty({"x": torch.zeros(2, 3)}), is_empty(["words"])
    (True, False, False)
    """
    lengths: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        lengths.append(tensor.shape[0] if tensor.dim() else 1)
        return tensor

    map_tensors(batch, note)
    return bool(lengths) and not any(lengths)
