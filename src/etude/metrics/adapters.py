"""Other people's metrics as ours: functions of predictions and labels, and metrics of torchmetrics."""

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import num_samples
from etude.core.errors import ConfigError, TrainingError
from etude.distributed import World
from etude.metrics.base import Measure, Metric, named_scores

logger = logging.getLogger("etude")

_DOUBTS = 4
"""Batches after which a function with as many values in each, but not one per sample, is warned of."""


class FunctionMetric(Metric):
    """The mean of a function of (predictions, labels).

    A tensor (N,) has one value per sample, per element, or for each of those that the function selects: their mean
    over all batches is exact. A single value is taken as the mean over the samples of its batch and weighted by their
    number.

    >>> off = FunctionMetric(lambda predictions, labels: (predictions - labels).abs(), "off")
    >>> off.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> off.results()
    {'off': 1.5}
    """

    num_sums = 2
    dtype = torch.float64

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self._odd: list[int] = []
        """Numbers of values in the first batches in which they were not those of samples or labels."""

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the sum of the values, and their number."""
        value = self.function(predictions, targets)
        if not isinstance(value, (Tensor, int, float)):
            raise TrainingError(
                f"the metric {self.name} returned a {type(value).__name__}; return a tensor or a number"
            )
        values = torch.as_tensor(value, dtype=torch.float64, device=None if isinstance(value, Tensor) else "cpu")
        samples = num_samples(targets)
        if values.dim() == 0:
            return torch.stack([values * samples, values.new_full((), samples)])
        if values.shape[0] != samples and values.numel() != (targets.numel() if isinstance(targets, Tensor) else 0):
            self._doubt(tuple(values.shape), samples)
        return torch.stack([values.sum(), values.new_full((), values.numel())])

    def _doubt(self, shape: tuple[int, ...], samples: int) -> None:
        """Warn once if all batches have the same number of values: these are no samples that are selected."""
        if len(self._odd) < _DOUBTS:
            self._odd.append(shape[0])
            if self._odd == [shape[0] or -1] * _DOUBTS:
                logger.warning(
                    "the metric %s returns a tensor %s for %d samples; return one value per sample, or a single one, "
                    "the mean of the batch, else the average is not that of the samples",
                    self.name,
                    shape,
                    samples,
                )

    def value(self, sums: list[float]) -> float:
        """Return the mean."""
        return sums[0] / sums[1] if sums[1] else math.nan


class TorchMetric(Measure):
    """A metric of torchmetrics: it is updated with predictions and labels, and ranks combine its state as it says.

    A result with several values is reported by their keys (`map_50` …), or as `name_class0` … if it is a vector.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self.metric, self.name = metric, name
        metric.sync_on_compute = metric._to_sync = False  # `gather` does it
        self._is_placed = False

    def update(self, predictions: Any, targets: Any) -> None:
        """Add one batch."""
        if not self._is_placed:
            device = next((one.device for one in (predictions, targets) if isinstance(one, Tensor)), None)
            if device is not None:
                self.metric.to(device)
            self._is_placed = True
        self.metric.update(predictions, targets)

    def compute(self) -> Any:
        """Return what the metric computes; nan if there is nothing. Synchronises."""
        return self.metric.compute() if self.metric.update_called else math.nan

    def results(self) -> dict[str, float]:
        """Return the values by name."""
        value = self.compute()
        if not isinstance(value, Mapping):
            return self._named(self.name, value)
        found: dict[str, float] = {}
        for key, one in value.items():
            if isinstance(one, Tensor) and one.numel() > 1:
                found |= self._named(str(key), one)
            elif not isinstance(one, Tensor) or one.numel():
                found[str(key)] = float(one)
        return found

    def _named(self, name: str, value: Any) -> dict[str, float]:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return {name: float(value)}
        if value.dim() == 1:
            return named_scores(name, value.tolist(), None)
        raise ConfigError(
            f"the metric {name} has a result of shape {tuple(value.shape)}, which is not a number; set its average, or "
            "use ConfusionMatrix of etude.metrics for a matrix"
        )

    def gather(self, world: World, device: torch.device) -> None:
        """Combine the state of all ranks."""
        if world.size > 1:
            self.metric.to(device)
            called = world.host_max([int(self.metric.update_called)])[0]
            lists = self._gathered_lists(world)
            self.metric.sync(dist_sync_fn=lambda tensor, group: _gathered(world, tensor))  # noqa: ARG005
            # The state of all ranks is the state from now on.
            self.metric._is_synced, self.metric._cache = False, None
            for key, first in self.metric._defaults.items():  # lists were joined to tensors; `reset` needs lists
                if isinstance(first, list) and isinstance(joined := getattr(self.metric, key), Tensor):
                    setattr(self.metric, key, [joined])
            for key, joined in lists.items():
                setattr(self.metric, key, joined)
            self.metric._update_count = max(self.metric._update_count, called)

    def _gathered_lists(self, world: World) -> dict[str, list[Tensor]]:
        """Take lists that are not reduced out of the metric; return those of all ranks.

        torchmetrics would gather their tensors one by one: ranks with fewer samples would do fewer collectives.
        """
        metric, own = self.metric, dict[str, Tensor]()
        keys = [
            key for key, how in metric._reductions.items() if how is None and isinstance(metric._defaults[key], list)
        ]
        for key in keys:
            if all(isinstance(one, Tensor) for one in getattr(metric, key)):
                own |= {f"{place} {key}": one for place, one in enumerate(getattr(metric, key))}
                setattr(metric, key, [])
        found: dict[str, list[Tensor]] = {}
        for tensors in _everyone(world, own) if keys else ():
            for name in sorted(tensors, key=lambda name: int(name.split()[0])):
                found.setdefault(name.split(maxsplit=1)[1], []).append(tensors[name].to(metric.device))
        return found

    def merge(self, other: Self) -> None:
        """Add what another metric of the same kind has seen."""
        if other.metric.update_called:
            self.metric.merge_state(other.metric)
            self.metric._update_count = max(self.metric._update_count, 1)

    def reset(self) -> None:
        """Reset to the initial state."""
        self.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metric."""
        states = self.metric._copy_state_dict()
        return {"updates": self.metric._update_count, "states": {key: _plain(one) for key, one in states.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the metric."""
        self.reset()
        for key, one in state["states"].items():
            moved = (
                [each.to(self.metric.device) for each in one] if isinstance(one, list) else one.to(self.metric.device)
            )
            setattr(self.metric, key, moved)
        self.metric._update_count = state["updates"]


