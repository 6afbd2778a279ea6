"""NaNDebugger names the samples, the layer, the code between layers, the loss or the backward pass."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from torch import nn

from etude import DataLoader, Trainer
from etude.callbacks import Callback, NaNDebugger
from etude.callbacks.nan_search import Search
from etude.checkpoint import unpack
from etude.core import ConfigError, TrainingError
from etude.optim import SAM, SGD

MARK = 7.0
"""The value of an input that makes a layer fail."""


class Listen(Callback):
    shows_notices = True

    def __init__(self):
        super().__init__()
        self.messages, self.found = [], []

    def on_notice(self, message, facts):
        if facts.get("finding") == "non-finite":
            self.messages.append(message)
            self.found.append(facts)


class Divide(nn.Module):
    """Divides samples by zero whose first value says so."""

    def forward(self, x):
        return torch.where(x[:, :1] == MARK, x / 0.0, x)


class RootOfZero(nn.Module):
    """The square root of zero is finite, and its gradient is not."""

    def forward(self, x):
        return x + torch.where(x[:, :1] == MARK, x - x, torch.ones_like(x)).sqrt() * 0.5


class Net(nn.Module):
    def __init__(self, layer=None, between=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.mark, self.first = layer or nn.Identity(), nn.Linear(4, 8)
        self.block, self.norm = nn.Sequential(nn.Tanh(), nn.Dropout(dropout)), nn.BatchNorm1d(8)
        self.head, self.between = nn.Linear(8, 3), between

    def forward(self, x):
        hidden = self.norm(self.block(self.first(self.mark(x))))
        return self.head(hidden if self.between is None else self.between(hidden, x))


def data(bad=(), value=math.nan, samples=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    for index in bad:
        x[index, 0] = value
    return x, torch.arange(samples) % 3


def found(model, tensors, loss=None, loader=None, folder=None, **config):
    listener = Listen()
    config = {"epochs": 1, "batch_size": 8, "gradient_clip_norm": None} | config
    given = tensors if loader is None else loader
    trainer = Trainer(
        model,
        given,
        config=config,
        loss=loss,
        callbacks=[NaNDebugger(), listener],
        progress=False,
        output_dir=folder,
    )
    trainer.train()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return listener


@pytest.mark.parametrize("accumulate", [1, 5])
def test_samples_of_the_batch_and_their_place_in_the_data(accumulate):
    tensors = data(bad=(3, 17)) if accumulate == 1 else data(bad=(3, 67), samples=80)
    listener = found(Net(), tensors, grad_accum_steps=accumulate, seed=3)
    assert listener.messages
    named = set()
    for message, facts in zip(listener.messages, listener.found, strict=True):
        assert "(part 0)" in message  # the first part of the batch, not the labels
        assert ("micro-batch" in message) == (accumulate > 1)
        indices = message.split("index ")[1].split(" of the data")[0]
        named |= {int(one) for one in indices.split(", ")}
        order = [*DataLoader(*tensors, batch_size=8, seed=3).sampler.batch(facts["epoch"], facts["start"])]
        assert accumulate > 1 or [order[row] for row in facts["rows"]] == [int(one) for one in indices.split(", ")]
    assert named == ({3, 17} if accumulate == 1 else named & {3, 67})


def test_the_layer_that_made_it_and_no_later_one():
    listener = found(Net(Divide()), data(bad=[10], value=MARK))
    (message,) = listener.messages
    assert "mark (Divide) is the first layer" in message
    assert "inputs are finite" in message
    assert "index 10 of the data" in message


def test_the_parameter_that_is_not_finite():
    model, listener = Net(), Listen()
    with torch.no_grad():
        model.head.bias[0] = math.nan
    trainer = Trainer(model, data(), config={"epochs": 1}, callbacks=[NaNDebugger(), listener], progress=False)
    with pytest.raises(Exception, match="weights themselves are not finite"):
        trainer.train()
    assert "head (Linear)" in listener.messages[0]
    assert "parameter bias" in listener.messages[0]


def test_code_between_layers():
    between = lambda hidden, x: hidden.masked_fill(x[:, :1] == MARK, math.inf)
    (message,) = found(Net(between=between), data(bad=[10], value=MARK)).messages
    assert "input of head (Linear)" in message


def test_the_loss():
    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels, reduction="none") * torch.where(labels == 9, math.nan, 1.0)

    x, y = data()
    y[10] = 9
    model = Net()
    model.head = nn.Linear(8, 10)
    (message,) = found(model, (x, y), loss=loss).messages
    assert "loss is not" in message


def test_the_layer_the_operator_and_the_parameter_of_the_backward_pass():
    tensors = data(bad=[10], value=MARK)
    model = Net(between=lambda hidden, x: hidden + torch.where(x[:, :1] == MARK, hidden * 0, 1.0).sqrt())
    (message,) = found(model, tensors).messages
    assert "loss is finite" in message
    assert "in the code after norm (BatchNorm1d)" in message
    assert "first parameter with such a gradient is norm." in message
    assert "SqrtBackward0 returned NaN (" not in message or "sqrt()" in message


def test_the_layer_whose_backward_pass_it_is():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0.0).sqrt()

    (message,) = backward_of(Root())
    assert "in the backward pass of 2 (Root)" in message
    assert "MulBackward0 returned NaN" in message  # the gradient of the root is infinite, and 0 times that is NaN
    assert "(x * 0.0).sqrt()" in message
    assert "parameter with such a gradient is 0." in message


def backward_of(layer):
    listener = Listen()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), layer, nn.Linear(8, 3))
    trainer = Trainer(model, data(), config={"epochs": 1}, callbacks=[NaNDebugger(1), listener], progress=False)
    with pytest.raises(Exception, match="nothing was learned"):
        trainer.train()
    return listener.messages


def test_the_file_of_the_batch(tmp_path):
    tensors = data(bad=[10])
    listener = found(Net(), tensors, folder=tmp_path / "run")
    (facts,) = listener.found
    with safe_open(facts["file"], "pt") as file:
        known, kept = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert "non-finite" in known["finding"]
    assert (int(known["start"]), int(known["end"])) == (facts["start"], facts["end"])
    (batch,) = unpack(kept, json.loads(known["structure"]))
    (row,) = facts["rows"]
    torch.testing.assert_close(batch[0][row], tensors[0][10], equal_nan=True)
    assert batch[1][row] == tensors[1][10]


def test_the_same_random_numbers_are_drawn_again():
    """A dropout mask, drawn again, drops what it dropped: the fault is there, or the first draw was another."""

    class Unlucky(nn.Module):
        def forward(self, x):
            return torch.where(torch.rand(()) < 0.4, x / 0.0, x)

    listener = Listen()
    tensors = data(samples=160)
    trainer = Trainer(
        Net(Unlucky(), dropout=0.5), tensors, config={"batch_size": 8, "epochs": 1},
        callbacks=[NaNDebugger(100), listener], progress=False,
    )  # fmt: skip
    trainer.train()
    assert len(listener.messages) > 3
    assert all("mark (Unlucky)" in message for message in listener.messages)


@pytest.mark.parametrize("bad", [(), (10, 30)])
def test_training_is_not_changed(bad):
    weights = []
    for callbacks in ([], [NaNDebugger()]):
        model = Net(dropout=0.3)
        trainer = Trainer(
            model, data(bad), config={"epochs": 2, "batch_size": 8}, callbacks=callbacks, progress=False
        )
        trainer.train()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_first_skipped_step_is_found_at_the_log_point_if_steps_are_not_read(monkeypatch):
    """As on a CUDA device: the batch is read again from its position, and the next skipped step is run at once."""
    begin = NaNDebugger.on_train_begin

    def unread(self, run):
        begin(self, run)
        self._reads = False

    monkeypatch.setattr(NaNDebugger, "on_train_begin", unread)
    listener = found(Net(), data(bad=(3, 30)), log_interval=5, epochs=2)
    first, *others = listener.messages
    assert "with the weights of step 5" in first
    assert all("with the weights" not in one for one in others)
    assert len(others) == 2
    assert {int(one.split("index ")[1].split(" ")[0]) for one in listener.messages} == {3, 30}


def test_it_speaks_before_an_error_ends_the_run(monkeypatch):
    begin = NaNDebugger.on_train_begin

    def unread(self, run):
        begin(self, run)
        self._reads = False

    monkeypatch.setattr(NaNDebugger, "on_train_begin", unread)
    listener = Listen()
    x, y = data()
    trainer = Trainer(
        Net(), (x * math.nan, y), config={"epochs": 1, "batch_size": 4, "max_skipped_steps": 3, "log_interval": 3},
        callbacks=[NaNDebugger(1), listener], progress=False,
    )  # fmt: skip
    with pytest.raises(Exception, match="not finite"):
        trainer.train()
    assert "the batch contains" in listener.messages[0]


def test_no_report_is_a_mistake():
    with pytest.raises(ConfigError, match="reports"):
        NaNDebugger(0)


class Fragile(nn.Linear):
    """Fails while its weights are far from where they began."""

    def forward(self, x):
        return super().forward(x) / (self.weight.abs().max() < 10.0)


def test_a_fault_at_the_weights_that_sam_has_moved_is_named():
    torch.manual_seed(0)
    listener = Listen()
    trainer = Trainer(
        Fragile(4, 3),
        data(),
        config={"epochs": 1, "batch_size": 8, "device": "cpu"},
        optimizer=lambda params: SAM(SGD(params, lr=0.1), rho=100.0),
        callbacks=[NaNDebugger(reports=1), listener],
        progress=False,
    )
    with pytest.raises(TrainingError, match="not finite"):
        trainer.train()
    (message,) = listener.messages
    assert "second one" in message
    assert "lower rho" in message


class Fill(nn.Module):
    """Spoils samples whose first value says so."""

    def forward(self, hidden, x):
        return hidden.masked_fill(x[:, :1] == MARK, math.inf)


class Masked(nn.Module):
    """Attention that sees the past only, then a layer that spoils some samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.mark, self.head = Fill(), nn.Linear(4, 3)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        hidden = self.block(x[:, None].expand(-1, 4, -1), src_mask=mask).mean(1)
        return self.head(self.mark(hidden, x))


