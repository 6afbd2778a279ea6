"""Fused updates on pieces of the parameters compute what those on whole ones do."""

import copy

import pytest
import torch
from torch import nn

from etude.optim.pieces import LARGEST, SMALLEST, InPieces, cut

OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, fused=True, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
}


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 64, 5), nn.Conv2d(64, 8, 3), nn.Linear(300, 100))
    layers[:2].to(memory_format=torch.channels_last)
    return layers


def trained(make, *, in_pieces):
    layers = model()
    optimizer = make(layers.parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in layers.parameters():
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        if in_pieces:
            with InPieces():
                optimizer.step()
        else:
            optimizer.step()
    return layers, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_are_updated_as_the_whole_is(name):
    whole, optimizer = trained(OPTIMIZERS[name], in_pieces=False)
    pieces, other = trained(OPTIMIZERS[name], in_pieces=True)
    for one, two in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    states = [copy.deepcopy(each.state_dict()["state"]) for each in (optimizer, other)]
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-7)


def test_numbers_of_a_step_belong_to_every_piece():
    params = [torch.zeros(5 * SMALLEST + 1), torch.zeros(3), torch.zeros(100, 100).t()]
    steps = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    of_params, of_grads, of_steps = cut([params, [torch.ones_like(one) for one in params], steps])
    assert sum(one.numel() for one in of_params) == sum(one.numel() for one in params)
    assert [float(one) for one in of_steps] == [1.0] * 6 + [2.0, 3.0]
    assert [one.shape for one in of_grads] == [one.shape for one in of_params]
    assert of_params[-1].shape == (100, 100)  # not in one stretch of memory: left whole
    of_params[0].fill_(7.0)
    assert params[0].sum() == 7.0 * SMALLEST  # they are views


@pytest.mark.parametrize("sizes", [[], [5], [SMALLEST] * 50, [24 * LARGEST], [LARGEST] * 40])
def test_tiny_parameters_and_large_models_are_left_alone(sizes):
    lists = [[torch.zeros(size) for size in sizes]] * 2
    assert cut(lists) is lists


def test_a_launch_takes_all_pieces_of_lenet5():
    shapes = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,)]
    (pieces,) = cut([[torch.zeros(shape) for shape in shapes]])
    assert len(pieces) <= 36
    assert max(one.numel() for one in pieces) <= 3072
