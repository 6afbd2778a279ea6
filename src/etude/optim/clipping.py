"""Gradient norms and clipping without synchronising."""

from collections.abc import Iterable

import torch
from torch import Tensor

from etude.core.errors import ConfigError

FLAT_NUMEL = 65_536
"""Up to this many elements on the CPU, copying all gradients into one vector is cheaper than one call per tensor."""
LONG, ROW = 2**18, 1024
"""Tensors on the CPU of at least so many elements are summed by rows of so many.

Torch adds them all into a few numbers: of four million values, its norm in float32 is off by up to 2e-4. By rows it is
exact to 2e-7 and as fast; it does not depend on the number of threads.
"""


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, as a 0-dim tensor on the device of the first.

    Half-precision gradients are summed in float32; no gradients give 0.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    if not grads:
        return torch.zeros(())
    first = grads[0]
    dtype, device = first.dtype, first.get_device()
    for grad in grads:
        if grad.dtype is not dtype or grad.get_device() != device:
            return _mixed_norm(grads)
    if first.is_cpu and type(first) is Tensor and sum(map(Tensor.numel, grads)) <= FLAT_NUMEL:
        norm: Tensor = torch.linalg.vector_norm(torch._C._nn.flatten_dense_tensors(grads), dtype=_sum_dtype(dtype))
        return norm
    if any(map(_is_long, grads)):
        values = _by_rows(grads)
    else:
        values = torch.stack(torch._foreach_norm(grads, 2.0, _sum_dtype(dtype)))
    return _whole(_norm(values))


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, as one vector; the tensors share a device and a dtype.

    >>> tensor_norms([torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])])
    tensor([5., 2.])
    """
    return _whole(torch.stack(_norms(tensors)))


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor; they share a device and a dtype."""
    if any(map(_is_long, tensors)):
        return [*map(_norm, tensors)]
    return list(torch._foreach_norm(tensors, 2.0, _sum_dtype(tensors[0].dtype)))


def _norm(values: Tensor) -> Tensor:
    """Return the norm of one tensor."""
    norm: Tensor = torch.linalg.vector_norm(_by_rows([values]), dtype=_sum_dtype(values.dtype))
    return norm


def _is_long(values: Tensor) -> bool:
    return values.numel() >= LONG and values.is_cpu and type(values) is Tensor and values.layout is torch.strided


def _by_rows(tensors: list[Tensor]) -> Tensor:
    """Return a tensor with the norm of all of them: the norms of short ones, of rows of long ones, and what is left."""
    if len(tensors) == 1 and not _is_long(tensors[0]):
        return tensors[0]
    dtype, parts = _sum_dtype(tensors[0].dtype), []
    for tensor in tensors:
        if not _is_long(tensor):
            parts.append(torch.linalg.vector_norm(tensor, dtype=dtype).view(1))
            continue
        flat, full = _flat(tensor), tensor.numel() - tensor.numel() % ROW
        parts += [torch.linalg.vector_norm(flat[:full].view(-1, ROW), dim=1, dtype=dtype), flat[full:]]
    return torch.cat(parts)


def _flat(values: Tensor) -> Tensor:
    """Return all elements as a vector, in any order; as a view unless there are gaps between them."""
    if not values.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense.default(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


@torch.no_grad()
def clip_gradients(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` in place so that their global norm is at most `max_norm`.

    Returns the norm before clipping. The values are those of `torch.nn.utils.clip_grad_norm_`.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    grads = _gradients(parameters)
    norm = global_norm(grads)
    clip_to_norm(grads, norm, max_norm)
    return norm


@torch.no_grad()
def clip_to_norm(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose global norm is `norm` in place to a norm of at most `max_norm`."""
    if not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}; it must be above 0 (omit it to disable clipping)")
    scale = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for device, group in by_device.items():
        torch._foreach_mul_(group, scale.to(device, non_blocking=True))


@torch.no_grad()
def clip_gradients_by_value(parameters: Tensor | Iterable[Tensor], value: float) -> None:
    """Clamp every element of the gradients in place to [-value, value].

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([-3.0, 0.5])
    >>> clip_gradients_by_value([weight], 1.0); weight.grad
    tensor([-1.0000,  0.5000])
    """
    if not value > 0:
        raise ConfigError(f"the clipping value is {value}; it must be above 0 (omit it to disable clipping)")
    torch.nn.utils.clip_grad_value_(parameters, value)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    # A norm above 65504 does not fit into float16, and bfloat16 would keep only two or three digits.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _mixed_norm(grads: list[Tensor]) -> Tensor:
    """Return the global norm of gradients on several devices or in several dtypes."""
    device = grads[0].device
    norms = [_whole(_norm(grad)).to(device) for grad in grads]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _whole(norm: Tensor) -> Tensor:
    """Return the norm over all shards if the gradients are sharded (DTensor), else the norm itself."""
    if type(norm) is Tensor:
        return norm
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm
