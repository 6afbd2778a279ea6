"""Models that ship with the library."""

from etude.models.lenet5 import LeNet5
from etude.models.mlp import MLP

__all__ = ["MLP", "LeNet5"]
