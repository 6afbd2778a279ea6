"""Other people's metrics as ours: functions of predictions and labels, and metrics of torchmetrics."""

import importlib
import json
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
from etude.metrics.base import PER_CLASS, Measure, Metric, named_scores

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

    A result with several values is reported by their keys (`map_50` …), after the metric's name if it was given one
    (`boxes_map_50`); a vector is reported as `name_class0` …, by the metric's own `classes` if its result has them.
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
        """Return the values by name. Raises ConfigError for a value that is not a number or one per class."""
        value = self.compute()
        if not isinstance(value, Mapping):
            return self._named(self.name, value)
        kind = type(self.metric).__name__
        prefix = "" if self.name in (kind, snake_case(kind)) else f"{self.name}_"
        classes = [f"class{one}" for one in value["classes"].reshape(-1).tolist()] if "classes" in value else None
        found: dict[str, float] = {}
        for key, one in value.items():
            of_classes = classes is not None and str(key).endswith(PER_CLASS)
            if of_classes and bool((one != -1).any()):  # -1 without class_metrics
                found |= named_scores(prefix + key, one.reshape(-1).tolist(), classes)
            elif not of_classes and not (classes is not None and key == "classes"):
                found |= self._named(f"{prefix}{key}", one)
        return found

    def _named(self, name: str, value: Any) -> dict[str, float]:
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            return {name: float(value)}
        if isinstance(value, Tensor) and value.dim() == 1:
            return named_scores(name, value.tolist(), None) if value.numel() else {}
        shape = f"has a result of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {value!r:.60}"
        raise ConfigError(
            f"the metric {name} {shape}, which is not a number; set its average, turn extended_summary off, or use "
            "ConfusionMatrix of etude.metrics for a matrix"
        )

    def gather(self, world: World, device: torch.device) -> None:
        """Combine the state of all ranks.

        Lists are gathered here: torchmetrics needs as many elements on every rank, and mixes those of the ranks.
        """
        if world.size == 1:
            return
        metric = self.metric
        called = world.host_max([int(metric.update_called)])[0]
        lists = {key: getattr(metric, key) for key, first in metric._defaults.items() if isinstance(first, list)}
        for key, own in lists.items():
            elements = own if isinstance(own, list) else [own]
            lists[key] = _all_elements(world, elements, device)
            setattr(metric, key, [])
        metric.to(device)
        metric.sync(dist_sync_fn=lambda tensor, group: _all_elements(world, [tensor], device))  # noqa: ARG005
        # The state of all ranks is the state from now on.
        metric._is_synced, metric._cache = False, None
        for key, elements in lists.items():
            setattr(metric, key, elements)
        metric._update_count = max(metric._update_count, called)

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
            setattr(self.metric, key, _restored(one, self.metric.device))
        self.metric._update_count = state["updates"]


def _all_elements(world: World, elements: list[Any], device: torch.device) -> list[Any]:
    """Return the elements of all ranks, in the order of the ranks; each may have another number of them."""
    plain = [_plain(one) for one in elements]
    tensors = {
        f"{place}": one.detach().cpu().contiguous() for place, one in enumerate(plain) if not isinstance(one, str)
    }
    texts = {f"{place}": one for place, one in enumerate(plain) if isinstance(one, str)}
    blobs = world.gather_bytes(torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8))
    others = world.gather_text(json.dumps(texts)) if any(world.host_max([len(texts)])) else ["{}"] * len(blobs)
    found: list[Any] = []
    for blob, text in zip(blobs, others, strict=True):
        rank: dict[str, Any] = {**load(blob.numpy().tobytes()), **json.loads(text)}
        found += [_restored(rank[key], device) for key in sorted(rank, key=int)]
    return found


def _plain(state: Any) -> Any:
    """Return a state as tensors, lists and texts: a mask, which is a tuple with encoded bytes, as JSON."""
    if isinstance(state, list):
        return [_plain(one) for one in state]
    return (
        state.clone() if isinstance(state, Tensor) else json.dumps(state, default=lambda data: data.decode("latin1"))
    )


def _restored(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_restored(one, device) for one in state]
    return state.to(device) if isinstance(state, Tensor) else _as_mask(json.loads(state))


def _as_mask(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_as_mask(one) for one in value)
    return value.encode("latin1") if isinstance(value, str) else value


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
            f"torchmetrics has no metric '{metric}'; name one by its path, such as classification.BinaryF1Score (those "
            "of detection need torchvision and pycocotools)"
        )
    try:
        made = found(**(arguments or {}))
    except (ImportError, TypeError, ValueError) as error:
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
