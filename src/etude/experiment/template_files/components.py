"""Code that only this experiment needs: its model, and any custom loss, data, optimizer or callback.

The typed arguments of a registered class or function are the keys of its config section.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from etude import register


@register("model", "EXPERIMENT_NAME")
class Net(nn.Module):
    """A small network for 28×28 images: replace it with your own."""

    def __init__(
        self,
        hidden: Annotated[int, Gt(0)] = 128,
        num_classes: Annotated[int, Gt(1)] = 10,
        dropout: Annotated[float, Ge(0), Le(1)] = 0.0,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, 1, 28, 28)."""
        logits: Tensor = self.layers(images)
        return logits
