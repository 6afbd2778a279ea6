"""Splitting the parameters of small models so that an update uses the whole GPU.

Torch's fused optimizers give each thread block 65,536 elements of one parameter. A small model then uses only a few
of about a hundred multiprocessors: the update of LeNet-5 took a quarter of its step. Split into pieces, its
parameters are spread over all of them; the arithmetic is the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PIECES = 24
"""Number of pieces of all parameters together; one launch takes 36 tensors."""
SMALLEST, LARGEST = 2048, 65_536
"""Elements per piece; the largest is the size of a thread block's share anyway."""
_FUSED = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_")


class InPieces(TorchDispatchMode):
    """While entered, fused updates of small models run on pieces of their tensors.

    Entering costs more than one eager update gains, so it is used only for captured steps.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds, only to disable it here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _FUSED:
            args = cut(args)
        return func(*args, **(kwargs or {}))


def cut(lists: Sequence[list[Tensor]]) -> Sequence[list[Tensor]]:
    """Return the lists with tensors split into pieces: the first holds the parameters, the others their state.

    >>> param, step = torch.zeros(5000), torch.tensor(1.0)
    >>> [[len(piece) if piece.dim() else 1 for piece in one] for one in cut([[param], [param], [step], []])]
    [[2048, 2048, 904], [2048, 2048, 904], [1, 1, 1], []]
    """
    sizes = [param.numel() for param in lists[0]]
    size = max(SMALLEST, -(-sum(sizes) // (PIECES * 512)) * 512)
    if size >= LARGEST or max(sizes, default=0) <= size:
        return lists
    given = [one for one in lists if one]
    is_cut = [all(one[place].is_contiguous() for one in given) and numel > size for place, numel in enumerate(sizes)]

    def pieces(one: Tensor, numel: int) -> Sequence[Tensor]:
        return torch.split(one.view(-1), size) if one.numel() == numel else [one] * -(-numel // size)

    return [
        [
            piece
            for tensor, numel, cutting in zip(one, sizes, is_cut, strict=True)
            for piece in (pieces(tensor, numel) if cutting else [tensor])
        ]
        if one
        else one
        for one in lists
    ]
