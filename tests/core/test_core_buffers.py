"""A skipped update leaves every buffer that a checkpoint holds as it was, whatever the model does with its buffers."""

import copy
import math

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.core.buffers import BufferGuard


class Plain(nn.Module):
    """Writes into its buffer in place, as batch norm does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, value):
        self.seen.add_(value)


class Replaced(Plain):
    def forward(self, value):
        self.seen = self.seen * 0.5 + value


class Growing(Plain):
    def forward(self, value):
        self.seen = torch.cat([self.seen, torch.tensor([value])])


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1).expand(4))

    def forward(self, value):
        self.seen = (self.seen[:1] + value).expand(4)


class Untouched(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.arange(2.0)[:, None].expand(2, 3))

    def forward(self, value):
        pass


class Appears(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)
        self.register_buffer("never", None)

    def forward(self, value):
        self.seen = torch.tensor(value)


class Vanishes(Plain):
    def forward(self, value):
        self.seen = None


class Recast(Plain):
    def forward(self, value):
        self.seen = self.seen.double() + value


MODELS = (Plain, Replaced, Growing, Expanded, Untouched, Appears, Vanishes, Recast)


def state(model):
    return {name: None if value is None else value.clone() for name, value in model._buffers.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("way", ["put_back", "choose"])  # the second is that of other devices
def test_buffers_are_put_back_if_and_only_if_the_update_is_skipped(make, skipped, way):
    model = nn.Sequential(make(), nn.BatchNorm1d(4), nn.BatchNorm2d(2).double())
    guard = BufferGuard(model)
    for value in (1.0, 2.0):  # some of these change their kind of buffer in the first step
        model[0](value)
        before = state(model[0])
        guard.remember()
        model[0](math.nan)
        model[1](torch.full((3, 4), math.nan))
        after, norms = state(model[0]), [state(model[1]), state(model[2])]
        getattr(guard, way)(torch.tensor(float(skipped)))
        assert_same(state(model[0]), before if skipped else after)
        assert_same(state(model[1]), nn.BatchNorm1d(4)._buffers if skipped else norms[0])
        assert_same(state(model[2]), norms[1])
        model[1].reset_running_stats()


def test_a_buffer_that_the_first_batch_shapes_begins_fresh_after_a_skipped_one():
    norm = nn.LazyBatchNorm1d()
    guard = BufferGuard(norm)
    guard.remember()
    norm(torch.full((3, 2), math.nan))
    guard.put_back(torch.tensor(1.0))
    assert_same(norm.state_dict(), nn.BatchNorm1d(2).state_dict())


def lazy_model():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.parametrize("make", [*MODELS, lazy_model])
def test_a_bad_batch_leaves_no_trace_in_any_kind_of_buffer(make):
    """Training with a NaN batch equals training without that batch."""

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.watcher, self.layer = make(), nn.Linear(4, 3)

        def forward(self, x):
            if make is lazy_model:
                return self.watcher(x) + self.layer(x)
            self.watcher(float(x.mean()))
            return self.layer(x)

    generator = torch.Generator().manual_seed(0)
    good = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(4)]
    bad = (torch.full((8, 4), math.nan), torch.arange(8) % 3)
    torch.manual_seed(0)
    models = [Watching()]
    if make is lazy_model:
        models[0](good[0][0])
    models.append(copy.deepcopy(models[0]))
    for model, batches in zip(models, (good, [*good[:2], bad, *good[2:]]), strict=True):
        Trainer(model, batches, config={"epochs": 1, "device": "cpu"}, progress=False).train()
    for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
