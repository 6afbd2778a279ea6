"""What heads are given: the hidden states of a model that several tasks share, the trunk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.calling import ModelCall, is_next_token
from etude.core.errors import TrainingError
from etude.models.huggingface_trunk import HuggingFaceModel, HuggingFaceTrunk


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


@runtime_checkable
class NamesItsOutput(Protocol):
    """A model that says which of its modules is the output layer."""

    def get_output_embeddings(self) -> Any:
        """Return the output layer, or None."""


def feature_dim(trunk: nn.Module) -> int | None:
    """Return the last dimension of a model's features, None if it does not tell.

    >>> from etude.models import LeNet5
    >>> feature_dim(LeNet5()), feature_dim(nn.Linear(3, 2))
    (84, None)
    """
    if isinstance(trunk, Trunk):
        return trunk.feature_dim
    return getattr(trunk.config, "hidden_size", None) if isinstance(trunk, HuggingFaceModel) else None


class FeatureCall:
    """Runs a trunk on a batch of any form that `ModelCall` takes; how, is found out once, here.

    A `Trunk` runs its `features`, a model of Hugging Face its base model; of any other the output is the features.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._has_features = isinstance(trunk, Trunk)
        own = None if self._has_features or not isinstance(trunk, HuggingFaceModel) else HuggingFaceTrunk(trunk)
        self._huggingface = own
        self._call = ModelCall(trunk.features if isinstance(trunk, Trunk) else trunk)

    def __call__(self, trunk: nn.Module, batch: Batch) -> Features:
        """Return the features of `batch`; raise TrainingError if the trunk returns something else."""
        hidden = self._run(trunk, batch)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (2, 3):
            found = (
                f"a tensor of shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            )
            raise TrainingError(
                f"heads need features (batch, length, width) or (batch, width), but {type(trunk).__name__} returned "
                f"{found}; give it a method `features` and an attribute `feature_dim`"
            )
        mask, document_ids = positions_of(batch) if hidden.dim() == 3 else (None, None)
        softcap = None if self._huggingface is None else self._huggingface.softcap
        return Features(hidden, mask, document_ids, self.output(trunk), softcap)

    def output(self, trunk: nn.Module) -> nn.Linear | None:
        """Return the linear layer that makes the trunk's predictions of its features, None if there is none."""
        if not isinstance(trunk, NamesItsOutput) or (self._huggingface and not self._huggingface.has_output):
            return None
        layer = trunk.get_output_embeddings()
        return layer if isinstance(layer, nn.Linear) else None

    def _run(self, trunk: Any, batch: Batch) -> Any:
        if self._huggingface is not None:
            return self._huggingface(trunk, batch)
        return self._call(trunk.features if self._has_features else trunk, batch)


def positions_of(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Return mask and documents of the positions that the model sees, (B, L) each, or None.

    >>> import torch
    >>> positions_of({"input_ids": torch.tensor([[5, 6, 0]]), "document_ids": torch.tensor([[0, 1, -1]])})[0]
    tensor([[ True,  True, False]])
    """
    if not isinstance(batch, Mapping):
        return None, None
    mask = next((batch[key] for key in ("attention_mask", "attn_mask") if key in batch), None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        mask = None  # masks of other shapes say who sees whom, not what is padding
    documents = batch.get("document_ids")
    if not isinstance(documents, Tensor):
        documents = None
    elif mask is None:
        mask = documents >= 0
    if is_next_token(batch):  # the model does not see the last token, which has no next one
        mask = None if mask is None else mask[:, :-1]
        documents = None if documents is None else documents[:, :-1]
    return mask, documents
