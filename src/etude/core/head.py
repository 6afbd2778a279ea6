"""What a model may return in place of logits: hidden states, and the matrix that would make logits of them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutput:
    """Hidden states (…, d) and the output layer (V, d) that has not been applied yet.

    A loss that knows this class never holds all logits at once; anything else reads `logits`.

    >>> output = HeadOutput(torch.ones(2, 5, 3), torch.ones(7, 3))
    >>> output.shape, output.logits.shape
    (torch.Size([2, 5, 7]), torch.Size([2, 5, 7]))
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    """Where given, the logits are softcap · tanh(logits / softcap)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", linked(self.hidden, self.weight, self.bias))

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits; they are not computed for it."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def logits(self) -> Tensor:
        """All logits (…, V), computed again at every access."""
        logits = F.linear(self.hidden.to(self.weight.dtype), self.weight, self.bias)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def linked(hidden: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return `hidden` with `parameters` among what it was computed from; they get no gradient through it.

    DistributedDataParallel looks through the graph of a model's output for parameters without a part in the loss
    (`find_unused_parameters`). Those that only the loss will use must be found there too.
    """
    used = [parameter for parameter in parameters if parameter is not None and parameter.requires_grad]
    if not used or not torch.is_grad_enabled():
        return hidden
    return _Link.apply(hidden, *used)  # type: ignore[no-untyped-call,no-any-return]


class _Link(torch.autograd.Function):
    """The identity of its first argument."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *[None] * ctx.num_parameters)
