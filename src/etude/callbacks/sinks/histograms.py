"""Histograms of weights and gradients, computed on the device without waiting for it."""

import torch
from torch import Tensor

from etude.core.model import clean_name, unwrap
from etude.engine.callback import Gradients

BINS = 64
"""Bins of equal width between the smallest and the largest value."""
_CHUNK = 1 << 22
"""Elements that are counted at once: their indices need memory."""


@torch.no_grad()
def measure(gradients: Gradients) -> tuple[list[str], Tensor]:
    """Return the names of histograms, and a row for each: smallest, largest, sum, sum of squares, counts.

    The gradients are those of the averaged loss. Values that are not finite are not counted.
    """
    wanted = {id(param) for param in gradients.params}
    names, rows = [], []
    for name, param in unwrap(gradients.model).named_parameters():
        names.append(f"weights/{clean_name(name)}")
        rows.append(_row(param.detach(), 1.0))
        if param.grad is not None and id(param) in wanted:
            grad = param.grad.coalesce()._values() if param.grad.is_sparse else param.grad
            names.append(f"gradients/{clean_name(name)}")
            rows.append(_row(grad, gradients.divisor))
    return names, torch.stack([row.to(rows[0].device) for row in rows]) if rows else torch.zeros(0, BINS + 4)


def _row(values: Tensor, divisor: Tensor | float) -> Tensor:
    precise = torch.float32 if values.device.type == "mps" else torch.float64
    parts = values.reshape(-1).split(_CHUNK) if values.numel() else [values.reshape(-1)]
    low = torch.stack([torch.where(part.isfinite(), part, torch.inf).amin() for part in parts if len(part)] or
                      [values.new_tensor(torch.inf)]).amin().to(precise)  # fmt: skip
    high = torch.stack([torch.where(part.isfinite(), part, -torch.inf).amax() for part in parts if len(part)] or
                       [values.new_tensor(-torch.inf)]).amax().to(precise)  # fmt: skip
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device)
    total, squares = (torch.zeros((), dtype=precise, device=values.device) for _ in range(2))
    scale = BINS / (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    for part in parts:
        finite = part.isfinite()
        part = torch.where(finite, part, low.to(part)).to(precise)
        place = ((part - low) * scale).nan_to_num().clamp_(0, BINS - 1).long()
        counts.scatter_add_(0, place, finite.long())
        part = torch.where(finite, part, 0)
        total, squares = total + part.sum(), squares + part.square().sum()
    divisor = divisor.to(low) if isinstance(divisor, Tensor) else divisor
    stats = torch.stack([low / divisor, high / divisor, total / divisor, squares / divisor / divisor])
    return torch.cat([stats, counts.to(precise)])
