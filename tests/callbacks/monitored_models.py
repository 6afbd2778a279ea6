"""Models, data and trainers for tests of the gradient monitor."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from etude import DataLoader, Trainer


def tokens_net(width=16, vocabulary=30):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), encoder, nn.Linear(width, vocabulary))


def dense(*widths, activation=nn.ReLU):
    torch.manual_seed(0)
    layers = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), activation()]
    return nn.Sequential(*layers[:-1])


def data(samples=256, features=8, classes=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    return x, (x @ torch.randn(features, classes, generator=generator)).argmax(1)


def backward(model, x=None, y=None):
    x, y = (x, y) if x is not None else data()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def trainer(model, monitor, batches=None, **config):
    config = {"epochs": 1, "batch_size": 32, "log_interval": 4, "device": "cpu", **config}
    return Trainer(model, batches or data(), config=config, callbacks=[monitor], progress=False)


class Bad(nn.Module):
    """Passes its input on; a marked batch makes the gradient that comes back not finite."""

    value = math.nan

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * self.value if self.active else grad)
        return x

    active = True


def sick(vanishing=True):
    model = dense(8, 16, 16, 16, 4)
    for param in model[2].parameters():
        param.register_hook(lambda grad: grad * 1e-7)
    return model


def poisoned(steps, poison, batch=32):
    """Batches of which some have a marked first value."""
    x, y = data(batch * steps)
    for step in poison:
        x[(step - 1) * batch : step * batch, 0] = 99.0
    return DataLoader(x, y, batch, shuffle=False)


class Fragile(nn.Module):
    """The gradient of a marked batch is NaN from the middle on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.bad, self.last = nn.Linear(8, 8), nn.Linear(8, 8), Bad(), nn.Linear(8, 4)

    def forward(self, x):
        self.bad.active = bool((x[:, 0] == 99.0).any())
        return self.last(self.bad(torch.tanh(self.second(torch.tanh(self.first(x))))))
