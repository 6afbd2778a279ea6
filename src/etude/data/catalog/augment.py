"""Random image augmentations. Each uses one random number per image, so it depends only on (seed, epoch, index).

An augmentation is called with images, uint8 (B, C, H, W), and a random 64-bit number for each; it returns images of the
same shape and type.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Lt

from etude.config.registry import register
from etude.data.catalog.holdout import mix_keys
from etude.data.catalog.rows import Array, Augment

Images = Array
Keys = npt.NDArray[np.uint64]
Amount = Annotated[float, Ge(0), Lt(1)]
_GRAY = np.array([0.299, 0.587, 0.114], dtype=np.float32)[:, None, None]


class Augmentations:
    """Several augmentations in sequence, each with its own random numbers."""

    def __init__(self, steps: Sequence[Augment]) -> None:
        self.steps = list(steps)

    def __call__(self, images: Images, keys: Keys) -> Images:
        """Return the augmented images."""
        for place, step in enumerate(self.steps):
            images = step(images, mix_keys(keys ^ np.uint64(place + 1)))
        return images


def uniform(keys: Keys, number: int = 0) -> npt.NDArray[np.float64]:
    """Return the `number`-th random number in [0, 1) of each key."""
    return np.ldexp((mix_keys(keys + np.uint64(number)) >> np.uint64(11)).astype(np.float64), -53)


@register("augmentation", "horizontal_flip")
class HorizontalFlip:
    """Mirror images left to right with a probability."""

    def __init__(self, probability: Annotated[float, Ge(0), Le(1)] = 0.5) -> None:
        self.probability = probability

    def __call__(self, images: Images, keys: Keys) -> Images:
        """Return the images, some of them mirrored."""
        chosen = uniform(keys) < self.probability
        return np.where(chosen[:, None, None, None], images[..., ::-1], images)


@register("augmentation", "vertical_flip")
class VerticalFlip(HorizontalFlip):
    """Mirror images top to bottom with a probability."""

    def __call__(self, images: Images, keys: Keys) -> Images:
        """Return the images, some of them mirrored."""
        chosen = uniform(keys) < self.probability
        return np.where(chosen[:, None, None, None], images[..., ::-1, :], images)


@register("augmentation", "random_crop")
class RandomCrop:
    """Shift images by up to `padding` pixels in both directions, filling with black or a reflection."""

    def __init__(self, padding: Annotated[int, Gt(0)] = 4, reflect: bool = False) -> None:
        self.padding, self.reflect = padding, reflect

    def __call__(self, images: Images, keys: Keys) -> Images:
        """Return the shifted images."""
        (height, width), pad = images.shape[2:], self.padding
        around = ((0, 0), (0, 0), (pad, pad), (pad, pad))
        padded = np.pad(images, around, mode="reflect") if self.reflect else np.pad(images, around)
        tops, lefts = ((uniform(keys, number) * (2 * pad + 1)).astype(int) for number in (0, 1))
        result = np.empty_like(images)
        for place, (top, left) in enumerate(zip(tops, lefts, strict=True)):
            result[place] = padded[place, :, top : top + height, left : left + width]
        return result


@register("augmentation", "color_jitter")
class ColorJitter:
    """Multiply brightness, contrast and saturation by random factors of 1 - amount … 1 + amount."""

    def __init__(self, brightness: Amount = 0.2, contrast: Amount = 0.2, saturation: Amount = 0.2) -> None:
        self.amounts = brightness, contrast, saturation

    def __call__(self, images: Images, keys: Keys) -> Images:
        """Return the images with changed colors."""
        brightness, contrast, saturation = (
            (1 + amount * (2 * uniform(keys, number) - 1)).astype(np.float32)[:, None, None, None]
            for number, amount in enumerate(self.amounts)
        )
        values = images.astype(np.float32) * brightness
        middle = values.mean((1, 2, 3), keepdims=True)
        values = (values - middle) * contrast + middle
        if values.shape[1] == 3:
            gray = (values * _GRAY).sum(1, keepdims=True)
            values = (values - gray) * saturation + gray
        changed: Images = np.clip(np.rint(values), 0, 255).astype(np.uint8)
        return changed
