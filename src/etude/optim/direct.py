"""Steps that call torch's fused kernels without what torch prepares for them in every step.

For small tensors that takes longer than the kernel itself, or its launch. The numbers are the same.
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

_GRAD, _DTYPE, _IS_SPARSE = map(operator.attrgetter, ("grad", "dtype", "is_sparse"))
_IS_CONTIGUOUS, _STRIDE, _DEVICE = Tensor.is_contiguous, Tensor.stride, Tensor.get_device
_USUAL = {Tensor, nn.Parameter}
_item = cache(operator.itemgetter)


class DirectStep(KernelOptimizer):
    """Mixin for optimizers of torch: calls the kernel itself where it can, and torch's step elsewhere."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what the closure returns."""
        groups = self.param_groups
        is_usual = closure is None and groups[0]["fused"]
        lists = [self._lists(group) for group in groups] if is_usual else [None]
        with without_grad():
            if None in lists:
                # Without torch's wrappers, which this method has too: they would run hooks a second time.
                return _unwrapped(super().step.__func__)(self, closure)  # type: ignore[attr-defined]
            scale, skipped = map(vars(self).get, ("grad_scale", "found_inf"))
            for group, found in zip(groups, lists, strict=True):
                if found:
                    self.call_kernel(group, found, _beside(found, scale), _beside(found, skipped))
        return None

    @abstractmethod
    def direct_states(self, group: dict[str, Any]) -> Sequence[str] | None:
        """Return the names of the states that the kernel needs; None if torch must step this group."""

    @abstractmethod
    def call_kernel(
        self,
        group: dict[str, Any],
        lists: Sequence[list[Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update a group with these parameters, gradients divided by `grad_scale`, and states, unless `found_inf`."""

    def _lists(self, group: dict[str, Any]) -> list[list[Tensor]] | None:
        """Return parameters, gradients and states of a group; None if torch must prepare its step."""
        params = group["params"]
        if not params:
            return []
        if not _may_be_direct(group, params[0]) or not _is_own(type(self)._init_group):
            return None
        if (names := self.direct_states(group)) is None:
            return None
        grads = [*map(_GRAD, params)]
        if type(None) in {*map(type, grads)}:
            params = [param for param in params if param.grad is not None]
            grads = [*map(_GRAD, params)]
        return self._with_states(params, grads, names) if params else []

    def _with_states(
        self, params: list[Tensor], grads: list[Tensor], names: Sequence[str]
    ) -> list[list[Tensor]] | None:
        """Return parameters, gradients and states, if they are alike and lie in memory in the same order."""
        kinds = {*map(type, params), *map(type, grads)}
        if not (kinds <= _USUAL or are_plain(kinds)) or any(map(_IS_SPARSE, grads)):
            return None
        found = [*map(self.state.__getitem__, params)]
        try:
            states = [[*map(_item(name), found)] for name in names]
        except KeyError:  # a first step
            return None
        if type(None) in {*map(type, chain(*states))}:
            return None
        if (
            len({*map(_DTYPE, params), *map(_DTYPE, grads)}) > 1
            or len({*map(_DEVICE, chain(params, grads, *states))}) > 1
        ):
            return None
        if not all(map(_IS_CONTIGUOUS, chain(params, grads, *states))):
            if not all(map(have_one_layout, params, grads)):
                return None
            layouts = [*map(_STRIDE, params)]
            if any([*map(_STRIDE, some)] != layouts for some in states if some[0].shape == params[0].shape):
                self.arrange_states(params)
                states = [[*map(_item(name), found)] for name in names]
        return [params, grads, *states]


def _may_be_direct(group: dict[str, Any], first: Tensor) -> bool:
    """Whether the settings of a group are those that its fused kernel takes as they are."""
    lr = group["lr"]
    if not group["fused"] or not (first.is_cpu or first.is_cuda):
        return False
    # A kernel reads a rate on its own device; a tensor on the host is torch's affair.
    return type(lr) is float or (type(lr) is Tensor and lr.is_cuda and _DEVICE(lr) == _DEVICE(first))


@cache
def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is one of ours: another one may change what a step gets."""
    return method.__module__.startswith("etude.optim.")


@cache
def _unwrapped(step: Any) -> Any:
    return inspect.unwrap(step)


def _beside(lists: Sequence[list[Tensor]], number: Tensor | None) -> Tensor | None:
    """Return a number on the device of the parameters."""
    first = lists[0][0]
    if number is None or _DEVICE(number) == _DEVICE(first):
        return number
    return number.to(first.device, non_blocking=True)


def count_step(counts: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to each, or 0 if the kernel is going to skip."""
    if found_inf is not None:
        torch._foreach_add_(counts, [1 - found_inf] * len(counts))
    elif counts[0].is_cpu:
        torch._foreach_add_(counts, [_one()] * len(counts))  # a number takes four times as long
    else:
        torch._foreach_add_(counts, 1)


@cache
def _one() -> Tensor:
    """Return 1, made when it is needed: while modules are imported, another default device may be set."""
    return torch.ones((), dtype=torch.float32, device="cpu")
