"""The supervised task: a model, a batch of any form and a loss, which is chosen on the first batch by default."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.buffers import probing
from etude.core.lookups import explain_lookup
from etude.core.model import ModelCall, unwrap
from etude.core.task import Task, Terms
from etude.losses.inferred import InferredLoss
from etude.losses.strategies import LossStrategy
from etude.losses.wrapped import FunctionLoss, LossFunction


def as_strategy(loss: LossStrategy | LossFunction | None) -> LossStrategy:
    """Return a strategy for a strategy, a torch loss module, any function of (predictions, labels), or None.

    >>> as_strategy(None).chosen is None
    True
    """
    if loss is None:
        return InferredLoss()
    return loss if isinstance(loss, LossStrategy) else FunctionLoss(loss)


class SupervisedTask(Task):
    """Turns a model and a batch of any form into the terms of a loss strategy.

    `loss` is anything `as_strategy` accepts: a strategy, a torch loss, a function, or None to choose by shapes.

    >>> import torch
    >>> task = SupervisedTask(nn.CrossEntropyLoss())
    >>> terms = task(nn.Linear(4, 3), (torch.zeros(2, 4), torch.tensor([0, 2])), metrics=True)
    >>> sorted(terms), int(terms["loss"].count)
    (['accuracy', 'loss'], 2)
    """

    chooses_metrics = True

    def __init__(self, loss: LossStrategy | LossFunction | None = None) -> None:
        self.strategy = as_strategy(loss)
        self._model: nn.Module | None = None
        self._call: ModelCall | None = None

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms; raise DataError for ids beyond an embedding."""
        if self._call is None or model is not self._model:
            self._model, self._call = model, ModelCall(model)
        try:
            output = self.strategy.run(self._call, model, batch)
        except IndexError as error:
            if (explained := explain_lookup(error, model)) is None:
                raise
            raise explained from error
        if metrics is None:
            metrics = self.strategy.has_cheap_metrics(output, batch)
        terms = self.strategy.terms(output, batch, metrics=metrics)
        if self.measures.wants(training=torch.is_grad_enabled()):
            with torch.no_grad():
                predictions, labels = self.strategy.judged(output, batch)
            # A metric may keep them: the graph must not live as long.
            self.judged = predictions.detach() if isinstance(predictions, Tensor) else predictions, labels
        return terms

    def constants(self) -> Hashable:
        """Return the host-side values of the loss."""
        return self.strategy.constants()

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model on a batch as in training."""
        return self.strategy.outputs(ModelCall(model), model, batch)

    def decide_on(self, model: nn.Module, batch: Batch) -> None:
        """Let the strategy decide."""
        model = unwrap(model)
        with probing(model, training=False):
            call = ModelCall(model)
            self.strategy.terms(self.strategy.run(call, model, batch), batch, metrics=False)

    def announcement(self) -> str | None:
        """Return which loss was chosen and why."""
        return self.strategy.announcement()

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the strategy derives from averages."""
        return self.strategy.derived(means)

    def decisions(self) -> dict[str, Any]:
        """Return the decisions of the strategy."""
        return self.strategy.decisions()

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore the decisions of the strategy."""
        self.strategy.decide(decisions)

    def facts(self) -> Mapping[str, Any]:
        """Return the strategy's data for checkpoints."""
        return self.strategy.facts()

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the stored data of the checkpoint at `place` contradicts the strategy."""
        self.strategy.check_facts(saved, place)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term from the batch alone, or None if the strategy cannot know it."""
        return self.strategy.counts(batch)
