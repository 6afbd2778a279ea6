"""Parts of runs on a CUDA device that are made twice, with captured steps and without, and must have the same bytes."""

import torch
from torch import nn

from etude import Trainer
from etude.callbacks import EMA

SETTINGS = {"batch_size": 16, "deterministic": True}


def net(classes=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, classes)
    )


def data(samples=70 * 16 + 5, bad=None, classes=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, 8, 8, generator=generator)
    y = torch.randint(classes, (samples,), generator=generator)
    if bad is not None:
        x[bad] = float("nan")
    return x, y


def trained(model, tensors, *, capture, config, **arguments):
    settings = {**SETTINGS, "capture": capture, **config}
    trainer = Trainer(model, tensors, config=settings, progress=False, **arguments)
    trainer.train()
    return trainer


def captured(trainer):
    return bool(trainer.step.capture is not None and trainer.step.capture._graphs)


def tensors_of(trainer):
    """Weights, averages and the state of the optimizer, by name."""
    averages = [one.state_dict()["weights"] for one in trainer.callbacks if isinstance(one, EMA)]
    found = {
        **trainer.model.state_dict(),
        **{f"ema.{name}": value for one in averages for name, value in one.items()},
    }
    for place, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"{place}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def assert_same(one, other):
    mine, theirs = tensors_of(one), tensors_of(other)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
