"""The multilayer perceptron is its formula."""

import pytest
import torch

from etude.config import lookup
from etude.models import MLP


@pytest.mark.parametrize("hidden", [[], [5], [5, 7, 3]])
@pytest.mark.parametrize(("activation", "function"), [("relu", torch.relu), ("tanh", torch.tanh)])
def test_it_is_its_formula(hidden, activation, function):
    model = lookup("model", "mlp").factory(in_features=12, hidden=hidden, out_features=2, activation=activation)
    inputs = torch.randn(4, 3, 4)
    x = inputs.reshape(4, 12)
    parameters = list(model.parameters())
    assert [p.shape[0] for p in parameters[::2]] == [*hidden, 2]
    for index in range(0, len(parameters), 2):
        x = x @ parameters[index].T + parameters[index + 1]
        if index + 2 < len(parameters):
            x = function(x)
    torch.testing.assert_close(model(inputs), x)


def test_dropout_follows_every_hidden_layer():
    model = MLP(4, [64, 64], 2, dropout=0.9)
    inputs = torch.ones(1, 4)
    assert not model(inputs).equal(model(inputs))
    assert model.eval()(inputs).equal(model(inputs))
    assert [type(layer).__name__ for layer in model.layers].count("Dropout") == 2
