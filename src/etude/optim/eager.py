"""Torch's optimizers without importing torch's compiler.

Torch imports `torch._dynamo` when an optimizer is created, stepped, saved or loaded, only to disable compilation
there. The import takes seconds, which a run without compilation need not spend. The functions here avoid it unless it
is already imported; the results are the same.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from etude.core.spans import NOTHING

_TORCH = vars(sys.modules[Optimizer.__module__])
_MARK = "__dynamo_disable"
"""Attribute in which torch caches the compiler-disabled version of an optimizer's method."""
_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_LAYERS = ("Optimizer.profile_hook_step.<locals>.wrapper", "_use_grad_for_differentiable.<locals>._use_grad")
"""What torch wraps around the `step` of its optimizers: hooks, a profiler label, and the gradient mode."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers be created, saved and loaded in this context without importing torch's compiler.

    Torch is restored afterwards. If the compiler is already imported, it may be in use, and nothing is changed.
    """
    changed = [] if "torch._dynamo" in sys.modules else [*filter(None, map(_unmarked, _METHODS))]
    for function in changed:
        setattr(function, _MARK, _plain(function))
    try:
        yield
    finally:
        for function in changed:
            vars(function).pop(_MARK, None)


def _unmarked(name: str) -> FunctionType | None:
    """Return the function inside a method of all optimizers; None if there is none, or it is already cached."""
    function = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
    return function if isinstance(function, FunctionType) and _MARK not in vars(function) else None


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    # as deep in the stack as torch's version, so that warnings point to the same line
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class _NoGrad:
    """`torch.no_grad()` where gradients are enabled, without what torch does around it: 9 µs of a short step."""

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(True)


_NO_GRAD = _NoGrad()


def without_grad() -> AbstractContextManager[Any]:
    """Return a context without gradients; it does nothing if they are already disabled."""
    return _NO_GRAD if torch.is_grad_enabled() else NOTHING


def take_step(optimizer: Optimizer) -> None:
    """Do what `optimizer.step()` does; for torch's and our optimizers without hooks, skip torch's wrappers.

    >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> take_step(torch.optim.SGD([weight], lr=0.5)); weight.tolist()
    [0.5, 0.5]
    """
    method = type(optimizer).step
    inner = _inner_step(method) if isinstance(method, FunctionType) else None
    if inner is None or _is_watched(optimizer):
        optimizer.step()
    else:
        with without_grad():
            inner(optimizer)


@lru_cache(maxsize=64)
def _inner_step(method: Any) -> Callable[[Optimizer], Any] | None:
    """Return the function inside torch's wrappers; None if it is not torch's or ours, or wrapped in another way."""
    for layer in _LAYERS:
        if not isinstance(method, FunctionType):
            return None
        if method.__module__.startswith("etude.optim.") and method.__code__.co_qualname != layer:
            break  # ours may have the first wrapper only
        if method.__code__.co_qualname != layer or method.__globals__ is not _TORCH:
            return None
        method = getattr(method, "__wrapped__", None)
    is_known = isinstance(method, FunctionType) and method.__module__.startswith(("torch.optim.", "etude.optim."))
    return method if is_known else None


def _is_watched(optimizer: Any) -> bool:
    """Whether the wrappers of a step are needed: by a hook, a scheduler, a profiler, or autograd."""
    try:
        return bool(
            "step" in vars(optimizer)
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _TORCH["_global_optimizer_pre_hooks"]
            or _TORCH["_global_optimizer_post_hooks"]
            or optimizer.defaults.get("differentiable")
            or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        )
    except (AttributeError, KeyError):  # another torch version keeps these elsewhere
        return True
