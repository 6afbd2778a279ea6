"""Labels that are out of range: an error at once on the host, and on a device as soon as its numbers are read."""

import math

import torch
from torch import Tensor

from etude.core.errors import DataError


class LabelRange:
    """Checks that labels lie in a range, without waiting for a device.

    >>> LabelRange().add(torch.tensor([0, 7]), 0, 3, "found the class {found}, but there are 4 (0 … 3)")
    Traceback (most recent call last):
    etude.core.errors.DataError: found the class 7, but there are 4 (0 … 3)
    """

    def __init__(self) -> None:
        self._ends: Tensor | None = None
        """The lowest value, negated, and the highest one on a device. It stays the same tensor, for recorded steps."""
        self._low = self._high = 0.0
        self._words = ""

    @torch.no_grad()
    def add(self, labels: Tensor, low: float, high: float, words: str) -> None:
        """Add labels. On the host raise DataError with `words` if one is out of range; on a device `check` does."""
        if not labels.numel():
            return
        self._low, self._high, self._words = low, high, words
        lowest, highest = torch.aminmax(labels)
        if labels.is_cpu:
            self._compare(lowest.item(), highest.item())
            return
        if self._ends is None or self._ends.device != labels.device:
            dtype = torch.float32 if labels.is_mps else torch.float64
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside it
                self._ends = torch.full((2,), -math.inf, dtype=dtype, device=labels.device)
        ends = torch.stack([lowest, highest]).to(self._ends.dtype)
        ends[0].neg_()
        torch.maximum(self._ends, ends, out=self._ends)

    def check(self) -> None:
        """Raise DataError if a label on a device was out of range. Synchronises, if there were any."""
        if self._ends is not None:
            lowest, highest = self._ends.tolist()
            if highest != -math.inf:
                self._compare(-lowest, highest)

    def reset(self) -> None:
        """Forget all labels."""
        if self._ends is not None:
            self._ends.fill_(-math.inf)

    def _compare(self, lowest: float, highest: float) -> None:
        if not (lowest >= self._low and highest <= self._high):  # NaN is out of range too
            found = highest if lowest >= self._low else lowest
            raise DataError(self._words.replace("{found}", f"{found:g}" if found % 1 else f"{found:.0f}"))
