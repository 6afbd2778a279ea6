"""What the engine trains: a task turns a model and a batch into loss terms, which are sums and counts.

The engine divides each sum once, by its count over all micro-batches and all ranks. So k micro-batches of b samples
give the gradient of one batch of k·b samples, for any masks and any number of ranks.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etude.core.batch import Batch, is_empty
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.loader import Loader
from etude.core.model import call_of
from etude.core.random import aside


@dataclass(slots=True)
class LossTerm:
    """One term of a loss: `weight · sum / count`, before the division.

    A term of weight 0 is a metric: it is summed, reduced and reported like the others, and has no gradient.
    """

    sum: Tensor
    """Sum over the counted elements (0-dim; part of the autograd graph unless the weight is 0)."""
    count: Tensor | float
    """Number of elements in the sum: a number, or a 0-dim tensor if it depends on the data."""
    weight: Tensor | float = 1.0
    """The weight of this term in the objective."""
    reported: bool = field(default=True, repr=False)
    """False for a term that is trained but not reported, such as a penalty."""
    optional: bool = field(default=False, repr=False)
    """True if the average is undefined when the count is zero: a task may have no labels in an epoch."""

    @property
    def is_weighted(self) -> bool:
        """Whether the term is trained; a tensor weight is not read and counts as trained."""
        return isinstance(self.weight, Tensor) or self.weight != 0


Terms = dict[str, LossTerm]
"""Terms by name. The objective is Σ weight·sum/count; the term of a single-task loss is called "loss"."""


def check_terms(terms: Any) -> None:
    """Raise TrainingError unless this is a valid return value of a task.

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
    """Return the attributes of objects that are numbers, strings or tensors; tensors by identity.

    >>> from types import SimpleNamespace
    >>> settings_of(SimpleNamespace(beta=0.5, name="kl", seen=[]))
    (('beta', 0.5), ('name', 'kl'))
    """
    found = [item for owner in owners for item in getattr(owner, "__dict__", {}).items()]
    plain = (bool, int, float, str, np.generic, Tensor)
    return tuple(
        [(name, id(one) if isinstance(one, Tensor) else one) for name, one in found if isinstance(one, plain)]
    )


