"""The metrics of a run: built from names, objects and functions, sharing counts, in training and in validation."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from etude.config import build_component
from etude.core.errors import ConfigError
from etude.core.spelling import suggest
from etude.core.task import Measures
from etude.distributed import World
from etude.metrics.accuracy import Accuracy
from etude.metrics.adapters import FunctionMetric, TorchMetric, snake_case
from etude.metrics.base import Measure
from etude.metrics.counts import ClassCounts

MetricLike = Measure | Callable[[Any, Any], Any] | str | Mapping[str, Any]
"""A metric of etude.metrics or torchmetrics, a function of (predictions, labels), or a name as in a config file."""


def build_metrics(metrics: Any, path: str = "metrics") -> dict[str, Measure]:
    """Return metrics by the names of their results, from one or several of any kind, or a mapping of names to them.

    >>> list(build_metrics(["f1", {"name": "accuracy", "k": 5}, "f1"]))
    ['f1', 'accuracy_top5', 'f1_2']
    """
    if isinstance(metrics, Mapping) and not isinstance(metrics.get("name"), str):
        named = [(name, one) for name, one in metrics.items()]
    elif isinstance(metrics, (str, Mapping)) or not isinstance(metrics, Iterable) or _is_torchmetrics(metrics):
        named = [(None, metrics)] if metrics is not None else []
    else:
        named = [(None, one) for one in metrics]
    found: dict[str, Measure] = {}
    for place, (name, one) in enumerate(named):
        for measure in _built(one, f"{path}.{name or place}", name):
            measure.name = name if name is not None else _free(measure.name, found)
            if measure.name == "loss":
                raise ConfigError(f"{path}.{name or place}: 'loss' is the trained loss; give the metric another name")
            found[measure.name] = measure
    return found


def _built(metric: Any, path: str, name: str | None) -> list[Measure]:
    if isinstance(metric, (str, Mapping)):
        metric = build_component("metric", metric, path=path)
    if isinstance(metric, Measure):
        metric.own_name = metric.name = metric.own_name or metric.name or snake_case(type(metric).__name__)
        return [metric]
    if isinstance(metric, type):
        raise ConfigError(f"{path} is the class {metric.__name__}; pass an instance: {metric.__name__}(…)")
    if _is_torchmetrics(metric):
        if isinstance(metric, Mapping | nn.ModuleDict):  # a MetricCollection
            return [TorchMetric(one, key) for key, one in metric.items()]
        return [TorchMetric(metric, snake_case(type(metric).__name__))]
    own = getattr(metric, "__name__", "<lambda>")
    if not callable(metric) or (name is None and own == "<lambda>"):
        raise ConfigError(
            f"{path} is {metric!r:.60}; pass the name of a metric, an object of etude.metrics or torchmetrics, or a "
            f"function of (predictions, labels) with a name: metrics={{'my_name': function}}"
        )
    return [FunctionMetric(metric, own)]


def _is_torchmetrics(metric: Any) -> bool:
    return any(one.__module__.startswith("torchmetrics.") for one in type(metric).__mro__)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else next(n for i in range(2, 10**6) if (n := f"{name}_{i}") not in taken)


@dataclass(slots=True)
class _LastFiles:
    """Has slots, so that captured evaluations do not take what they return for state that they depend on."""

    files: dict[str, str]


class Together:
    """Metrics that are updated with the same batches; those that need the same counts share them."""

    def __init__(self, metrics: Mapping[str, Measure]) -> None:
        self.metrics = dict(metrics)
        self.counting: list[Measure] = []
        """The metrics that are updated; the others read the counts of one of these."""
        self._reading: list[Accuracy] = []
        """Those that read the counts of other metrics."""
        self._may_read = False
        """Whether there are such after a reset, on every rank."""
        self._last = _LastFiles({})
        for metric in self.metrics.values():
            if isinstance(metric, ClassCounts):
                metric.unsettle()
        self.reset()

    def update(self, predictions: Any, labels: Any) -> None:
        """Add one batch. Does not synchronise."""
        if self._reading and isinstance(predictions, Tensor) and not predictions.is_floating_point():
            # Class ids, which other metrics take for binary labels unless they know the classes.
            self._count_apart()
        for metric in self.counting:
            metric.update(predictions, labels)

    def _count_apart(self) -> None:
        """Let accuracies count by themselves until the next reset."""
        for accuracy in self._reading:
            accuracy.source = None
        self.counting, self._reading = [*self.counting, *self._reading], []

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self.metrics.values():
            metric.reset()
        self._share()

    def _share(self) -> None:
        """Let the first metric of every kind of counts count for all of them."""
        leaders: dict[Any, ClassCounts] = {}
        for metric in self.metrics.values():
            if isinstance(metric, ClassCounts):
                leader = leaders.setdefault(metric.same_counts(), metric)
                leader.needs_matrix = leader.needs_matrix or metric.needs_matrix
                metric.source = None if leader is metric else leader
            elif isinstance(metric, Accuracy):
                metric.source = None
        for metric in self.metrics.values():
            if isinstance(metric, Accuracy):
                metric.source = next((one for one in leaders.values() if metric.can_read(one)), None)
        self._reading = [one for one in self.metrics.values() if isinstance(one, Accuracy) and one.source is not None]
        self._may_read = bool(self._reading)
        shared = (Accuracy, ClassCounts)
        self.counting = [one for one in self.metrics.values() if not isinstance(one, shared) or one.source is None]

    def results(self, world: World, device: torch.device, *, keep: bool) -> dict[str, float]:
        """Return all values over all ranks; with `keep` every rank keeps its own state. Synchronises."""
        own = self.state_dict() if keep and world.size > 1 else None
        if self._may_read and world.size > 1 and world.host_max([int(not self._reading)])[0]:
            self._count_apart()  # a rank without samples has seen no class ids, and must gather the same metrics
        world.attempt(self._check_labels)
        for metric in self.counting:
            metric.gather(world, device)
        found: dict[str, float] = {}
        for metric in self.metrics.values():
            results = metric.results()
            if twice := found.keys() & results.keys():
                raise ConfigError(
                    f"two metrics report '{min(twice)}'; name one of them: metrics={{'{metric.name}_2': …}}"
                )
            found |= results
        self._last.files = {name: text for metric in self.metrics.values() for name, text in metric.files().items()}
        if own is not None:
            self.load_state_dict(own)
        return found

    @property
    def files(self) -> dict[str, str]:
        """The files of the last results, such as a confusion matrix over all ranks: name to text."""
        return self._last.files

    def _check_labels(self) -> None:
        for metric in self.counting:
            metric.check_labels()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every metric by name."""
        return {metric.name: metric.state_dict() for metric in self.counting}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the state of the metrics that have one, and reset the others; several states are combined."""
        if any(accuracy.name in one for accuracy in self._reading for one in states):
            self._count_apart()
        for metric in self.counting:
            first, *others = [one[metric.name] for one in states if metric.name in one] or [None]
            metric.reset()
            if first is not None:
                metric.load_state_dict(first)
            for other in others:
                more = copy.deepcopy(metric)
                more.load_state_dict(other)
                metric.merge(more)


class MetricSet(Measures):
    """The metrics of a run, in validation and, if wanted, in training."""

    def __init__(self, validation: Mapping[str, Measure], training: Mapping[str, Measure]) -> None:
        self.validation, self.training = Together(validation), Together(training)
        self.trains = True
        """Whether the metrics of training are measured at present."""

    @classmethod
    def of(cls, metrics: Any, in_training: bool | list[str] | None = None) -> Self:
        """Return the set of some metrics; those also measured in training are copies, by name or all of them."""
        found = build_metrics(metrics)
        wanted = in_training if isinstance(in_training, list) else list(found) if in_training else []
        for name in wanted:
            if name not in found:
                raise ConfigError(
                    f"train_metrics names '{name}', which is not among the metrics{suggest(name, found)}"
                )
        return cls(found, {name: copy.deepcopy(found[name]) for name in wanted})

    def now(self, *, training: bool) -> Together:
        """Return the metrics of this mode."""
        return self.training if training else self.validation

    def wants(self, *, training: bool) -> bool:
        """Whether any are measured."""
        return bool(self.now(training=training).metrics) and (self.trains or not training)

    def update(self, predictions: Any, labels: Any, *, training: bool) -> None:
        """Add one batch. Does not synchronise."""
        if self.wants(training=training):
            self.now(training=training).update(predictions, labels)

    def begin(self, *, training: bool) -> None:
        """Begin an epoch or a validation."""
        self.now(training=training).reset()

    def results(self, world: World, device: torch.device, *, training: bool) -> dict[str, float]:
        """Return the values since the beginning, over all ranks together. Synchronises."""
        if not self.wants(training=training):
            return {}
        return self.now(training=training).results(world, device, keep=training)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training metrics."""
        return self.training.state_dict()

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the training metrics; the states of several processes are combined."""
        self.training.load_state_dict(*states)

    def files(self) -> dict[str, str]:
        """Return the files of the metrics of the last validation, without one those of training: name to text."""
        return self.validation.files or self.training.files
