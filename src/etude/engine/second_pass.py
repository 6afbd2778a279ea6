"""The second gradients of a step, at weights that the optimizer has moved, as SAM needs them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from etude.core import ConfigError
from etude.core.buffers import BufferGuard
from etude.core.random import GraphReplay, Replay
from etude.engine.objective import Objective
from etude.engine.update import Updater, is_recorded


class SecondPass:
    """Runs the micro-batches of a step once more, on the same random numbers.

    Afterwards weights, running statistics and random generators are as after the first pass. A step whose first
    gradients are not finite is skipped by the update.
    """

    def __init__(self, model: nn.Module, objective: Objective, updater: Updater) -> None:
        """Raise ConfigError for an objective whose gradients cannot be computed twice."""
        if what := objective.only_once():
            raise ConfigError(
                f"{type(updater.optimizer).__name__} runs every step twice before its update, which {what} does not "
                "support; use another optimizer, or weights such as 'static' or 'uncertainty'"
            )
        self._objective, self._updater = objective, updater
        self._buffers, self._random = BufferGuard(model), Replay(updater.device)
        self._recorded: GraphReplay | None = None
        self._always = torch.ones((), device=updater.device)

    def remember(self) -> None:
        """Remember the random state, before the first pass."""
        if not is_recorded(self._updater.params[0]):
            self._random.remember()

    def before_recording(self) -> GraphReplay | None:
        """Return what repeats the random numbers of a CUDA graph that is recorded next; None on other devices."""
        device = self._updater.device
        self._recorded = GraphReplay(device) if device.type == "cuda" else None
        return self._recorded

    def run(self, gradients: Callable[[], Tensor | float]) -> Tensor | float:
        """Replace the gradients by those of the moved weights; return what `gradients`, a pass, returns."""
        self._buffers.remember()
        self._objective.is_repeating = True
        try:
            self._updater.perturb()
            with self._same_numbers():
                return gradients()
        finally:
            self._objective.is_repeating = False
            self._updater.restore()
            self._buffers.put_back(self._always)

    def _same_numbers(self) -> AbstractContextManager[None]:
        """Return the context in which the second pass draws the random numbers of the first."""
        if is_recorded(self._updater.params[0]):
            assert self._recorded is not None
            return self._recorded.again()
        return self._random.again() if self._random.has_drawn else nullcontext()
