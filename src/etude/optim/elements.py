"""Which optimizers can update the parameters of a model that processes divide."""

import torch
from torch.optim import Optimizer

from etude.core.errors import ConfigError
from etude.optim.device import Adafactor
from etude.optim.several import Perturbed, everything_in
from etude.optim.wrappers import SAM

_KNOWN = ("torch.optim.", "etude.optim.")
_WHOLE = (Adafactor, Perturbed, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Those that need all elements of a matrix, or of all gradients, and have only those of one process."""


def check_divisible(optimizer: Optimizer) -> None:
    """Raise ConfigError unless an optimizer updates every element by itself, or asks other processes for the rest.

    An optimizer of another package says so by an attribute `is_elementwise = True` of its class.
    """
    for one in everything_in(optimizer):
        kind = type(one)
        if isinstance(one, _WHOLE) and not isinstance(one, SAM):
            raise ConfigError(
                f"{kind.__name__} needs whole matrices or all gradients, but the processes of this run divide the "
                "parameters; use adamw, muon, sgd, lion or another optimizer that can, or parallel: ddp"
            )
        if not kind.step.__module__.startswith(_KNOWN) and not getattr(kind, "is_elementwise", False):
            raise ConfigError(
                f"it is not known whether {kind.__name__} updates every element by itself, as processes that divide "
                "the parameters need; if so, set `is_elementwise = True` in its class, else use parallel: ddp"
            )
