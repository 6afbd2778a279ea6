"""Optimizers by import path: found in imported modules only, their arguments checked, groups as in etude's own."""

import sys
import types

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.config import build_component
from etude.core import CheckpointError, ConfigError
from etude.experiment.check import check_experiment
from etude.experiment.config import experiment_schema, load_config

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
CODE = """
import torch

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr: float, power: float = 1.0, **others):
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad.sign() * param.grad.abs() ** group["power"]
"""
NESTED = """
import pickle
import torch

class Nested(torch.optim.Optimizer):
    \"\"\"Keeps what heavyball keeps: nested state, sets, a counter in the group, and a pickle in its state_dict.\"\"\"

    def __init__(self, params, lr: float = 0.05, choice: callable = None, factor: float = 0.5):
        super().__init__(params, {"lr": lr, "count": torch.zeros((), dtype=torch.int64)})
        self.factor = factor
        self.register_state_dict_post_hook(self._store)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _store(self, state):
        state["nested"] = {"schedule": pickle.dumps(self.factor)}

    @staticmethod
    def _load(self, state):
        self.factor = pickle.loads(state["nested"]["schedule"])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                state = self.state[param].setdefault(0, {"seen": set(), "averages": [torch.zeros(param.shape)]})
                state["seen"].add(int(group["count"]))
                (average,) = state["averages"]
                average.lerp_(param.grad.float(), self.factor / len(state["seen"]))
                param -= group["lr"] * average.to(param.dtype)
"""
CONFIG = """
imports: [{imports}]
model: {{name: mlp, hidden: [4], in_features: 4, out_features: 3}}
data: {{name: arrays, path: data.npz}}
optimizer: {{name: {name}, lr: 0.1, {more}}}
training: {{epochs: 1, device: cpu}}
"""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def trained(optimizer, **config):
    made = Trainer(
        model(), (X, Y), config={"epochs": 1, "batch_size": 4, **config}, optimizer=optimizer, progress=False
    )
    made.train()
    return made


def test_a_class_of_torch_by_its_path_is_that_class():
    named, given = (
        trained({"name": "torch.optim.Adamax", "lr": 0.05}),
        trained(lambda params: torch.optim.Adamax(params, lr=0.05)),
    )
    assert type(named.optimizer) is torch.optim.Adamax
    for one, other in zip(named.model.parameters(), given.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rates_of_training_are_given_to_classes_that_take_them():
    made = trained("torch.optim.Adamax", learning_rate=0.03, weight_decay=0.2)
    assert [(group["lr"], group["weight_decay"]) for group in made.optimizer.param_groups] == [(0.03, 0.2)]
    assert trained("torch.optim.Rprop", learning_rate=0.03).optimizer.param_groups[0]["lr"] == 0.03
    with pytest.raises(ConfigError, match=r"training\.weight_decay"):
        trained("torch.optim.Rprop", weight_decay=0.2)


def test_any_class_has_groups_layer_wise_rates_and_decay_of_matrices_only():
    how = {"weight_decay": 0.1, "layer_decay": 0.5, "decay_only_matrices": True, "lr": 0.1}
    groups = trained({"name": "torch.optim.Adamax", **how}).optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (0.1, 0.1),
        (0.1, 0.0),
        (0.05, 0.1),
        (0.05, 0.0),
    ]
    with pytest.raises(ConfigError, match=r"groups\.0\.lrr is not a setting"):
        trained({"name": "torch.optim.Adamax", "groups": [{"params": "0", "lrr": 1.0}]})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("torch.optim.Adamex", "did you mean 'Adamax'"),
        ("nowhere.Adam", "nowhere is not imported; add it to `imports:`"),
        ("os.system", "is not a class that derives from torch.optim.Optimizer"),
        ("subprocess.Popen", "is not a class that derives"),
        ({"name": "torch.optim.Adamax", "weightdecay": 0.1}, "did you mean 'weight_decay'"),
        ({"name": "torch.optim.Adamax", "lr": "fast"}, "optimizer.lr"),
        ({"name": "torch.optim.Rprop", "decay_only_matrices": True}, "has no weight_decay"),
        ({"name": "torch.optim.Adamax", "lr": -1.0}, "Invalid learning rate"),
        ({"name": "torch.optim.AdamW", "foreach": True, "fused": True}, "foreach"),
        ({"name": "torch.optim.AdamW", "differentiable": True}, "differentiable"),
        ({"name": "torch.optim.AdamW", "capturable": True}, "capturable"),
    ],
)
def test_mistakes_are_one_line(section, words):
    with pytest.raises(ConfigError, match=words) as found:
        trained(section, device="cpu")
    assert len(str(found.value).splitlines()) == 1


