"""The functions and models that ejected files contain do the same as the library's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from etude.data.order.permutation import ShuffledOrder
from etude.eject.plain import Transformer, permuted, shuffled
from etude.models import CausalTransformerLM


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 100))
def test_small_orders(size, seed, epoch):
    expected = ShuffledOrder(size, seed).indices(epoch, 0, size)
    np.testing.assert_array_equal(shuffled(size, seed, epoch), expected)


@pytest.mark.parametrize(("size", "seed", "epoch"), [(2**16 + 1, 0, 0), (70_000, 5, 3), (256**2 + 2 * 256 + 2, 9, 1)])
def test_large_orders(size, seed, epoch):
    expected = ShuffledOrder(size, seed).indices(epoch, 0, size)
    np.testing.assert_array_equal(permuted(size, seed, epoch), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False}, {"d_ff": 20}, {"n_heads": 2, "n_layers": 3}], ids=str
)
def test_the_plain_transformer_has_the_same_weights_and_gradients(dropout, options):
    found = []
    for kind, more in ((CausalTransformerLM, {"max_len": 32}), (Transformer, {})):
        torch.manual_seed(3)
        settings = {"vocab_size": 50, "d_model": 24, "n_layers": 2, "n_heads": 3, "dropout": dropout}
        model = kind(**{**settings, **options, **more})
        torch.manual_seed(4)
        tokens = torch.arange(4 * 17).view(4, 17) * 7 % 50
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
        found.append({name: (param, param.grad) for name, param in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, (param, grad) in found[0].items():
        assert torch.equal(param, found[1][name][0]), name
        assert torch.equal(grad, found[1][name][1]), name
