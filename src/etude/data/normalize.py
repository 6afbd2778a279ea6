"""Normalising a whole batch of images at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalize:
    """Turns images into float32 of mean 0 and standard deviation 1: (x - mean) / std.

    `mean` and `std` are in units of 0 … 1, one number or one per channel (the dimension before height and width).
    Whole numbers such as uint8 are taken to run from 0 to 255.

    >>> Normalize(mean=0.0, std=0.5)(torch.tensor([[0, 255]], dtype=torch.uint8))
    tensor([[0., 2.]])
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean, self.std = mean, std
        mean_, std_ = (torch.as_tensor(value, dtype=torch.float64) for value in (mean, std))
        if bool((std_ <= 0).any()):
            raise ValueError(f"std is {std}; it must be positive")
        # The images become x·scale + shift.
        scale, shift = 1 / std_, -mean_ / std_
        self._per_channel = shift.dim() > 0
        if self._per_channel:
            scale, shift = scale.expand(shift.shape)[:, None, None], shift[:, None, None]
        self._scale, self._shift = scale, shift.to(torch.float32)
        self._factor = 0.0 if self._per_channel else float(scale)
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalised images as a new tensor."""
        whole = not images.is_floating_point()
        if not self._per_channel:
            # One pass for bytes: conversion, product and sum in a single kernel.
            images = images if whole else images.to(torch.float32)
            return torch.add(self._shift, images, alpha=self._factor / 255 if whole else self._factor)
        scale, shift = self._on(images.device, whole)
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)

    def _on(self, device: torch.device, whole: bool) -> tuple[Tensor, Tensor]:
        """The constants on a device, copied there once."""
        if (device, whole) not in self._constants:
            scale = self._scale / 255 if whole else self._scale
            self._constants[device, whole] = scale.to(device, torch.float32), self._shift.to(device)
        return self._constants[device, whole]

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"
