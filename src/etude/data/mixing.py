"""Mixup and CutMix: batches whose samples, and labels, are mixed with another one of the batch.

A batch transform is called with every training batch, on its device, and with random numbers that depend only on the
seed, the epoch and the position in it: `transform(batch, random)`. Yours may be any such function.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.batch import LABEL_KEYS, SETTING_KEYS, Batch
from etude.core.errors import DataError
from etude.core.forms import parts_of, with_parts

BatchTransform = Callable[[Batch, Random], Batch]
Classes = Annotated[int, Gt(1)]
Alpha = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]


class Mixing(ABC):
    """Mixes the samples of each pair, 0 and 1, 2 and 3 …; labels become probabilities of classes."""

    def __init__(self, num_classes: int, probability: float) -> None:
        self.num_classes, self.probability = num_classes, probability

    @abstractmethod
    def draw(self, random: Random) -> Callable[[Tensor], tuple[Tensor, float]]:
        """Return a function of inputs that gives mixed ones, and the share of each sample in its own mixture."""

    def __call__(self, batch: Batch, random: Random) -> Batch:
        """Return the batch mixed, or with a probability only with soft labels."""
        parts = parts_of(batch)
        place = None if parts is None else _place_of_labels(parts)
        if parts is None or place is None:
            raise DataError(f"{type(self).__name__} needs batches with labels, such as (inputs, labels)")
        soft = self._soft(parts[place])
        if random.random() < self.probability:
            mix = self.draw(random)
            inputs = [key for key in parts if key != place and key not in SETTING_KEYS]
            mixed = {key: mix(self._input(parts[key], len(soft))) for key in inputs}
            share = next(iter(mixed.values()))[1]
            parts |= {key: value for key, (value, _) in mixed.items()}
            soft = torch.lerp(partners(soft), soft, share)
        return with_parts(batch, {**parts, place: soft})

    def _soft(self, labels: Any) -> Tensor:
        if isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape[1:] == (self.num_classes,):
            return labels
        try:
            if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
                raise RuntimeError(f"found {_form(labels)}")
            return F.one_hot(labels.long(), self.num_classes).float()
        except RuntimeError as error:
            raise DataError(
                f"{type(self).__name__} needs one class per sample, below num_classes ({self.num_classes}), or "
                f"probabilities of the classes: {error}"
            ) from error

    def _input(self, value: Any, samples: int) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point() or len(value) != samples:
            raise DataError(
                f"{type(self).__name__} mixes floating-point tensors with a row per sample; found {_form(value)}"
            )
        return value


@register("batch_transform", "mixup")
class Mixup(Mixing):
    """Adds up two samples with random weights (Zhang et al., 2018).

    >>> x, y = torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1])
    >>> mixed, soft = Mixup(num_classes=2, alpha=1.0)((x, y), Random(1))
    >>> torch.allclose(mixed[:, 0], 10 * soft[:, 1])
    True
    """

    @checked
    def __init__(self, num_classes: Classes, alpha: Alpha = 0.2, probability: Share = 1.0) -> None:
        super().__init__(num_classes, probability)
        self.alpha = alpha

    def draw(self, random: Random) -> Callable[[Tensor], tuple[Tensor, float]]:
        """Draw the share from a beta distribution."""
        share = random.betavariate(self.alpha, self.alpha)
        return lambda inputs: (torch.lerp(partners(inputs), inputs, share), share)


@register("batch_transform", "cutmix")
class CutMix(Mixing):
    """Replaces a random rectangle of an image by that of another one (Yun et al., 2019)."""

    @checked
    def __init__(self, num_classes: Classes, alpha: Alpha = 1.0, probability: Share = 1.0) -> None:
        super().__init__(num_classes, probability)
        self.alpha = alpha

    def draw(self, random: Random) -> Callable[[Tensor], tuple[Tensor, float]]:
        """Draw the area and the centre of the rectangle; what is outside the image is cut off."""
        side = math.sqrt(1.0 - random.betavariate(self.alpha, self.alpha)) / 2
        centres = random.random(), random.random()

        def cut(images: Tensor) -> tuple[Tensor, float]:
            if images.dim() < 3:
                raise DataError(f"CutMix needs images, found inputs {tuple(images.shape)}")
            sizes = images.shape[-2:]
            edges = [
                (max(0, round(size * (centre - side))), min(size, round(size * (centre + side))))
                for size, centre in zip(sizes, centres, strict=True)
            ]
            (top, bottom), (left, right) = edges
            mixed = images.clone()
            mixed[..., top:bottom, left:right] = partners(images)[..., top:bottom, left:right]
            return mixed, 1.0 - (bottom - top) * (right - left) / (sizes[0] * sizes[1])

        return cut


@register("batch_transform", "mixup_cutmix")
class MixupOrCutMix(Mixing):
    """For every batch either `Mixup` or `CutMix`."""

    @checked
    def __init__(
        self,
        num_classes: Classes,
        mixup_alpha: Alpha = 0.8,
        cutmix_alpha: Alpha = 1.0,
        switch_probability: Share = 0.5,
        probability: Share = 1.0,
    ) -> None:
        super().__init__(num_classes, probability)
        self.mixup, self.cutmix = Mixup(num_classes, mixup_alpha), CutMix(num_classes, cutmix_alpha)
        self.switch_probability = switch_probability

    def draw(self, random: Random) -> Callable[[Tensor], tuple[Tensor, float]]:
        """Draw which of the two, and its random numbers."""
        return (self.cutmix if random.random() < self.switch_probability else self.mixup).draw(random)


def partners(samples: Tensor) -> Tensor:
    """Return the sample that each one is mixed with: pairs, so that even shares of a batch are mixed like the whole.

    >>> partners(torch.arange(5)).tolist()
    [1, 0, 3, 2, 3]
    """
    count = len(samples)
    places = torch.arange(count, device=samples.device) ^ 1
    return samples[torch.where(places < count, places, max(count - 2, 0))]


def _form(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _place_of_labels(parts: dict[Any, Any]) -> Any:
    """Return the key of the labels: the last of a tuple, or a name."""
    if 0 in parts:
        return len(parts) - 1 if len(parts) > 1 else None
    return next((key for key in (*LABEL_KEYS, "y") if key in parts), None)
