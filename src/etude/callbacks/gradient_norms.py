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
    parameters: tuple[tuple[str, int, bool], ...]
    """Name, number of elements and whether there is a gradient, of all that can be trained, in the model's order."""
    places: tuple[int, ...]
    """Which parameter each column of `values` is."""
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
        groups: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for place, (_, param) in enumerate(trained):
            groups.setdefault((param.device, param.dtype, param.grad is not None), []).append(place)
        parts = [
            _with_gradient([trained[place][1] for place in places], divisor)
            if has_gradient
            else _without_gradient([trained[place][1] for place in places])
            for (_, _, has_gradient), places in groups.items()
        ]
        return Snapshot(
            step,
            is_scaled,
            tuple((name, param.numel(), param.grad is not None) for name, param in trained),
            tuple(place for places in groups.values() for place in places),
            torch.cat([part.to(parts[0].device) for part in parts], dim=1) if parts else torch.zeros(3, 0),
        )


def _with_gradient(params: list[nn.Parameter], divisor: Tensor | float) -> Tensor:
    found = [param.grad for param in params if param.grad is not None]
    grads = [grad.coalesce()._values() if grad.is_sparse else grad for grad in found]
    norms = tensor_norms(grads)
    nonzero = torch.stack([torch.count_nonzero(grad) for grad in grads])
    if isinstance(divisor, Tensor):
        divisor = divisor.to(norms.device, norms.dtype)
    return torch.stack([norms / divisor, tensor_norms(list(params)), nonzero.to(norms.dtype)])


def _without_gradient(params: list[nn.Parameter]) -> Tensor:
    weights = tensor_norms(list(params))
    return torch.stack([torch.zeros_like(weights), weights, torch.zeros_like(weights)])


def read(snapshots: Sequence[Snapshot]) -> list[list[ParameterNumbers]]:
    """Return the numbers of each snapshot, by parameter in the order of the model. Waits for the device, once."""
    if not snapshots:
        return []
    device = snapshots[0].values.device
    flat = torch.cat([one.values.flatten().to(device) for one in snapshots]).tolist()  # the one transfer
    answers, start = [], 0
    for one in snapshots:
        size = one.values.shape[1]
        norms, weights, nonzero = (flat[start + row * size : start + (row + 1) * size] for row in range(3))
        start += 3 * size
        column = {place: number for number, place in enumerate(one.places)}
        answers.append(
            [
                ParameterNumbers(
                    name,
                    numel,
                    norms[at := column[place]] if has_gradient else None,
                    weights[at],
                    max(0, numel - round(nonzero[at])),
                )
                for place, (name, numel, has_gradient) in enumerate(one.parameters)
            ]
        )
    return answers