def test_a_class_that_takes_any_name_still_refuses_misspelt_ones(monkeypatch):
    module = types.ModuleType("own_optimizers")
    exec(CODE, vars(module))
    monkeypatch.setitem(sys.modules, "own_optimizers", module)
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match="did you mean 'power'"):
        build_component(
            "optimizer", {"name": "own_optimizers.Plain", "lr": 1.0, "powr": 2.0}, provided={"params": params}
        )
    with pytest.raises(ConfigError, match="lr"):
        build_component("optimizer", "own_optimizers.Plain", provided={"params": params})


def test_a_class_that_its_package_imports_late_is_found(monkeypatch):
    """As those of transformers."""
    module = types.ModuleType("late_optimizers")
    module.__getattr__ = {"Late": torch.optim.Adamax}.__getitem__  # raises a KeyError for others
    monkeypatch.setitem(sys.modules, "late_optimizers", module)
    assert type(trained("late_optimizers.Late").optimizer) is torch.optim.Adamax
    with pytest.raises(ConfigError, match="does not exist"):
        trained("late_optimizers.Later")


def test_a_config_runs_only_the_code_that_it_imports(tmp_path):
    (tmp_path / "my_own_steps.py").write_text(CODE)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(imports="", name="my_own_steps.Plain", more=""))
    with pytest.raises(ConfigError, match="my_own_steps is not imported"):
        load_config(path)
    path.write_text(CONFIG.format(imports="./my_own_steps.py", name="my_own_steps.Plain", more="power: 0.5"))
    config = load_config(path)
    assert config.to_dict()["optimizer"] == {
        "name": "my_own_steps.Plain",
        "lr": 0.1,
        "power": 0.5,
        "groups": [],
        "layer_decay": None,
        "decay_only_matrices": False,
    }
    check_experiment(config)


def test_editors_accept_paths():
    known = experiment_schema()["$defs"]["section.optimizer"]["then"]
    assert known["anyOf"][1] == {"pattern": r"\."}


@pytest.fixture
def nested(monkeypatch):
    module = types.ModuleType("nested_optimizers")
    exec(NESTED, vars(module))
    monkeypatch.setitem(sys.modules, "nested_optimizers", module)


def with_nested(folder=None, *, resume=False, dtype=torch.float32, bad=(), **config):
    x = X.clone()
    x[list(bad)] = float("nan")
    section = {"name": "nested_optimizers.Nested", **config.pop("optimizer", {})}
    settings = {"epochs": 3, "batch_size": 2, "grad_accum_steps": 2, "gradient_clip_norm": 0.05, "device": "cpu"}
    made = Trainer(
        model().to(dtype),
        (x.to(dtype), Y),
        config={**settings, **config},
        optimizer=section,
        output_dir=folder,
        progress=False,
    )
    if resume:
        made.load_checkpoint(folder)
    made.train()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [(), (9,)])
def test_a_class_with_nested_state_sets_and_bytes_is_resumed_with_the_same_bytes(nested, tmp_path, dtype, bad):
    whole = with_nested(dtype=dtype, bad=bad)
    with_nested(tmp_path, dtype=dtype, bad=bad, max_steps=6)
    again = with_nested(tmp_path, resume=True, dtype=dtype, bad=bad)
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    states = [[*made.optimizer.state.values()] for made in (again, whole)]
    for one, other in zip(*states, strict=True):
        assert one[0]["seen"] == other[0]["seen"]
        assert one[0]["averages"][0].dtype == torch.float32
        assert torch.equal(one[0]["averages"][0], other[0]["averages"][0])
    assert max(states[1][0][0]["seen"]) == (9 if bad else 12)  # a skipped step is not counted


def test_bytes_of_an_optimizer_are_not_saved_and_must_be_those_of_the_saved_run(nested, tmp_path):
    with_nested(tmp_path, max_steps=3)
    assert b"pickle" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
    with pytest.raises(CheckpointError, match=r"optimizer\.other\.nested\.schedule") as found:
        with_nested(tmp_path, resume=True, optimizer={"factor": 0.25})
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("setting", [{"betas": 0.9}, {"lr": "high"}, {"maximize": "no"}])
def test_a_setting_of_a_group_has_the_type_of_its_argument(setting):
    section = {"name": "torch.optim.Adamax", "groups": [{"params": "0", **setting}]}
    with pytest.raises(ConfigError, match=f"optimizer.groups.0.{next(iter(setting))}: expected"):
        Trainer(nn.Sequential(nn.Linear(4, 3)), (X, Y), optimizer=section)
