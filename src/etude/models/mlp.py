"""A multilayer perceptron."""

from itertools import pairwise
from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.models.parts import ACTIVATIONS, Activation, takes_config

Size = Annotated[int, Ge(1)]


@register("model", "mlp")
class MLP(nn.Module):
    """Linear layers with an activation between them; inputs are flattened to (B, in_features).

    >>> import torch
    >>> MLP(in_features=4, hidden=[8], out_features=3)(torch.zeros(5, 2, 2)).shape
    torch.Size([5, 3])
    """

    @takes_config
    def __init__(
        self,
        in_features: Size,
        hidden: list[Size],
        out_features: Size,
        activation: Activation = "relu",
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
    ) -> None:
        """Build one layer per entry of `hidden` and the output layer; `dropout` follows every hidden layer."""
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise([in_features, *hidden]):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[activation]()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear([in_features, *hidden][-1], out_features))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs (B, out_features)."""
        outputs: Tensor = self.layers(inputs)
        return outputs

    @property
    def feature_dim(self) -> int:
        """The last dimension of `features`: the width of the last hidden layer."""
        return self.get_output_embeddings().in_features

    def features(self, inputs: Tensor) -> Tensor:
        """Return the input of the output layer, (B, feature_dim)."""
        features: Tensor = self.layers[:-1](inputs)
        return features

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        layer = self.layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer
