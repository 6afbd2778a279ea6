"""Heads: the layers that a task adds to a shared model, to make predictions from the shared features."""

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import HeadOutput, whole
from etude.models.features import Features

Size = Annotated[int, Ge(1)]
Dropout = Annotated[float, Ge(0), Lt(1)]
Pooling = Literal["mean", "last", "first", "max"]

INIT_STD = 0.02


@register("head", "language_model")
class LanguageModelHead(nn.Module):
    """Predicts tokens at every position, with the trunk's own output layer if there is one.

    The layer is applied by the loss, through a `HeadOutput`, so all logits are never in memory at once. With
    `tied=False`, and for a trunk without an output layer, the head has its own layer, which needs `vocab_size`. A
    Hugging Face model that does more with its features than apply that layer counts as one without.

    >>> head = LanguageModelHead(vocab_size=100, tied=False, in_features=8)
    >>> head(Features(torch.zeros(2, 5, 8))).shape
    torch.Size([2, 5, 100])
    """

    def __init__(
        self, vocab_size: Size | None = None, tied: bool = True, bias: bool = False, in_features: Size | None = None
    ) -> None:
        """Build the head; `bias` is that of its own layer."""
        super().__init__()
        self.vocab_size, self.in_features, self.bias = vocab_size, in_features, bias
        self.layer = None if tied else self._own_layer("tied: false")

    def attach(self, output: nn.Linear | None, in_features: int | None) -> None:
        """Create a layer if the trunk has no output layer; called by the model with the width of its features."""
        if self.in_features is None:
            self.in_features = in_features
        if output is None and self.layer is None:
            self.layer = self._own_layer("a trunk without an output layer")

    def forward(self, features: Features) -> HeadOutput:
        """Return hidden states and output layer in place of the logits (…, V)."""
        layer = features.output if self.layer is None else self.layer
        if not isinstance(layer, nn.Linear):
            raise TrainingError(
                "language_model: the trunk has no output layer; set vocab_size and in_features with tied: false"
            )
        softcap = features.softcap if self.layer is None else None
        weight, bias = whole(layer.weight), None if layer.bias is None else whole(layer.bias)
        return HeadOutput(fitting(features.hidden, weight), weight, bias, softcap)

    def _own_layer(self, why: str) -> nn.Linear:
        if self.vocab_size is None:
            raise ConfigError(f"head language_model with {why} needs its own layer; set vocab_size")
        return linear_layer(checked_width(self.in_features, "language_model"), self.vocab_size, bias=self.bias)


@register("head", "linear")
class LinearHead(nn.Module):
    """A linear layer on the features, (…, D) to (…, out_features), for regression or custom tasks.

    >>> LinearHead(3, in_features=8)(Features(torch.zeros(2, 8))).shape
    torch.Size([2, 3])
    """

    def __init__(self, out_features: Size, in_features: Size | None = None) -> None:
        super().__init__()
        self.layer = linear_layer(checked_width(in_features, "linear"), out_features)

    def forward(self, features: Features) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.layer(fitting(features.hidden, self.layer.weight))
        return outputs


@register("head", "token_classifier")
class TokenClassifier(nn.Module):
    """Class logits at every position, (B, L, C); for features (B, D), (B, C).

    >>> TokenClassifier(3, in_features=8)(Features(torch.zeros(2, 5, 8))).shape
    torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        num_classes: Size,
        hidden: Size | None = None,
        dropout: Dropout = 0.0,
        in_features: Size | None = None,
    ) -> None:
        """Build the head; `hidden` adds a layer of that width, with GELU."""
        super().__init__()
        self.classify = Classifier(checked_width(in_features, "token_classifier"), num_classes, hidden, dropout)

    def forward(self, features: Features) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classify(features.hidden)
        return logits


@register("head", "sequence_classifier")
class SequenceClassifier(nn.Module):
    """One prediction per sequence: logits (B, C) from mean, max, first or last pooling without padding.

    >>> features = Features(torch.ones(2, 5, 8), mask=torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]))
    >>> SequenceClassifier(3, pooling="last", in_features=8)(features).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        num_classes: Size,
        pooling: Pooling = "mean",
        hidden: Size | None = None,
        dropout: Dropout = 0.0,
        in_features: Size | None = None,
    ) -> None:
        """Build the head; `hidden` adds a layer of that width, with GELU."""
        super().__init__()
        self.pooling: Pooling = pooling
        self.classify = Classifier(checked_width(in_features, "sequence_classifier"), num_classes, hidden, dropout)

    def forward(self, features: Features) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classify(pooled(features, self.pooling))
        return logits


