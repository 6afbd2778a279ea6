"""Inputs of heads: the hidden states of the trunk, a model that several tasks share."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from etude.models.huggingface_trunk import HuggingFaceModel


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Hidden states of a batch, and further information for heads."""

    hidden: Tensor
    """(B, L, D), or (B, D) if a sample has one vector."""
    mask: Tensor | None = None
    """(B, L): nonzero at real positions, 0 at padding; None if all are real."""
    document_ids: Tensor | None = None
    """(B, L): index of the packed document that a position belongs to, -1 for padding."""
    output: nn.Module | None = None
    """The trunk's own output layer, if it has one."""
    softcap: float | None = None
    """If set, the trunk's logits are softcap · tanh(logits / softcap)."""


@runtime_checkable
class Trunk(Protocol):
    """A model that returns its features: the input of its output layer."""

    @property
    def feature_dim(self) -> int:
        """The last dimension of the features."""

    @property
    def features(self) -> Any:
        """A method with the arguments of `forward` that returns the features, (B, L, D) or (B, D)."""


def feature_dim(trunk: nn.Module) -> int | None:
    """Return the last dimension of a model's features, or None if it is unknown.

    >>> from etude.models import LeNet5
    >>> feature_dim(LeNet5()), feature_dim(nn.Linear(3, 2))
    (84, None)
    """
    if isinstance(trunk, Trunk):
        return trunk.feature_dim
    return getattr(trunk.config, "hidden_size", None) if isinstance(trunk, HuggingFaceModel) else None
