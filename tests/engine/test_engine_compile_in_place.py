"""Compiling a module in place: it computes the same, by compiled code, whatever class it has."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from etude.engine.compiled import compile_blocks, compile_in_place
from etude.engine.recompute import recompute_activations


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)


@pytest.fixture(autouse=True)
def compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def gradients(model):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), model.parameters())]


@pytest.mark.parametrize("make", [Net, lambda: Net().blocks], ids=["own class", "nn.Sequential"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by the compiler
def test_a_module_is_compiled(make, recomputed):
    model = make()
    expected, names = gradients(model), [*model.state_dict()]
    if recomputed:
        recompute_activations(model, blocks="*[01]")
        for block in model.modules():
            if "forward" in vars(block):
                compile_in_place(block)
    else:
        compile_in_place(model)
    torch.testing.assert_close(gradients(model), expected)
    assert counters["stats"]["unique_graphs"] == 1 + recomputed  # inputs of the second block need gradients
    assert [*model.state_dict()] == names


class Scaled(nn.Module):
    """A block with a number of its own, for which it is compiled apart from others."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        return x + self.linear(x).tanh() / self.scale


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_every_block_is_compiled_though_torch_counts_them_as_one(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = nn.Sequential(*(Scaled(number) for number in range(1, 12)))
    expected = gradients(model)
    with torch._dynamo.config.patch(recompile_limit=8):  # that of torch
        compile_blocks(model, [str(place) for place in range(11)])
        torch.testing.assert_close(gradients(model), expected)
    assert counters["stats"]["unique_graphs"] >= 11


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [Net, lambda: Net().blocks], ids=["own class", "nn.Sequential"])
def test_a_copy_has_weights_of_its_own(make, again):
    model = make()
    compile_in_place(model)
    expected = gradients(model)
    copied = again(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    torch.testing.assert_close(gradients(copied), expected)


def test_nothing_of_this_library_is_in_a_compiled_sequence():
    """Its pickles are read without it, and torch exports it."""
    model = Net().blocks
    compile_in_place(model)
    expected = model(torch.ones(2, 4))
    assert b"etude" not in pickle.dumps(model)
    exported = torch.export.export(model, (torch.ones(2, 4),)).module()
    torch.testing.assert_close(exported(torch.ones(2, 4)), expected)


class Doubled(nn.Module):
    """Sets its forward pass on itself, as decorators of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward = self._run

    def _run(self, x):
        return 2 * self.linear(x)


def make_doubled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    forward = model.forward
    model.forward = lambda x: 2 * forward(x)
    return model


def make_traced():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("make", [Doubled, make_doubled, make_traced])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_forward_pass_of_the_model_itself_is_kept(make):
    model = make()
    expected = gradients(model)
    compile_in_place(model)
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_hooks_of_a_compiled_sequence_run_every_time():
    model, seen = Net().blocks, []
    model.register_forward_pre_hook(lambda _model, _inputs: seen.append("before"))
    model.register_forward_hook(lambda _model, _inputs, output: output * 2)
    expected = gradients(model)
    compile_in_place(model)
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(gradients(model), expected)
    assert seen == ["before"] * 3
    assert counters["stats"]["unique_graphs"] == 1
