"""Random numbers that are drawn once more: the same dropout for the same batch, as if only the model had changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Replay:
    """The random numbers of torch from a moment on; nothing waits for a device, as generators live on the host.

    >>> random = Replay(torch.device("cpu"))
    >>> random.remember()
    >>> first, second = torch.rand(1), torch.rand(1)
    >>> with random.again():
    ...     torch.rand(1) == first
    tensor([True])
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._states: list[Tensor] = []

    def remember(self) -> None:
        """Take this moment."""
        self._states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the numbers that followed the moment; what is drawn after this block does not depend on it."""
        with torch.random.fork_rng(self._cuda):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._cuda, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
