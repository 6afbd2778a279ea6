"""Activation checkpointing: blocks drop their activations and recompute them in the backward pass.

Activation memory falls to about that of one block plus the inputs of all blocks; a step takes about a third longer.
Dropout draws the same random numbers again, so gradients are the same up to rounding.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from etude.core import ConfigError
from etude.core.blocks import modules_matching, repeated_blocks
from etude.core.model import unwrap


@runtime_checkable
class RecomputesItself(Protocol):
    """A model with its own activation checkpointing, like those of Hugging Face."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations from now on."""

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations from now on."""


def recompute_activations(model: nn.Module, *, blocks: str | None = None, every: int = 1) -> list[str]:
    """Make every `every`-th block of a model recompute its activations in training; return the names of these blocks.

    The blocks are found automatically (`repeated_blocks`), or are the modules whose names match the pattern `blocks`,
    such as `encoder.layers.*`. Parameter names do not change. Raises ConfigError if there are no blocks.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> recompute_activations(nn.Sequential(nn.Linear(4, 8), layer(), layer(), layer()), every=2)
    ['1', '3']
    """
    model = unwrap(model)
    forget_cache(model)  # a recomputed block would add its keys and values twice
    if isinstance(model, RecomputesItself) and blocks is None and every == 1 and _enable(model):
        return repeated_blocks(model)
    names = repeated_blocks(model) if blocks is None else modules_matching(model, blocks)
    if not names:
        raise ConfigError(_nothing_found(model, blocks))
    chosen = names[::every]
    for name in chosen:
        _wrap(model.get_submodule(name))
    return chosen


def keep_activations(model: nn.Module, blocks: Iterable[str]) -> None:
    """Undo what `recompute_activations` did, given the names that it returned."""
    model = unwrap(model)
    if isinstance(model, RecomputesItself):
        model.gradient_checkpointing_disable()
    for name in blocks:
        block = model.get_submodule(name)
        if is_recomputed(block):
            del block.forward


def _nothing_found(model: nn.Module, pattern: str | None) -> str:
    what = f"no module matches '{pattern}'" if pattern is not None else "there are no repeated blocks"
    names = ", ".join(name for name, _ in model.named_children())
    return (
        f"activation_checkpointing: {what} in {type(model).__name__}, which has {names or 'no parts'}; name modules by "
        f"a pattern such as 'layers.*', or set it to false"
    )


def _enable(model: RecomputesItself) -> bool:
    """Use the model's own activation checkpointing; False if the architecture does not support it."""
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError:  # the architecture does not support it
        return False
    return True


def forget_cache(model: nn.Module) -> None:
    """Disable the key-value caches of models of Hugging Face in a model, which training does not read."""
    for one in model.modules():
        config: Any = vars(one).get("config")
        if getattr(config, "use_cache", False):
            config.use_cache = False


def is_recomputed(block: nn.Module) -> bool:
    """Whether a module recomputes its activations in the way of `recompute_activations`."""
    own = vars(block).get("forward")
    return isinstance(own, functools.partial) and own.func is _recomputed


def recompute_compiled(block: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Let a module that recomputes its activations run compiled code, a function of the module and its arguments.

    None makes it run eagerly again.
    """
    block.forward = functools.partial(_recomputed, block, inner=forward)


def _wrap(block: nn.Module) -> None:
    """Replace the forward pass of a module. A copy of the module gets its own forward pass."""
    if "forward" not in vars(block):  # skip if already done
        block.forward = functools.partial(_recomputed, block)


def _recomputed(block: nn.Module, *args: Any, inner: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    forward = functools.partial(inner or type(block).forward, block)
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    statistics = [part for part in block.modules() if isinstance(part, _NormBase) and part.track_running_stats]
    if not statistics:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _on_copies(statistics)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _on_copies(norms: list[_NormBase]) -> Iterator[None]:
    """Within this block, running statistics are written to copies, so that a recomputed batch counts once."""
    originals = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: None if one is None else one.clone() for name, one in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)
