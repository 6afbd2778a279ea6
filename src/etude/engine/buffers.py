"""Running statistics and other buffers: put back as they were when the update of their step is skipped.

A batch with a NaN in it gives batch norm statistics that are NaN for ever after. Skipping the update alone would keep
the weights and lose the model.
"""

import torch
from torch import Tensor, nn


class BufferGuard:
    """Remembers the buffers of a model that a checkpoint holds; costs nothing for a model without any.

    >>> norm = nn.BatchNorm1d(2)
    >>> guard = BufferGuard(norm)
    >>> guard.remember()
    >>> _ = norm(torch.full((3, 2), float("nan")))
    >>> guard.put_back(torch.tensor(1.0))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        kept = {id(buffer) for name, buffer in model.named_buffers() if name in saved}
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if id(buffer) in kept
        ]
        self._before: list[Tensor] = []

    def remember(self) -> None:
        """Copy the buffers, before the forward pass."""
        if self._places:
            self._before = [buffer.clone() for buffer in self._now()]

    def put_back(self, skipped: Tensor) -> None:
        """Give the buffers their former values if `skipped` is 1; on a device, without the host knowing."""
        if not self._places:
            return
        if skipped.is_cpu:
            if skipped.item():
                torch._foreach_copy_(self._now(), self._before)
            return
        bad = skipped.bool()
        for buffer, before in zip(self._now(), self._before, strict=True):
            torch.where(bad, before, buffer, out=buffer)

    def _now(self) -> list[Tensor]:
        return [buffer for module, name in self._places if (buffer := module._buffers[name]) is not None]
