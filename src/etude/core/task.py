"""What the engine trains: a task turns a model and a batch into loss terms, which are sums and counts.

The engine divides each sum once, by its count over all micro-batches and all ranks. So k micro-batches of b
samples give the gradient of one batch of k·b samples, whatever the masks and whatever the number of ranks.
"""

import contextlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.loader import Loader
from etude.core.model import ModelCall


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


def settings_of(*owners: object) -> Hashable:
    """Return the numbers and words that objects keep as attributes, and which tensors.

    >>> from types import SimpleNamespace
    >>> settings_of(SimpleNamespace(beta=0.5, name="kl", seen=[]))
    (('beta', 0.5), ('name', 'kl'))
    """
    found = [item for owner in owners for item in getattr(owner, "__dict__", {}).items()]
    plain = (bool, int, float, str, np.generic, Tensor)
    return tuple(
        [(name, id(one) if isinstance(one, Tensor) else one) for name, one in found if isinstance(one, plain)]
    )


class Task:
    """Base class of tasks: `__call__` is all that must be defined; everything else has a default that does nothing.

    >>> class Mean(Task):
    ...     def __call__(self, model, batch, *, metrics):
    ...         errors = (model(batch) - 1.0).square()
    ...         return {"loss": LossTerm(errors.sum(), errors.numel())}
    >>> from etude.core.task import LossTerm
    >>> Mean()(nn.Identity(), torch.zeros(3), metrics=False)["loss"].count
    3
    """

    version = 0
    """Changes whenever the model is run in another way from now on, for example with other heads."""
    uses_all_parameters = True
    """False if a batch may leave parameters without a part in the loss."""
    chooses_metrics = False
    """True if `__call__` takes None for `metrics`: those that cost next to nothing."""

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms; with `metrics` those of weight 0 as well."""
        raise NotImplementedError

    def objective(self, parts: Any) -> Any:
        """Return the `Objective` that turns its terms into gradients, from `ObjectiveParts`; None: the plain one."""
        return None

    def constants(self) -> Hashable:
        """Return the numbers of the host that its terms are made with, such as weights: a recorded step has them.

        By default all numbers and words that are its attributes; one that changes with every step ends recording.
        """
        return settings_of(self)

    def trained_on(self, batch: Batch) -> None:
        """Called once for every batch of a training step, on the host: what a batch says by itself is counted here."""

    # --- the loss

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term without running the model, or None if it cannot be known.

        Needed with gradient accumulation if there are several weighted terms: each is divided by its own count over
        the whole step before the first backward pass.
        """
        return None

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model on a batch as training does: for counting FLOPs."""
        return ModelCall(model)(model, batch)

    def decisions(self) -> dict[str, Any]:
        """Return what was decided by the first batches, such as the loss, as plain data: checkpoints keep it."""
        return {}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Replace all decisions by those that `decisions` returned."""

    # --- numbers

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return numbers that follow from the averages of the terms, as perplexity does from the loss."""
        return {}

    def numbers(self) -> Mapping[str, float]:
        """Return numbers of its own for a log point."""
        return {}

    def ordered(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return numbers in the order in which people read them."""
        return numbers

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the averages, and after them the numbers derived from them."""
        return self.ordered({**means, **self.derived(means)})

    # --- evaluation

    def measuring(self) -> AbstractContextManager[object]:
        """Return the context of an evaluation: in it metrics that are more than averages count."""
        return contextlib.nullcontext()

    def measured(self, reduce: Callable[[Tensor], Tensor]) -> Mapping[str, float]:
        """Return these metrics at the end of an evaluation; `reduce` adds counts up over ranks."""
        return {}

    def no_data(self) -> None:
        """Called if an evaluation had no batch with samples: raise, or return if that may happen."""
        raise DataError(
            "the evaluation loader gave no batch with samples: its data is empty, or drop_last dropped all of it"
        )

    def no_numbers(self) -> None:
        """Called if an evaluation had batches, but nothing to report of them: raise, or return if that may happen."""
        raise TrainingError(
            "the task reports no numbers of the evaluation data: it returned no terms, or only terms with "
            "reported=False; let it report one (a metric is a LossTerm of weight 0), or leave the validation data out"
        )

    # --- before training

    def join(self, model: nn.Module) -> None:
        """Make what the task must save and train part of the model, before there is an optimizer."""

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters to an optimizer that it must update and does not have."""

    def check_loader(self, loader: Loader | None, accumulation_steps: int) -> None:
        """Raise or warn if the training data, or the micro-batches of a step, do not suit the task."""

    # --- checkpoints

    def facts(self) -> Mapping[str, Any]:
        """Return plain data about the task that checkpoints keep beside the weights."""
        return {}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the facts of the checkpoint at `place` contradict those of this task."""


_METHODS = tuple(name for name in vars(Task) if not name.startswith("_"))


class _FunctionAsTask(Task):
    def __init__(self, function: Callable[..., Terms]) -> None:
        self.function = function

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        return self.function(model, batch, metrics=metrics)

    def constants(self) -> Hashable:
        return settings_of(self.function)


def as_task(task: Any) -> Task:
    """Return a `Task`: the one given, or one made of a function (model, batch, *, metrics).

    Raises ConfigError for anything else: methods of an object that is no `Task` would silently not be called.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, type) or not callable(task):
        raise ConfigError(
            f"a task is called with (model, batch, metrics=…) and returns LossTerms, found {_described(task)}"
        )
    if methods := [name for name in _METHODS if name in dir(type(task))]:
        raise ConfigError(
            f"{type(task).__name__} defines {', '.join(methods)}, but is no etude.Task: inherit from it"
        )
    try:
        inspect.signature(task.forward if isinstance(task, nn.Module) else task).bind(None, None, metrics=True)
    except TypeError as error:
        raise ConfigError(
            f"a task is called with (model, batch, metrics=…), but that does not fit: {error}"
        ) from error
    except ValueError:
        pass  # it has no signature: the first call shows whether it fits
    return _FunctionAsTask(task)


def _described(task: Any) -> str:
    return f"the class {task.__name__}; make an object of it" if isinstance(task, type) else type(task).__name__