def test_an_infinite_mask_is_no_fault():
    (message,) = found(Masked(), data(bad=[10], value=MARK)).messages
    assert "mark (Fill) is the first layer" in message
    assert "index 10 of the data" in message


def test_missing_labels_are_no_fault():
    x, y = data(bad=[10], value=MARK)
    labels = nn.functional.one_hot(y).float()
    labels[::3, 1] = math.nan
    (message,) = found(Net(Divide()), (x, labels), loss="multi_label").messages
    assert "mark (Divide) is the first layer" in message


class Late(nn.Linear):
    """Replaces what is not finite after it was used: too late for the gradient."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4)

    def forward(self, x):
        return torch.where(x.isnan(), 0.0, self.weight[0] * x)


def test_the_batch_is_named_for_a_loss_or_a_gradient_that_is_not_finite():
    x, y = data()
    y = y.float()
    y[10] = math.nan
    (message,) = found(Net(), (x, y), loss=lambda output, y: (output.mean(1) - y).square()).messages
    assert "the batch contains non-finite values (part 1)" in message
    assert "index 10 of the data" in message
    model = nn.Sequential(Late(), nn.Linear(4, 3))
    x, y = data([10])
    (message,) = found(model, (x, y)).messages
    assert "the loss is finite, but the gradients are not" in message
    assert "the batch contains non-finite values (part 0)" in message


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, math.nan]))

    def forward(self, x):
        return torch.where(x[:, :1] == MARK, x * self.scale[1], x)


def test_the_buffer_that_is_not_finite():
    (message,) = found(Net(Scaled()), data(bad=[10], value=MARK)).messages
    assert "mark (Scaled) is the first layer" in message
    assert "buffer scale is not finite" in message


class Small(Divide):
    """Has memory for two samples at once, and for none with hooks if it is `poor`."""

    poor = False

    def forward(self, x):
        if self.training and (len(x) > 2 or (self.poor and self._forward_hooks)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


@pytest.mark.parametrize("poor", [False, True])
def test_a_step_that_fits_into_memory_only_in_parts(poor):
    layer = Small()
    layer.poor = poor
    model = Net(layer)
    model.norm = nn.Identity()
    (message,) = found(model, data(bad=[10], value=MARK), on_out_of_memory="split").messages
    if poor:
        assert "more memory than there is" in message
    else:
        assert "mark (Small) is the first layer" in message
        assert "index 10 of the data" in message


def test_a_rank_without_samples_has_nothing_to_find():
    model = Net()
    trainer = Trainer(model, data(), config={"device": "cpu"}, progress=False)
    x, y = data(bad=[3])
    finding = Search(trainer.step).run([(x[:0], y[:0]), (x[:8], y[:8])])
    assert "part 0" in finding.text
    assert (finding.micro_batch, finding.rows, finding.sizes) == (1, [3], [0, 8])