@register("head", "binary")
class BinaryHead(SequenceClassifier):
    """One logit per sequence, (B, 1): yes or no. The options are those of `sequence_classifier`."""

    def __init__(
        self,
        pooling: Pooling = "mean",
        hidden: Size | None = None,
        dropout: Dropout = 0.0,
        in_features: Size | None = None,
    ) -> None:
        super().__init__(1, pooling, hidden, dropout, checked_width(in_features, "binary"))


class Classifier(nn.Sequential):
    """A linear layer, or two with GELU between them; dropout before each."""

    def __init__(self, in_features: int, out_features: int, hidden: int | None, dropout: float) -> None:
        layers: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        if hidden is not None:
            layers += [linear_layer(in_features, hidden), nn.GELU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.out_features = out_features
        super().__init__(*layers, linear_layer(hidden or in_features, out_features))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits (…, out_features)."""
        x = fitting(hidden, next(self.parameters()))
        for layer in self:
            x = layer(x)
        return x


def pooled(features: Features, pooling: Pooling) -> Tensor:
    """Return one vector (B, D) per sequence, pooled over real positions; zeros or a padded vector if it has none.

    >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> pooled(Features(hidden, mask=torch.tensor([[1, 1, 0]])), "mean")
    tensor([[2.]])
    """
    hidden = features.hidden
    if hidden.dim() == 2:
        return hidden
    if features.mask is not None:
        return _pooled_real(hidden, features.mask, pooling)
    match pooling:
        case "mean":
            return hidden.mean(1)
        case "max":
            return hidden.amax(1)
        case "first":
            return hidden[:, 0]
        case "last":
            return hidden[:, -1]


def _pooled_real(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    if mask.shape != hidden.shape[:2]:
        raise TrainingError(
            f"a mask of shape {tuple(mask.shape)} does not fit features of shape {tuple(hidden.shape)}; pass a mask "
            "(batch, length) in the batch"
        )
    real = mask.bool()
    match pooling:
        case "mean":
            total = hidden.masked_fill(~real[..., None], 0.0).sum(1)
            return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)
        case "max":
            largest = hidden.masked_fill(~real[..., None], -torch.inf).amax(1)
            return largest.masked_fill(~real.any(1, keepdim=True), 0.0)
        case "first" | "last":
            places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            order = places if pooling == "last" else places.flip(0)
            chosen = (real * order).argmax(1)
            return hidden[torch.arange(len(hidden), device=hidden.device), chosen]


def fitting(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden states in the dtype of the weights; under autocast torch converts both."""
    converts = not hidden.is_meta and torch.is_autocast_enabled(
        hidden.device.type
    )  # torch knows no meta device there
    return hidden if converts else hidden.to(weight.dtype)


def linear_layer(in_features: int, out_features: int, *, bias: bool = True) -> nn.Linear:
    """Return a layer with small weights and zero bias, so that the initial loss is that of a uniform guess."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(layer.weight, std=INIT_STD)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def checked_width(in_features: int | None, head: str) -> int:
    """Return the width of the features, or raise ConfigError if it is unknown."""
    if in_features is None:
        raise ConfigError(
            f"head {head}: the model does not define the width of its features (`feature_dim`); set in_features"
        )
    return in_features
