"""Plain loss functions and torch's loss modules as loss strategies.

A function that returns a mean does not tell its divisor. Torch's own losses are computed as sums with exact counts;
any other function is assumed to return the mean over the samples of the batch.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from etude.config.registry import register
from etude.core.batch import Batch, num_samples
from etude.core.errors import ConfigError, TrainingError
from etude.core.task import LossTerm, Terms, settings_of
from etude.losses.functional import IGNORE_INDEX, count_labels, cross_entropy_term, nll_term
from etude.losses.strategies import LossStrategy, add_accuracy, class_labels, logits_of, required_labels

LossFunction = Callable[[Any, Any], Tensor]

TORCH_MODULES: Mapping[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.CrossEntropyLoss: (F.cross_entropy, ("weight", "ignore_index", "label_smoothing")),
    nn.NLLLoss: (F.nll_loss, ("weight", "ignore_index")),
    nn.MSELoss: (F.mse_loss, ()),
    nn.L1Loss: (F.l1_loss, ()),
    nn.SmoothL1Loss: (F.smooth_l1_loss, ("beta",)),
    nn.HuberLoss: (F.huber_loss, ("delta",)),
    nn.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
    nn.BCELoss: (F.binary_cross_entropy, ("weight",)),
}
"""Torch's losses: the function that each module calls, and its options. The first two average over labels, the others
over all elements."""
TORCH_FUNCTIONS = dict(TORCH_MODULES.values())


class FunctionLoss(LossStrategy):
    """A strategy from `function(predictions, labels)`, where predictions are the logits of the model's output.

    - Torch's losses, as modules or functions (also in a `functools.partial`), become exact sums and counts: over
      elements for `mse_loss` and its like, over labels for `cross_entropy`, with its weights and `ignore_index`.
      reduction="none" gives the same result as "mean"; reduction="sum" is refused.
    - Any other function that returns a scalar is treated as a mean over the samples of the batch.
    - A function whose second argument is named `batch` receives the whole batch and the unchanged model output.
    - The values of a function that returns several are averaged.

    >>> batch = (torch.zeros(2, 3), torch.tensor([[1.0], [3.0]]))
    >>> FunctionLoss(nn.MSELoss()).terms(torch.zeros(2, 1), batch, metrics=False)["loss"]
    LossTerm(sum=tensor(10.), count=2, weight=1.0)
    """

    def __init__(self, function: LossFunction) -> None:
        """Wrap a function, a module or a partial of one; raise ConfigError if it is not callable or uses a sum."""
        if not callable(function):
            raise ConfigError(f"a loss is a function of (predictions, labels), found a {type(function).__name__}")
        check_loss_arguments(function)
        self.function = function
        if _reduction(function) == "sum":
            raise ConfigError(
                f'{self.name}: reduction="sum" is not supported, because a loss is divided by its count over all '
                f'micro-batches and processes; use reduction="mean", and multiply the learning rate by the labels per '
                f"batch to get the same steps"
            )
        self._torch_function, self._options = _recognise(function)
        signature = _signature(function)
        self._takes_batch = signature is not None and list(signature.parameters)[1:2] == ["batch"]

    @property
    def name(self) -> str:
        """The name of the wrapped function, for messages."""
        return _name(self.function.func if isinstance(self.function, functools.partial) else self.function)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss", and "accuracy" with `metrics` if the function is torch's cross entropy or nll_loss."""
        if self._takes_batch:
            return {"loss": self._mean_term(output, batch)}
        predictions, labels = logits_of(output), required_labels(batch, "the loss function")
        options = self._options
        for name, value in options.items():
            if isinstance(value, Tensor) and value.device != predictions.device:
                options[name] = value.to(predictions.device)  # once: weights stay on the model's device
        if self._torch_function in (F.cross_entropy, F.nll_loss):
            return self._classification_terms(predictions, labels, metrics)
        if self._torch_function is not None:
            return {"loss": self._elementwise_term(self._torch_function, predictions, labels)}
        try:
            return {"loss": self._mean_term(predictions, labels)}
        except AttributeError as error:
            if error.obj is not predictions and error.obj is not labels:
                raise
            raise TrainingError(
                f"the loss function {self.name} uses `.{error.name}`, but it gets the logits and the labels; name its "
                "second argument `batch` to get the model's output and the whole batch: loss=lambda output, batch: …"
            ) from error

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of counted labels or elements for a torch loss; None for any other function."""
        if self._torch_function is None:
            return None
        labels = required_labels(batch, "the loss function")
        if self._torch_function not in (F.cross_entropy, F.nll_loss):
            return {"loss": labels.numel()}
        if labels.is_floating_point():
            return None
        weight, skip = self._options.get("weight"), self._options.get("ignore_index", IGNORE_INDEX)
        return {"loss": count_labels(labels, skip, weight)}

    def constants(self) -> Hashable:
        """Return the settings of a function object or of a torch loss."""
        return settings_of(self, self.function), *self._options.items()

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and labels; those of torch's cross entropy as in `ClassificationLoss`."""
        predictions, labels = super().judged(output, batch)
        if self._torch_function in (F.cross_entropy, F.nll_loss):
            skip = self._options.get("ignore_index", IGNORE_INDEX)
            labels = class_labels(predictions, labels, skip, _class_dim(predictions, labels))
        return predictions, labels

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the loss if it is torch's cross entropy or nll_loss, without smoothing and class weights."""
        plain = not self._options.get("label_smoothing") and self._options.get("weight") is None
        return means.get("loss") if plain and self._torch_function in (F.cross_entropy, F.nll_loss) else None

    def _classification_terms(self, logits: Tensor, labels: Tensor, metrics: bool) -> Terms:
        weight, skip = self._options.get("weight"), self._options.get("ignore_index", IGNORE_INDEX)
        class_dim = _class_dim(logits, labels)
        if self._torch_function is F.cross_entropy:
            smoothing = self._options.get("label_smoothing", 0.0)
            terms = {"loss": cross_entropy_term(logits, labels, None, smoothing, skip, weight, class_dim)}
        else:
            terms = {"loss": nll_term(logits, labels, skip, weight, class_dim)}
        if metrics:
            add_accuracy(terms, logits, labels, skip, class_dim, weighted=weight is not None)
        return terms

    def _elementwise_term(self, function: Callable[..., Tensor], predictions: Tensor, labels: Tensor) -> LossTerm:
        if predictions.shape != labels.shape:
            raise TrainingError(
                f"labels of shape {tuple(labels.shape)} do not fit predictions of shape {tuple(predictions.shape)}: "
                f"{self.name} compares them element by element, reshape one of them"
            )
        if predictions.dtype is torch.bfloat16 or predictions.dtype is torch.float16:
            predictions = predictions.float()
        labels = labels.to(predictions.dtype)
        return LossTerm(function(predictions, labels, reduction="sum", **self._options), labels.numel())

    def _mean_term(self, predictions: Any, labels: Any) -> LossTerm:
        value = self.function(predictions, labels)
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"the loss {self.name} returned a {type(value).__name__}; it must return a tensor, without .item()"
            )
        if value.numel() != 1:
            return LossTerm(value.sum(), value.numel())
        samples = num_samples(labels)
        return LossTerm(value.reshape(()) * samples, samples)


