"""LeNet-5 (LeCun et al., 1998) for images of any size."""

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.models.parts import ACTIVATIONS, Activation, Dtype, takes_config

Size = Annotated[int, Ge(1)]


@register("model", "lenet5", companions={"data": {"name": "mnist"}})
class LeNet5(nn.Module):
    """Two convolutions with pooling, then three linear layers: 61,706 parameters for MNIST.

    Images of 28×28 are padded by 2 to the 32×32 of the paper; set `padding=0` for images of 32×32. The paper uses
    scaled tanh and average pooling instead of ReLU and max pooling (`activation="tanh", pooling="average"`); the
    defaults train faster and are more accurate.

    >>> sum(parameter.numel() for parameter in LeNet5().parameters())
    61706
    """

    @takes_config
    def __init__(
        self,
        num_classes: Size = 10,
        input_shape: tuple[Size, Size, Size] = (1, 28, 28),
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        dtype: Dtype = "float32",
        activation: Activation = "relu",
        pooling: Literal["max", "average"] = "max",
        padding: Annotated[int, Ge(0)] = 2,
    ) -> None:
        """Build the network for `input_shape` (channels, height, width); `dropout` follows the two hidden layers."""
        super().__init__()
        if len(input_shape) != 3:
            raise ConfigError(f"lenet5 needs images (channels, height, width), found samples of {list(input_shape)}")
        channels, *size = input_shape
        height, width = (((length + 2 * padding - 4) // 2 - 4) // 2 for length in size)
        if height < 1 or width < 1:
            least = max(1, 16 - 2 * padding)
            raise ConfigError(
                f"lenet5 with padding {padding} needs images of at least {least}×{least}, "
                f"found input_shape {list(input_shape)}"
            )
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * height * width, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)
        self.pool = nn.MaxPool2d(2) if pooling == "max" else nn.AvgPool2d(2)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        # Channels last: small convolutions take two thirds of the time on a CPU.
        self.to(getattr(torch, dtype)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def feature_dim(self) -> int:
        """The last dimension of `features`, 84."""
        return self.fc3.in_features

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self.fc3

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, C, H, W)."""
        logits: Tensor = self.fc3(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the activations (B, 84) that are the input of the output layer."""
        # Pool before the activation: with max pooling the result is the same, on a quarter of the values.
        x = images.to(self.conv1.weight.dtype)
        x = self.activation(self.pool(self.conv1(x)))
        x = self.activation(self.pool(self.conv2(x))).flatten(1)
        x = self.dropout(self.activation(self.fc1(x)))
        activations: Tensor = self.dropout(self.activation(self.fc2(x)))
        return activations
