"""The supervised task: call the model with the batch, hand its output to a loss strategy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.calling import ModelCall
from etude.core.lookups import explain_lookup
from etude.core.task import Task, Terms
from etude.losses.inferred import as_strategy
from etude.losses.strategies import LossStrategy
from etude.losses.wrapped import LossFunction


class SupervisedTask(Task):
    """Turns a model and a batch of any form into the terms of a loss strategy.

    `loss` is anything `as_strategy` takes: a strategy, a torch loss, a function, or None to choose by shapes.

    >>> import torch
    >>> task = SupervisedTask(nn.CrossEntropyLoss())
    >>> terms = task(nn.Linear(4, 3), (torch.zeros(2, 4), torch.tensor([0, 2])), metrics=True)
    >>> sorted(terms), int(terms["loss"].count)
    (['accuracy', 'loss'], 2)
    """

    def __init__(self, loss: LossStrategy | LossFunction | None = None) -> None:
        self.strategy = as_strategy(loss)
        self._model: nn.Module | None = None
        self._call: ModelCall | None = None

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool) -> Terms:
        """Run the model on the batch and return its terms; raise DataError for ids that it has no embedding for."""
        if self._call is None or model is not self._model:
            self._model, self._call = model, ModelCall(model)
        try:
            output = self.strategy.run(self._call, model, batch)
        except IndexError as error:
            if (explained := explain_lookup(error, model)) is None:
                raise
            raise explained from error
        return self.strategy.terms(output, batch, metrics=metrics)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the numbers that the strategy derives from averages."""
        return self.strategy.derived(means)

    def decisions(self) -> dict[str, Any]:
        """Return what the strategy has decided by its first batches."""
        return self.strategy.decisions()

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Give the strategy these decisions."""
        self.strategy.decide(decisions)

    def facts(self) -> Mapping[str, Any]:
        """Return what checkpoints keep of the strategy."""
        return self.strategy.facts()

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the facts of the checkpoint at `place` contradict those of the strategy."""
        self.strategy.check_facts(saved, place)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term from the batch alone, or None if the strategy cannot know it."""
        return self.strategy.counts(batch)