def _gathered(world: World, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, without the empty ones of ranks that had no samples.

    The function of torchmetrics needs the same dtype and number of dimensions on every rank, which those lack.
    """
    tensors = [found[""].to(tensor.device) for found in _everyone(world, {"": tensor})]
    return [one for one in tensors if one.numel()] or tensors


def _everyone(world: World, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the named tensors of every rank, on the host."""
    own = save({name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()})
    return [
        load(one.numpy().tobytes()) for one in world.gather_bytes(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    ]


def _plain(state: Any) -> Any:
    return [one.clone() for one in state] if isinstance(state, list) else state.clone()


@register("metric", "torchmetrics")
def torch_metric(metric: str, arguments: dict[str, Any] | None = None) -> TorchMetric:
    """Return a metric of torchmetrics by its path there, such as `detection.MeanAveragePrecision`."""
    try:
        import torchmetrics
    except ImportError as error:
        raise ConfigError("metrics of torchmetrics need it: pip install 'etude[torchmetrics]'") from error
    module, _, kind = metric.rpartition(".")
    try:
        home = importlib.import_module(f"torchmetrics.{module}") if module else torchmetrics
    except ImportError:
        home = None
    found = getattr(home, kind, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(
            f"torchmetrics has no metric '{metric}'; name one by its path, such as classification.BinaryF1Score"
        )
    try:
        made = found(**(arguments or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torchmetrics' {metric} refuses its arguments: {error}") from error
    return TorchMetric(made, snake_case(kind))


def snake_case(name: str) -> str:
    """Return the name of a class as that of a metric.

    >>> snake_case("MeanAveragePrecision"), snake_case("BinaryF1Score"), snake_case("AUROC")
    ('mean_average_precision', 'binary_f1_score', 'auroc')
    """
    starts = [
        place > 0 and one.isupper() and (name[place - 1].islower() or name[place + 1 : place + 2].islower())
        for place, one in enumerate(name)
    ]
    return "".join(f"_{one}" if new else one for one, new in zip(name, starts, strict=True)).lower()
