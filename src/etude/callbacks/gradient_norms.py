"""Measuring gradients on their device: norms, weight norms and zeros of every parameter, read in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etude.core.model import clean_name, unwrap
from etude.optim import tensor_norms


@dataclass(frozen=True, slots=True)
class ParameterNumbers:
    """What was measured of one parameter that can be trained."""

    name: str
    numel: int
    grad_norm: float | None
    """Norm of the gradient; None if there is no gradient at all."""
    weight_norm: float
    zeros: int
    """Elements of the gradient that are exactly zero."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The gradients of one step, measured but not read: `values` is still on the device."""

    step: int
    is_scaled: bool
    parameters: list[tuple[int, str, int, bool]]
    """Of each column of `values`: place in the model, name, number of elements, and whether there is a gradient."""
    values: Tensor
    """Rows: gradient norm, weight norm, nonzero elements of the gradient."""


class Measuring:
    """Measures parameters of a model, a few kernels for all of them together. Nothing waits for the device."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter] = ()) -> None:
        """Measure `params`, or all parameters of the model if none are given."""
        self.model = model
        wanted = {id(param) for param in params}
        named = [(clean_name(name), param) for name, param in unwrap(model).named_parameters()]
        self._named = [(name, param) for name, param in named if not wanted or id(param) in wanted]

    @torch.no_grad()
    def __call__(self, divisor: Tensor | float, step: int, *, is_scaled: bool = False) -> Snapshot:
        """Measure the gradients as they would be after a division by `divisor`."""
        trained = [(name, param) for name, param in self._named if param.requires_grad]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, nn.Parameter]]] = {}
        for place, (name, param) in enumerate(trained):
            groups.setdefault((param.device, param.dtype), []).append((place, name, param))
        parts = [_values([param for _, _, param in group], divisor) for group in groups.values()]
        order = [(at, name, p.numel(), p.grad is not None) for group in groups.values() for at, name, p in group]
        values = torch.cat([part.to(parts[0].device) for part in parts], dim=1) if parts else torch.zeros(3, 0)
        return Snapshot(step, is_scaled, order, values)


def _values(params: list[nn.Parameter], divisor: Tensor | float) -> Tensor:
    """Return the rows of `Snapshot.values`; without a gradient they are zeros."""
    found = [param.grad if param.grad is not None else param.new_zeros(1) for param in params]
    grads = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found]
    norms = tensor_norms(grads)
    nonzero = torch.stack([torch.count_nonzero(grad) for grad in grads])
    if isinstance(divisor, Tensor):
        divisor = divisor.to(norms.device, norms.dtype)
    return torch.stack([norms / divisor, tensor_norms(list(params)), nonzero.to(norms.dtype)])


def read(snapshots: Sequence[Snapshot]) -> list[list[ParameterNumbers]]:
    """Return the numbers of each snapshot, by parameter in the order of the model. Waits for the device, once."""
    if not snapshots:
        return []
    device = snapshots[0].values.device
    flat = torch.cat([one.values.flatten().to(device) for one in snapshots]).tolist()  # the one transfer
    answers, start = [], 0
    for one in snapshots:
        size = one.values.shape[1]
        columns = zip(*(flat[start + row * size : start + (row + 1) * size] for row in range(3)), strict=True)
        start += 3 * size
        found = {
            place: ParameterNumbers(name, numel, norm if is_there else None, weight, max(0, numel - round(nonzero)))
            for (place, name, numel, is_there), (norm, weight, nonzero) in zip(one.parameters, columns, strict=True)
        }
        answers.append([found[place] for place in sorted(found)])
    return answers
