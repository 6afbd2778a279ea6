"""Torch's optimizers without torch's compiler.

Torch imports `torch._dynamo` when an optimizer is made, stepped, saved or loaded, only to tell it that nothing is to be
compiled there. That takes seconds, and a run that compiles nothing has no other use for it. The functions here leave it
out while nobody has imported it; what is computed is the same.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

_TORCH = vars(sys.modules[Optimizer.__module__])
_MARK = "__dynamo_disable"
"""Where torch keeps the function to call instead of an optimizer's method, the compiler switched off, once made."""
_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_LAYERS = ("Optimizer.profile_hook_step.<locals>.wrapper", "_use_grad_for_differentiable.<locals>._use_grad")
"""What torch puts around the `step` of its optimizers: hooks and a label for profilers, and the gradient mode."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers be made, saved and loaded in this context without an import of torch's compiler.

    Torch is left as it was found. Where the compiler is imported already, it may be at work, and nothing is done.
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
    """Return the function inside a method of all optimizers; None if there is none, or it is marked already."""
    function = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
    return function if isinstance(function, FunctionType) and _MARK not in vars(function) else None


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # as deep in the stack as torch's, for the places of warnings
        return function(*args, **kwargs)

    return call


def take_step(optimizer: Optimizer) -> None:
    """Do what `optimizer.step()` does; for torch's optimizers that nobody watches, without what torch wraps it in.

    >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> take_step(torch.optim.SGD([weight], lr=0.5)); weight.tolist()
    [0.5, 0.5]
    """
    method = type(optimizer).step
    inner = _inner_step(method) if isinstance(method, FunctionType) else None
    if inner is None or _is_watched(optimizer):
        optimizer.step()
    else:
        with torch.no_grad():
            inner(optimizer)


@lru_cache(maxsize=64)
def _inner_step(method: Any) -> Callable[[Optimizer], Any] | None:
    """Return the function inside torch's own layers; None if it is not torch's, or in other layers than expected."""
    for layer in _LAYERS:
        if not isinstance(method, FunctionType) or method.__code__.co_qualname != layer:
            return None
        if method.__globals__ is not _TORCH:
            return None
        method = getattr(method, "__wrapped__", None)
    return method if isinstance(method, FunctionType) and method.__module__.startswith("torch.optim.") else None


def _is_watched(optimizer: Any) -> bool:
    """Whether somebody would miss what torch does around a step: a hook, a scheduler, a profiler, or autograd."""
    try:
        return bool(
            "step" in vars(optimizer)
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _TORCH["_global_optimizer_pre_hooks"]
            or _TORCH["_global_optimizer_post_hooks"]
            or optimizer.defaults["differentiable"]
            or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        )
    except (AttributeError, KeyError):  # another torch, where these are elsewhere
        return True
