"""Steps that call torch's fused kernels on the CPU without what torch prepares for them in every step.

For small tensors that takes longer than the kernel itself. The numbers are the same.
"""

import inspect
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from etude.optim.eager import without_grad
from etude.optim.kernels import KernelOptimizer, are_plain, have_one_layout

_GRAD, _IS_CPU, _DTYPE, _IS_SPARSE = map(operator.attrgetter, ("grad", "is_cpu", "dtype", "is_sparse"))
_IS_CONTIGUOUS, _STRIDE = Tensor.is_contiguous, Tensor.stride
_USUAL = {Tensor, nn.Parameter}


class DirectStep(KernelOptimizer):
    """Mixin for optimizers of torch: calls the kernel itself where it can, and torch's step elsewhere."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what the closure returns."""
        groups = self.param_groups
        lists = [self._lists(group) for group in groups] if closure is None else [None]
        with without_grad():
            if None in lists or "found_inf" in vars(self):
                # Without torch's wrappers, which this method has too: they would run hooks a second time.
                return inspect.unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]
            scale = vars(self).get("grad_scale")
            for group, found in zip(groups, lists, strict=True):
                if found:
                    self.call_kernel(group, found, scale)
        return None

    @abstractmethod
    def direct_states(self, group: dict[str, Any]) -> Sequence[str] | None:
        """Return the names of the states that the kernel needs; None if torch must step this group."""

    @abstractmethod
    def call_kernel(self, group: dict[str, Any], lists: Sequence[list[Tensor]], grad_scale: Tensor | None) -> None:
        """Update a group with these parameters, gradients and states, divided by `grad_scale`."""

    def _lists(self, group: dict[str, Any]) -> list[list[Tensor]] | None:
        """Return parameters, gradients and states of a group; None if torch must prepare its step."""
        params = group["params"]
        if not group["fused"] or type(group["lr"]) is not float or not all(map(_IS_CPU, params[:1])):
            return None
        if (names := self.direct_states(group)) is None or not _is_own(type(self)._init_group):
            return None
        grads = [*map(_GRAD, params)]
        if type(None) in (kinds := {*map(type, params), *map(type, grads)}):
            params = [param for param in params if param.grad is not None]
            grads = [*map(_GRAD, params)]
            kinds.discard(type(None))
        if not params:
            return []
        if (
            not (kinds <= _USUAL or are_plain(kinds))
            or not all(map(_IS_CPU, params))
            or any(map(_IS_SPARSE, grads))
            or len({*map(_DTYPE, params), *map(_DTYPE, grads)}) > 1
        ):
            return None
        found = [*map(self.state.__getitem__, params)]
        states = [[one.get(name) for one in found] for name in names]
        if type(None) in {*map(type, chain(*states))}:  # a first step
            return None
        if not all(map(_IS_CONTIGUOUS, chain(params, grads, *states))):
            if not all(map(have_one_layout, params, grads)):
                return None
            layouts = [*map(_STRIDE, params)]
            if any([*map(_STRIDE, some)] != layouts for some in states if some[0].shape == params[0].shape):
                self.arrange_states(params)
                states = [[one[name] for one in found] for name in names]
        return [params, grads, *states]


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is one of ours: another one may change what a step gets."""
    return method.__module__.startswith("etude.optim.")


def count_one(counts: list[Tensor]) -> None:
    """Add 1 to each; adding a number instead of a tensor takes four times as long on the CPU."""
    torch._foreach_add_(counts, [_one()] * len(counts))


@cache
def _one() -> Tensor:
    """Return 1, made when it is needed: while modules are imported, another default device may be set."""
    return torch.ones((), dtype=torch.float32, device="cpu")
