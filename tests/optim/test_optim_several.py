"""Several optimizers as one: the same weights as each of them alone, also after saving and loading."""

import copy

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.config import build_component
from etude.core import ConfigError
from etude.optim import SAM, SGD, AdamW, Lookahead, Muon, Optimizers, RMSprop
from etude.optim.groups import NamedParams, names_of
from etude.optim.several import optimizers_in

KINDS = {
    "fused": lambda a, b: [SGD(a, lr=0.1, momentum=0.9), AdamW(b, lr=0.01)],
    "mixed": lambda a, b: [RMSprop(a, lr=0.01), torch.optim.Adam(b, lr=0.01)],
    "groups": lambda a, b: [SGD([{"params": a[:1], "lr": 0.5}, {"params": a[1:]}], lr=0.1, momentum=0.5), AdamW(b)],
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def parts(model):
    return [*model[0].parameters()], [*model[2].parameters()]


def train(model, *optimizers, steps=range(5)):
    for step in steps:
        data = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        for one in optimizers:
            one.zero_grad()
        model(data).square().sum().backward()
        for one in optimizers:
            one.step()
    return model.state_dict()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_together_is_each_alone_also_after_loading(make):
    one, two, three = net(), net(), net()
    expected = train(two, *make(*parts(two)), steps=range(8))
    both = Optimizers(make(*parts(one)))
    train(one, both)
    three.load_state_dict(one.state_dict())
    loaded = Optimizers(make(*parts(three)))
    loaded.load_state_dict(copy.deepcopy(both.state_dict()))
    for model, optimizer in ((one, both), (three, loaded)):
        found = train(model, optimizer, steps=range(5, 8))
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert len(both.state) == len(list(both.state.values())) == len([*both.state]) == 4


def test_a_rate_set_in_a_group_is_that_of_its_optimizer():
    model = net()
    one, two = KINDS["fused"](*parts(model))
    both = Optimizers([one, two])
    for group, rate in zip(both.param_groups, (0.5, 0.25), strict=True):
        group["lr"] = rate
    assert (one.param_groups[0]["lr"], two.param_groups[0]["lr"]) == (0.5, 0.25)
    both.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [len(each.param_groups) for each in (one, two, both)] == [1, 2, 3]


@pytest.mark.parametrize("make", [Muon, lambda model: SAM(AdamW(model)), lambda model: Lookahead(SAM(SGD(model)))])
def test_set_lr_is_the_base_of_a_schedule_as_with_a_single_optimizer(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = make(model)
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    config = {"epochs": 1, "batch_size": 4, "device": "cpu"}
    Trainer(model, data, config=config, optimizer=optimizer, scheduler=lambda step: 0.5**step, progress=False).train()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0625] * len(optimizer.param_groups)
    with pytest.raises(ConfigError, match="lr is -1"):
        optimizer.set_lr(-1)


def test_a_parameter_in_two_optimizers_is_refused():
    model = net()
    with pytest.raises(ConfigError, match="two optimizers"):
        Optimizers([SGD(model.parameters()), AdamW(model[0].parameters())])


def section(*patterns):
    return {"name": "several", "patterns": [*patterns], "optimizers": [{"name": "sgd", "lr": 0.1}, "adamw"]}


def test_built_by_patterns_of_names():
    model = net()
    params = NamedParams(model.parameters(), names_of(model))
    both = build_component("optimizer", section("0.*", "*"), provided={"params": params})
    assert [type(one) for one in both.optimizers] == [SGD, AdamW]
    assert [[id(p) for p in group["params"]] for group in both.param_groups] == [
        [id(p) for p in half] for half in parts(model)
    ]


@pytest.mark.parametrize(
    ("patterns", "word"), [(("0.*",), "2 optimizers"), (("0.*", "2.bias"), "2.weight"), (("0.*", "one"), "one")]
)
def test_patterns_that_do_not_cover_the_parameters_are_refused(patterns, word):
    model = net()
    params = NamedParams(model.parameters(), names_of(model))
    with pytest.raises(ConfigError, match=word):
        build_component("optimizer", section(*patterns), provided={"params": params})


def test_a_pattern_that_leaves_nothing_is_refused():
    model = net()
    model[2].requires_grad_(False)
    data = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"patterns.1: all parameters that match are in earlier ones; remove it"):
        Trainer(model, data, optimizer=section("*", "0.*"))
    with pytest.raises(ConfigError, match=r"patterns.1: all parameters that match are frozen; remove it"):
        Trainer(model, data, optimizer=section("0.*", "2.*"))


def test_an_optimizer_of_several_optimizers_is_one_of_many():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    muon = Muon(model[1:])
    both = Optimizers([torch.optim.SGD(model[0].parameters(), lr=0.1), muon])
    assert [type(one).__name__ for one in optimizers_in(both)] == ["SGD", "MatrixMuon", "AdamW"]
    assert both.announcement() == muon.announcement()
