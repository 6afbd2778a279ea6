"""The positions in a modality's loss: all its tokens, or up to k of them drawn at random."""

from typing import NamedTuple

import torch
from torch import Tensor

from etude.multimodal.vocab import Modality


class Positions(NamedTuple):
    """Positions of one modality among N targets."""

    rows: Tensor | None
    """(n,) their indices, increasing on the CPU; None if they are all N."""
    targets: Tensor
    """(n,) target tokens, relative to the modality's first id; 0 where the weight is 0."""
    row_weights: Tensor
    """(n,) weights, 1 or larger so that drawn positions represent all; 0 for other tokens."""
    count: Tensor | float  # type: ignore[assignment]  # a tuple has a method of that name
    """Number of the N targets in this modality, drawn or not."""


def count_positions(targets: Tensor, modality: Modality) -> Tensor:
    """Return how many targets are tokens of a modality, as a tensor on the device."""
    return _belong(targets, modality).sum()


def choose_positions(
    targets: Tensor, modality: Modality, most: int | None, generator: torch.Generator | None = None
) -> Positions:
    """Return up to `most` positions of a modality, uniformly drawn; all of them if `most` is None.

    Special tokens (PAD, MISS) and ignored labels belong to no modality. The weights make the sum over the drawn
    positions an unbiased estimate of the sum over all `count` positions. Random numbers come from `generator`, else
    from the device's global generator, and only if there is a choice. On a GPU the host does not synchronise: the
    number of rows is fixed, and uncounted rows have the weight 0.

    >>> targets = torch.tensor([1, 5, 6, -100, 7, 0])
    >>> chosen = choose_positions(targets, Modality("scalar", 5, 3), None)
    >>> chosen.rows, chosen.targets, chosen.count
    (tensor([1, 2, 4]), tensor([0, 1, 2]), 3)
    """
    labels = targets.reshape(-1)
    belongs = _belong(labels, modality)
    local = (labels - modality.base).masked_fill(~belongs, 0)
    if labels.is_cpu:
        rows = belongs.nonzero()[:, 0]
        number, scale = len(rows), 1.0
        if most is not None and number > most:
            drawn = torch.rand(number, generator=generator).topk(most, sorted=False).indices
            rows, scale = rows[drawn.sort().values], number / most
        weights = torch.full((len(rows),), scale)
        return Positions(None if len(rows) == len(labels) else rows, local[rows], weights, number)
    count = belongs.sum()
    if most is None or most >= len(labels):
        return Positions(None, local, belongs.float(), count)
    keys = torch.rand(len(labels), device=labels.device, generator=generator).masked_fill_(~belongs, -1.0)
    drawn, rows = keys.topk(most, sorted=False)
    weights = torch.where(drawn >= 0, count / count.clamp(1, most), 0.0)
    return Positions(rows, local[rows], weights, count)


def _belong(targets: Tensor, modality: Modality) -> Tensor:
    return (targets >= modality.base) & (targets < modality.stop)
