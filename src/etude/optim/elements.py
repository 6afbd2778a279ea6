"""Which optimizers update every element by itself, and so can update a shard of a parameter."""

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from etude.core.errors import ConfigError
from etude.optim.device import Adafactor
from etude.optim.muon import MatrixMuon
from etude.optim.several import Optimizers, Perturbed

_KNOWN = ("torch.optim.", "etude.optim.")
_WHOLE = (Adafactor, MatrixMuon, Perturbed, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Those that need all elements of a matrix, or of all gradients."""


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless an optimizer updates every element by itself.

    An optimizer of another package says so by an attribute `is_elementwise = True` of its class.
    """
    for one in _parts(optimizer):
        kind = type(one)
        if isinstance(one, _WHOLE):
            raise ConfigError(
                f"{kind.__name__} needs whole matrices or all gradients, but the processes of this run divide the "
                "parameters; use adamw, sgd, lion or another optimizer by element, or parallel: ddp"
            )
        if not kind.step.__module__.startswith(_KNOWN) and not getattr(kind, "is_elementwise", False):
            raise ConfigError(
                f"it is not known whether {kind.__name__} updates every element by itself, as processes that divide "
                "the parameters need; if so, set `is_elementwise = True` in its class, else use parallel: ddp"
            )


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    if isinstance(optimizer, Optimizers):
        for one in optimizer.optimizers:
            yield from _parts(one)
