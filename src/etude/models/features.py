"""What heads are given: the hidden states of a model that several tasks share, the trunk."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from etude.models.huggingface_trunk import HuggingFaceModel


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Hidden states of a batch, and what a head may want to know about them."""

    hidden: Tensor
    """(B, L, D), or (B, D) where a sample has one vector."""
    mask: Tensor | None = None
    """(B, L): not 0 at real positions, 0 at padding; None if all are real."""
    document_ids: Tensor | None = None
    """(B, L): which of the documents packed into a row a position belongs to, -1 for padding."""
    output: nn.Module | None = None
    """The trunk's own output layer, if it has one."""
    softcap: float | None = None
    """Where given, the trunk's logits are softcap · tanh(logits / softcap)."""


@runtime_checkable
class Trunk(Protocol):
    """A model that gives its features: what its output layer would make predictions of."""

    @property
    def feature_dim(self) -> int:
        """The last dimension of the features."""

    @property
    def features(self) -> Any:
        """A method with the arguments of `forward` that returns the features, (B, L, D) or (B, D)."""


def feature_dim(trunk: nn.Module) -> int | None:
    """Return the last dimension of a model's features, None if it does not tell.

    >>> from etude.models import LeNet5
    >>> feature_dim(LeNet5()), feature_dim(nn.Linear(3, 2))
    (84, None)
    """
    if isinstance(trunk, Trunk):
        return trunk.feature_dim
    return getattr(trunk.config, "hidden_size", None) if isinstance(trunk, HuggingFaceModel) else None
