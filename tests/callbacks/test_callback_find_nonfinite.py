"""FindNonfinite names the samples, the layer, the code between layers, the loss or the backward pass."""

import math

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.callbacks import Callback, FindNonfinite
from etude.core import ConfigError

BAD_STEP = 2


class Listen(Callback):
    shows_notices = True

    def __init__(self):
        super().__init__()
        self.messages = []

    def on_notice(self, message, facts):
        if facts.get("finding") == "non-finite":
            self.messages.append(message)


class Scale(nn.Module):
    """Divides by zero in one step, or looks at a parameter that is NaN."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.calls = fault, 0
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return x / (0.0 if self.calls == BAD_STEP + 1 else 1.0) * self.gain


class Net(nn.Module):
    def __init__(self, between=None, layer=None):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 8), nn.Sequential(layer or nn.Tanh()), nn.Linear(8, 3)
        self.between, self.calls = between, 0

    def forward(self, x):
        self.calls += 1
        x = self.block(self.first(x))
        if self.between is not None and self.calls == BAD_STEP + 1:
            x = self.between(x)
        return self.head(x)


def batches(bad=()):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(5)]
    for sample in bad:
        data[BAD_STEP][0][sample, 1] = math.nan
    return data


def found(model, data, loss=None, reports=3, **config):
    listener = Listen()
    callbacks = [FindNonfinite(reports), listener]
    trainer = Trainer(model, data, config={"epochs": 1} | config, loss=loss, callbacks=callbacks, progress=False)
    trainer.train()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return listener.messages


@pytest.mark.parametrize("accumulate", [1, 5])
def test_samples_of_the_batch(accumulate):
    if accumulate > 1:
        data = [*batches(bad=(3, 6)), *batches()]
    else:
        data = batches(bad=(3, 6))
    (message,) = found(Net(), data, grad_accum_steps=accumulate)
    assert "input 0" in message
    assert "samples 3, 6)" in message
    assert ("micro-batch 3" in message) == (accumulate > 1)
    assert f"step {1 if accumulate > 1 else BAD_STEP + 1} " in message


def test_the_layer_that_made_it_and_no_later_one():
    (message,) = found(Net(layer=Scale()), batches())
    assert "block.0 (Scale)" in message
    assert "inputs are finite" in message


def test_the_parameter_that_is_not_finite():
    model = Net()
    with torch.no_grad():
        model.head.bias[0] = math.nan
    listener = Listen()
    trainer = Trainer(model, batches(), config={"epochs": 1}, callbacks=[FindNonfinite(), listener], progress=False)
    with pytest.raises(Exception, match="weights themselves are not finite"):
        trainer.train()
    assert "head (Linear)" in listener.messages[0]
    assert "parameter bias" in listener.messages[0]
    assert len(listener.messages) == 3


def test_code_between_layers():
    (message,) = found(Net(between=lambda x: x.log()), batches())
    assert "input of head (Linear)" in message


def test_the_loss():
    calls = []

    def loss(logits, labels):
        calls.append(1)
        value = nn.functional.cross_entropy(logits, labels)
        return value * math.nan if len(calls) == BAD_STEP + 1 else value

    (message,) = found(Net(), batches(), loss=loss)
    assert "loss is not" in message


def test_the_backward_pass():
    class RootOfZero(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + (x - x).abs().sqrt() if self.calls == BAD_STEP + 1 else x  # 0 forward, 0·inf backward

    (message,) = found(Net(layer=RootOfZero()), batches())
    assert "gradients are not" in message


def test_finite_training_is_not_talked_about_and_not_changed():
    weights = []
    for callbacks in ([], [FindNonfinite()]):
        torch.manual_seed(0)
        model = Net()
        Trainer(model, batches(), config={"epochs": 2}, callbacks=callbacks, progress=False).train()
        weights.append(model.head.weight.detach())
    assert torch.equal(*weights)
    assert found(Net(), batches()) == []


def test_a_compiled_model_is_refused():
    model = Net()
    model._compiled_call_impl = model._call_impl  # what `model.compile()` sets
    trainer = Trainer(model, batches(), config={"epochs": 1}, callbacks=[FindNonfinite()], progress=False)
    with pytest.raises(ConfigError, match="compile"):
        trainer.train()
