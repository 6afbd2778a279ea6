"""Adam for one small vector, with its state in buffers of a module: no optimizer object, nothing read on the host."""

import torch
from torch import Tensor, nn


class VectorAdam(nn.Module):
    """Adam with torch's defaults for a vector that some weighting adjusts; `weight_decay` is added to the gradient."""

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, size: int, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, (0.9, 0.999), 1e-8
        for name in ("mean", "square", "count"):
            self.register_buffer(name, torch.zeros(size))

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, active: Tensor) -> None:
        """Update the values in place where a task is active; the others, and their state, stay as they are."""
        gradient = gradient + self.weight_decay * values
        first, second = self.betas
        count = self.count + active
        mean = torch.where(active, self.mean.lerp(gradient, 1 - first), self.mean)
        square = torch.where(active, self.square.lerp(gradient.square(), 1 - second), self.square)
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.square.copy_(square)
        corrected = mean / (1 - first**count)
        size = (square / (1 - second**count)).sqrt() + self.eps
        values.copy_(torch.where(active, values - self.lr * corrected / size, values))
