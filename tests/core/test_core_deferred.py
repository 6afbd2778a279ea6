"""Weights that are drawn after the model is made are those that the constructor would have drawn."""

import pytest
import torch
from torch import nn

from etude.core import ConfigError
from etude.core.deferred import deferred_weights, key_of, recording_of, weights_of
from etude.models import CausalTransformerLM

MODELS = {
    "transformer": lambda: CausalTransformerLM(vocab_size=31, d_model=16, n_layers=2, n_heads=2, max_len=8),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32),
    "padded embedding": lambda: nn.Embedding(10, 4, padding_idx=3),
    "convolution, norm, LSTM": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(8, 4)),
    "truncated": lambda: with_weight(lambda weight: nn.init.trunc_normal_(weight, std=0.5)),
    "scaled": lambda: with_weight(lambda weight: nn.init.xavier_normal_(weight).mul_(0.5).clamp_(min=-0.1)),
}


@torch.no_grad()
def with_weight(initialise):
    """Return layers, of which the first is initialised again."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    initialise(layers[0].weight)
    return layers


class Beside(nn.Module):
    """Draws numbers for tensors with memory between those for its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.token = nn.Linear(3, 3), nn.Parameter(torch.randn(4) * 0.02)
        self.register_buffer("order", torch.randperm(5))
        self.old = nn.Parameter(nn.init.normal_(torch.Tensor(3, 4)))
        self.register_buffer("filled", torch.empty(3).fill_(2.0))
        self.last = nn.Linear(3, 3)
        with torch.no_grad():
            self.first.weight.log_normal_()
            self.first.weight.normal_()


def drawn(model):
    """Return the weights by name."""
    weights = weights_of(model)
    # Tied weights by their first name.
    places = {key_of(param): (name, param) for name, param in reversed(weights.items()) if param.is_meta}
    found = {name: param for name, param in weights.items() if not param.is_meta}
    for key, values in recording_of(model).draw():
        if key in places:
            name, param = places[key]
            found[name] = values.as_strided(param.shape, param.stride(), param.storage_offset())
    return found


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_numbers_are_those_of_a_plain_model(make):
    torch.manual_seed(7)
    expected = make()
    torch.manual_seed(7)
    with deferred_weights():
        model = make()
    torch.manual_seed(8)
    assert all(param.is_meta for param in model.parameters())
    found = drawn(model)
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name
    for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_numbers_of_tensors_with_memory_come_in_their_turn():
    torch.manual_seed(7)
    expected = weights_of(Beside())
    torch.manual_seed(7)
    with deferred_weights():
        model = Beside()
    assert {name for name, one in weights_of(model).items() if not one.is_meta} == {"token", "order", "old"}
    for _ in range(2):
        found = drawn(model)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


def test_only_one_weight_at_a_time_is_in_memory():
    with deferred_weights():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(20)])
        for layer in model:
            nn.init.normal_(layer.weight)  # again, after all of them have been initialised by their constructors
    alive = []
    for _, values in recording_of(model).draw():
        alive.append(values.untyped_storage().nbytes())
    assert alive == [64 * 64 * 4] * 20


def test_the_program_draws_on_as_before():
    with deferred_weights():
        model = nn.Linear(3, 3)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    drawn(model)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "initialise", [nn.init.orthogonal_, nn.init.eye_, lambda weight: weight.copy_(nn.Linear(7, 5).weight.T)]
)
def test_a_weight_that_cannot_be_recorded_is_refused(initialise):
    with pytest.raises(ConfigError, match="cannot be deferred"), deferred_weights():
        with_weight(initialise)


def test_a_model_on_the_meta_device_alone_is_refused():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="deferred_weights"):
        recording_of(model)


def test_a_plain_model_has_nothing_to_draw():
    assert recording_of(nn.Linear(3, 3)) is None
