"""A small classifier, and loops over plain functions for it."""

import torch
import torch.nn.functional as F
from torch import nn

from etude import DataLoader, TrainingMetrics


def data(samples=44, classes=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x @ torch.randn(4, classes, generator=generator)).argmax(1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def parameters(one):
    return torch.cat([p.detach().flatten() for p in one.parameters()])


def functions(one, optimizer, known):
    """Return forward, loss, update and zeroing; the engine knows what they belong to, or not."""
    if known == "both":
        return one.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad
    if known == "module":
        return one, F.cross_entropy, lambda: optimizer.step(), lambda: optimizer.zero_grad()
    return lambda x: one(x), F.cross_entropy, lambda: optimizer.step(), lambda: optimizer.zero_grad()


def run(loop, one, known="both", epochs=2, batch_size=8, val_loader=None, metrics=None):
    optimizer = torch.optim.SGD(one.parameters(), lr=0.2)
    metrics = TrainingMetrics() if metrics is None else metrics
    loader = DataLoader(*data(), batch_size, shuffle=False)
    loop.run(*functions(one, optimizer, known), loader, epochs, metrics, val_loader)
    return metrics
