"""Parameter groups by name: who is in which group with which settings, and what is refused."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.config import build_component
from etude.core import ConfigError
from etude.optim import SGD, Adam, AdamW, Muon, RMSprop, group_parameters


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def settings(optimizer, model, key):
    """Return a setting by the name of the parameter it holds for."""
    by_id = {id(param): group[key] for group in optimizer.param_groups for param in group["params"]}
    return {name: by_id[id(param)] for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, RMSprop])
def test_first_matching_pattern_decides_and_the_rest_keeps_the_settings_of_all(kind):
    model = Net()
    groups = [{"params": "blocks.0", "lr": 1e-4}, {"params": ["blocks.*.weight", "embed.*"], "weight_decay": 0.5}]
    optimizer = kind(model.named_parameters(), lr=1e-2, weight_decay=0.1, groups=groups)
    for name, lr in settings(optimizer, model, "lr").items():
        assert lr == (1e-4 if name.startswith("blocks.0.") else 1e-2), name
    for name, decay in settings(optimizer, model, "weight_decay").items():
        other = name.startswith("embed") or (name.startswith("blocks") and name.endswith("weight"))
        assert decay == (0.5 if other and not name.startswith("blocks.0.") else 0.1), name
    assert [group.get("name") for group in optimizer.param_groups] == [None, "blocks.0", "blocks.*.weight, embed"]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_only_matrices_decay():
    model = Net()
    optimizer = AdamW(model, weight_decay=0.3, decay_only_matrices=True, groups=[{"params": "head", "lr": 0.5}])
    sizes = {name: param.dim() for name, param in model.named_parameters()}
    assert settings(optimizer, model, "weight_decay") == {n: 0.3 if d >= 2 else 0.0 for n, d in sizes.items()}
    assert {n for n, lr in settings(optimizer, model, "lr").items() if lr == 0.5} == {"head.weight", "head.bias"}


def test_layers_further_from_the_output_learn_more_slowly():
    model = Net()
    optimizer = AdamW(model, lr=1.0, layer_decay=0.5, groups=[{"params": "embed", "lr": 8.0}])
    rates = settings(optimizer, model, "lr")
    expected = {"embed": 8.0 * 0.5**4, "blocks.0": 0.5**3, "blocks.1": 0.5**2, "blocks.2": 0.5, "head": 1.0}
    assert rates == {n: next(r for p, r in expected.items() if n.startswith(f"{p}.")) for n in rates}
    assert optimizer.param_groups[0]["lr"] == 1.0  # the rate that is logged as lr
    with pytest.raises(ConfigError, match="layer_decay"):
        AdamW(nn.Linear(2, 2), layer_decay=0.5)


def test_groups_are_those_of_torch_for_any_optimizer():
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    ours = torch.optim.Adagrad(group_parameters(model, [{"params": "embed", "lr": 0.01}], lr=0.1), lr=0.1)
    rest = [p for name, p in other.named_parameters() if not name.startswith("embed")]
    theirs = torch.optim.Adagrad([{"params": rest}, {"params": other.embed.parameters(), "lr": 0.01}], lr=0.1)
    data = torch.randn(8, 4)
    for net, optimizer in ((model, ours), (other, theirs)):
        for _ in range(3):
            optimizer.zero_grad()
            net(data).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"groups": [{"params": "bocks.*"}]}, ["groups.0", "'bocks.*'", "'blocks'"]),
        ({"groups": [{"lr": 1.0}]}, ["groups.0", "params"]),
        ({"groups": [{"params": "head", "wieght_decay": 0.0}]}, ["groups.0.wieght_decay", "weight_decay"]),
        ({"groups": [{"params": "head", "lr": -1.0}]}, ["groups.0.lr", "-1.0"]),
        ({"groups": [{"params": "head", "lr": "high"}]}, ["groups.0.lr", "high"]),
        ({"groups": [{"params": "head", "betas": (0.9, 1.5)}]}, ["groups.0.betas", "1.5"]),
        ({"groups": [{"params": ["head", 0]}]}, ["groups.0.params", "['head', 0]"]),
        ({"groups": [{"params": nn.Linear(2, 2)}]}, ["groups.0.params", "Linear"]),
        ({"groups": [{"params": "head", "betas": 0.9}]}, ["groups.0.betas", "0.9"]),
        ({"groups": [{"params": "head", "weight_decay": [0.1]}]}, ["groups.0.weight_decay", "[0.1]"]),
        ({"groups": [{"params": "head", "amsgrad": "false"}]}, ["groups.0.amsgrad", "false"]),
        ({"groups": [{"params": "head", "lr": None}]}, ["groups.0.lr", "null"]),
        ({"groups": [{"params": "head"}, {"params": "head.bias", "lr": 1.0}]}, ["groups.1", "earlier"]),
        ({"groups": [{"params": "head", "name": "a"}, {"params": "embed", "name": "a"}]}, ["groups.1", "'a'"]),
        ({"groups": [{"params": "head", "lr": 0.1, "learning_rate": 0.2}]}, ["groups.0", "learning_rate", "lr"]),
        (
            {"groups": [{"params": "head.bias", "weight_decay": 0.1}], "decay_only_matrices": True},
            ["groups.0.weight_decay", "decay_only_matrices"],
        ),
        ({"layer_decay": 1.5}, ["layer_decay", "1.5"]),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    with pytest.raises(ConfigError) as caught:
        AdamW(Net(), **arguments)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["adamw", "muon", "torch.optim.NAdam"])
def test_a_group_whose_parameters_are_all_frozen_is_a_warning(name, caplog):
    """What is frozen may be chosen on the command line; of a group with some frozen parameters the others count."""
    model = Net()
    model.head.requires_grad_(False)
    data = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)

    def rates(params):
        section = {"name": name, "lr": 0.1, "groups": [{"params": params, "lr": 0.5}]}
        return sorted({group["lr"] for group in Trainer(model, data, optimizer=section).optimizer.param_groups})

    assert rates(["head", "embed"]) == [0.1, 0.5]
    assert not caplog.messages
    assert rates("head") == [0.1]
    why = "all parameters that match (head.weight, head.bias) are frozen, so the group has no effect"
    assert caplog.messages == [f"optimizer.groups.0.params: {why}"]


def test_groups_that_are_no_list_are_refused():
    with pytest.raises(ConfigError, match=r"optimizer.groups: expected a list, got 'head'"):
        build_component("optimizer", {"name": "adamw", "groups": "head"}, provided={"params": Net()})
    with pytest.raises(ConfigError, match=r"optimizer.groups is 'head', which is no list of groups"):
        AdamW(Net(), groups="head")


def test_a_group_of_matrices_and_vectors_may_have_a_weight_decay_beside_the_preset():
    """Muon gives its matrices to one optimizer and its vectors to another."""
    groups = [{"params": "blocks", "weight_decay": 0.3}]
    for kind in (AdamW, Muon):
        made = kind(Net(), weight_decay=0.1, groups=groups, decay_only_matrices=True)
        decays = {group["weight_decay"] for group in made.param_groups if group.get("name") == "blocks"}
        assert decays == {0.3, 0.0}


def test_groups_need_names():
    with pytest.raises(ConfigError, match="named_parameters"):
        AdamW(Net().parameters(), groups=[{"params": "head"}])
