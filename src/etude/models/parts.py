"""What models share: names of activations and number types."""

from collections.abc import Mapping
from typing import Literal

from torch import nn

Activation = Literal["relu", "tanh", "sigmoid", "gelu", "silu"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]

ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
