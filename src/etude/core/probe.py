"""Running a model to find something out about it, without leaving a trace."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from etude.core.buffers import BufferGuard
from etude.core.random import aside


@contextmanager
def probing(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model without a trace: no gradients, no compilation; modes, buffers and random numbers are put back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    guard = BufferGuard(model, caches=True)
    guard.remember()
    model.train(training)
    # Whoever has compiled something has imported this; otherwise it would take a second.
    eagerly = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with torch.no_grad(), aside(0), torch.random.fork_rng(list(devices)), eagerly:
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            guard.restore()
