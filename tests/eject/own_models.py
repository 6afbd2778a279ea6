"""Models of a user, with what they use."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from etude import register

WIDTH = 12
_GAIN = math.sqrt(2)


def _scaled(x):
    return x * _GAIN


class Stem(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, WIDTH), nn.BatchNorm1d(WIDTH))


@register("model", "own_net")
class OwnNet(nn.Module):
    """Batch norm and dropout."""

    def __init__(self, rate: float = 0.5, num_classes: int = 10):
        super().__init__()
        self.stem, self.rate = Stem(), rate
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, images):
        return self.head(F.dropout(_scaled(self.stem(images)).relu(), self.rate, self.training))


@register("model", "numpy_net")
class NumpyNet(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(784, num_classes)
        self.head.bias.data = torch.from_numpy(np.random.rand(num_classes)).float()

    def forward(self, images):
        return self.head(self.flat(images))


@register("model", "noisy_net")
class NoisyNet(NumpyNet):
    def forward(self, images):
        return super().forward(images + torch.rand(1))
