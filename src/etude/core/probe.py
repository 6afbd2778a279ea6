"""Running a model to find something out about it, without leaving a trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def probing(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model without a trace: no gradients, no compilation; modes, buffers and random numbers are put back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    model.train(training)
    try:
        with torch.no_grad(), torch.random.fork_rng(list(devices)), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