class Measures:
    """What a run measures beside the terms of its loss; this one measures nothing (see `etude.metrics.MetricSet`)."""

    def wants(self, *, training: bool) -> bool:
        """Whether anything is measured, in training or in validation."""
        return False

    def update(self, predictions: Any, labels: Any, *, training: bool) -> None:
        """Add one batch. Does not synchronise."""

    def begin(self, *, training: bool) -> None:
        """Begin an epoch or a validation: forget the batches so far."""

    def results(self, world: Any, device: torch.device, *, training: bool) -> dict[str, float]:
        """Return the values since the beginning over all ranks, which must call this together. Synchronises."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what this process measures in training; empty if there is nothing."""
        return {}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore `state_dict`; those of several processes are combined."""

    def files(self) -> Mapping[str, str]:
        """Return files for the run folder at the end of a run: name to text."""
        return {}


class Task:
    """Base class of tasks: only `__call__` must be defined; every other method does nothing by default.

    >>> class Mean(Task):
    ...     def __call__(self, model, batch, *, metrics):
    ...         errors = (model(batch) - 1.0).square()
    ...         return {"loss": LossTerm(errors.sum(), errors.numel())}
    >>> from etude.core.task import LossTerm
    >>> Mean()(nn.Identity(), torch.zeros(3), metrics=False)["loss"].count
    3
    """

    version = 0
    """Changes whenever the model starts to run in another way, for example with other heads."""
    uses_all_parameters = True
    """False if a batch may leave some parameters out of the loss."""
    chooses_metrics = False
    """True if `__call__` accepts None for `metrics`: compute only those that cost next to nothing."""

    measures: Measures = Measures()
    """The metrics of the run, see `metrics=` of a Trainer."""
    judged: tuple[Any, Any] | None = None
    """Predictions (without gradient) and labels of the last call, which the metrics measure: a task of your own sets
    them in `__call__`."""

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms; with `metrics`, also those of weight 0."""
        raise NotImplementedError

    def measure(self, measures: Measures) -> None:
        """Use these metrics; raise ConfigError if the task cannot."""
        vars(self)["measures"] = measures  # a task may be frozen

    def observe(self, batch: Batch) -> None:
        """Called after every call with a batch, outside compiled code: update the metrics with what it judged."""
        training = torch.is_grad_enabled()
        if self.judged is not None:
            judged, self.judged = self.judged, None
            self.measures.update(*judged, training=training)
        elif self.measures.wants(training=training) and not is_empty(batch):
            raise TrainingError(
                f"metrics need predictions and labels, but {type(self).__name__} does not set them: assign "
                "`self.judged = (predictions.detach(), labels)` in its __call__, or remove `metrics`"
            )

    def objective(self, parts: Any) -> Any:
        """Return the `Objective` that turns terms into gradients, given `ObjectiveParts`; None for the default."""
        return None

    def constants(self) -> Hashable:
        """Return the host-side values its terms depend on, such as weights: they are constants of a captured step.

        The default is all its attributes that are numbers or strings. A value that changes in every step disables
        recording.
        """
        return settings_of(self)

    def trained_on(self, batch: Batch) -> None:
        """Called once on the host for every batch of a training step, to count what needs no model output."""

    # --- the loss

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term without running the model, or None if it cannot be known.

        Needed with gradient accumulation if there are several weighted terms: each is divided by its own count over
        the whole step before the first backward pass.
        """
        return None

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model on a batch as in training, for counting FLOPs."""
        return call_of(model)(model, batch)

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model on a batch for `Trainer.predict`; the batch may have no labels."""
        return call_of(model)(model, batch)

    def lend(self, model: nn.Module, batch: Batch) -> Terms:
        """Run the model on a batch of another rank, only because ranks must run it equally often; measure nothing.

        Nor are random numbers drawn: which batch is lent, and so how many there are, may differ in a resumed run.
        """
        with aside(0):
            terms = self(model, batch, metrics=False)
        self.judged = None
        return terms

    def decisions(self) -> dict[str, Any]:
        """Return decisions taken on the first batches, such as the loss, as plain data for checkpoints."""
        return {}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Replace all decisions by those that `decisions` returned."""

    def begin_run(self) -> None:
        """Called before the first step of a run that is not resumed: forget what an earlier run has decided."""
        self.decide({})

    def decide_on(self, model: nn.Module, batch: Batch) -> None:
        """Take such decisions on a batch, without any other effect; ranks do so before they compare theirs."""

    def announcement(self) -> str | None:
        """Return a sentence for the user about such decisions of this run, empty if there is none; None before."""
        return ""

    # --- numbers

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics derived from the averages of the terms, such as perplexity from the loss."""
        return {}

    def numbers(self) -> Mapping[str, float]:
        """Return the task's own metrics for a log point."""
        return {}

    def ordered(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return the metrics in the order in which they are displayed."""
        return numbers

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the averages followed by the metrics derived from them."""
        return self.ordered({**means, **self.derived(means)})

    # --- evaluation

    def measuring(self) -> AbstractContextManager[object]:
        """Return the context of an evaluation, in which metrics that are not plain averages accumulate."""
        return contextlib.nullcontext()

    def measured(self, world: Any, device: torch.device) -> Mapping[str, float]:
        """Return these metrics at the end of an evaluation; `world.sum(counts.to(device))` sums counts over ranks."""
        return {}

    def files(self) -> Mapping[str, str]:
        """Return files for the run folder at the end of a run, such as a confusion matrix: name to text."""
        return self.measures.files()

    def no_data(self) -> None:
        """Called if an evaluation had no batch with samples: raise, or return if that is allowed."""
        raise DataError(
            "the evaluation loader gave no batch with samples: its data is empty, or drop_last dropped all of it"
        )

    def no_numbers(self) -> None:
        """Called if an evaluation had batches but no metrics: raise, or return if that is allowed."""
        raise TrainingError(
            "the task reports no metrics of the evaluation data: it returned no terms, or only terms with "
            "reported=False; let it report one (a metric is a LossTerm of weight 0), or remove the validation data"
        )

    # --- before training

    def join(self, model: nn.Module) -> None:
        """Add modules that the task saves and trains to the model, before the optimizer is created."""

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters of the task to an optimizer that lacks them."""

    def used_outside(self, model: nn.Module) -> Collection[nn.Parameter]:
        """Return the parameters of the model that are used outside its forward pass: they are never sharded."""
        return ()

    def check_loader(self, loader: Loader | None, accumulation_steps: int) -> None:
        """Raise or warn if the training data, or the micro-batches of a step, do not suit the task."""

    # --- checkpoints

    def facts(self) -> Mapping[str, Any]:
        """Return plain data about the task for checkpoints to store beside the weights."""
        return {}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the stored data of the checkpoint at `place` contradicts this task."""


_METHODS = tuple(name for name in vars(Task) if not name.startswith("_"))


class _FunctionAsTask(Task):
    def __init__(self, function: Callable[..., Terms]) -> None:
        self.function = function

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        return self.function(model, batch, metrics=metrics)

    def constants(self) -> Hashable:
        return settings_of(self.function)


def as_task(task: Any) -> Task:
    """Return a `Task`: the one given, or a wrapper of a function (model, batch, *, metrics).

    Raises ConfigError for anything else: the methods of an object that is not a `Task` would silently not be called.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, type) or not callable(task):
        raise ConfigError(
            f"a task is called with (model, batch, metrics=…) and returns LossTerms, found {_described(task)}"
        )
    if methods := [name for name in _METHODS if name in dir(type(task))]:
        raise ConfigError(
            f"{type(task).__name__} defines {', '.join(methods)}but is not an etude.Task; inherit from it"
        )
    try:
        inspect.signature(task.forward if isinstance(task, nn.Module) else task).bind(None, None, metrics=True)
    except TypeError as error:
        raise ConfigError(
            f"a task is called with (model, batch, metrics=…), but that does not fit: {error}"
        ) from error
    except ValueError:
        pass  # no signature to check: the first call shows whether it fits
    return _FunctionAsTask(task)


def _described(task: Any) -> str:
    return f"the class {task.__name__}; pass an instance" if isinstance(task, type) else type(task).__name__