def check_loss_arguments(function: Callable[..., Any]) -> None:
    """Raise ConfigError for a function that cannot be called with predictions and labels.

    >>> check_loss_arguments(nn.CrossEntropyLoss())
    """
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"the loss {_name(function)}{signature} cannot be called with (predictions, labels): {error}; wrap it in "
            f"a function of these two, or write a LossStrategy"
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


@register("loss", "mse")
def mean_squared_error() -> FunctionLoss:
    """Mean over all elements of the squared difference."""
    return FunctionLoss(nn.MSELoss())


@register("loss", "l1")
def mean_absolute_error() -> FunctionLoss:
    """Mean over all elements of the absolute difference."""
    return FunctionLoss(nn.L1Loss())


@register("loss", "huber")
def huber(delta: Annotated[float, Gt(0)] = 1.0) -> FunctionLoss:
    """Half the squared difference up to `delta`, linear beyond: regression that is robust to outliers."""
    return FunctionLoss(nn.HuberLoss(delta=delta))


def _reduction(function: LossFunction) -> str | None:
    """Return the `reduction` of a partial or a torch loss module."""
    if isinstance(function, functools.partial):
        return function.keywords.get("reduction", _reduction(function.func))
    return function.reduction if isinstance(function, _Loss) else None


def _recognise(function: LossFunction) -> tuple[Callable[..., Tensor] | None, dict[str, Any]]:
    """Return the torch function behind a function, module or partial, and its options; None if it is not torch's."""
    if isinstance(function, functools.partial):
        inner, options = _recognise(function.func)
        options |= {name: value for name, value in function.keywords.items() if name != "reduction"}
        if inner is not None and not function.args and options.keys() <= {*TORCH_FUNCTIONS[inner]}:
            return inner, options
    elif isinstance(function, nn.Module):
        # The exact type: a subclass may compute something else.
        inner, names = TORCH_MODULES.get(type(function), (None, ()))
        return inner, {name: getattr(function, name) for name in names}
    # By identity: a user's callable may not be hashable.
    return next((known for known in TORCH_FUNCTIONS if known is function), None), {}


def _class_dim(logits: Tensor, labels: Tensor) -> int:
    """Return 1, torch's class dimension, unless only the last dimension fits the labels."""
    if logits.dim() < 2:
        return 0
    torch_style = logits.shape[:1] + logits.shape[2:]
    return -1 if labels.shape == logits.shape[:-1] != torch_style else 1
