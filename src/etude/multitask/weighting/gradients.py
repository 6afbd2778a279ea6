"""The tasks' gradients as rows of a matrix, and a row as the gradients of parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor


def task_gradients(losses: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return each loss's gradient of the parameters: (tasks, elements). The graph is kept for the backward pass.

    One backward pass for each task. Where a loss does not reach a parameter, its gradient is 0.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> task_gradients(torch.stack([weight.sum(), (weight**2).sum()]), [weight])
    tensor([[1., 1.],
            [2., 4.]])
    """
    rows = []
    for loss in losses.unbind():
        found = torch.autograd.grad(
            loss, list(parameters), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([gradient.reshape(-1) for gradient in found]))
    return torch.stack(rows)


def assign_gradients(gradient: Tensor, parameters: Sequence[Tensor]) -> None:
    """Make one vector the gradients of the parameters, in place of those they have."""
    start = 0
    for parameter in parameters:
        parameter.grad = gradient[start : start + parameter.numel()].view_as(parameter).to(parameter.dtype)
        start += parameter.numel()
    assert start == gradient.numel(), f"{gradient.numel()} numbers for {start} elements"
