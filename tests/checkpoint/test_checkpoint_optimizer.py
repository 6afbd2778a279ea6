"""Optimizer state goes by name and comes back exactly: stopping and continuing equals never stopping, byte for byte."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_same, raw
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from etude.checkpoint import CheckpointManager, pack, unpack
from etude.checkpoint.optimizer import load_optimizer_state, optimizer_state
from etude.checkpoint.optimizer_needs import check_state, needed_state
from etude.core import CheckpointError

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "sgd nesterov fused": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "adam amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adam, learning rate a tensor": lambda p: Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "rmsprop": lambda p: RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-2, lr_decay=1e-3),
    "nadam": lambda p: NAdam(p, lr=1e-2, momentum_decay=5e-3),
}


def build(name: str, device: str = "cpu") -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).to(device)
    model = model.to(memory_format=torch.channels_last)
    return model, OPTIMIZERS[name](model.parameters())


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(5, 2, 5, 5, generator=generator).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] = group["lr"] * 0.99


def assert_continues(name: str, root: Path, device: str) -> None:
    whole_model, whole_optimizer = build(name, device)
    train(whole_model, whole_optimizer, range(9))

    first_model, first_optimizer = build(name, device)
    train(first_model, first_optimizer, range(5))
    CheckpointManager(root).save_modules(5, model=first_model, optimizer=first_optimizer, extra={"step": 5})

    model, optimizer = build(name, device)
    train(model, optimizer, range(100, 102))  # anything left over from before has to go
    extra = CheckpointManager(root).load_into(model, optimizer)
    train(model, optimizer, range(extra["step"], 9))
    assert_same(dict(model.state_dict()), dict(whole_model.state_dict()))
    assert_same(optimizer_state(optimizer, model), optimizer_state(whole_optimizer, whole_model))
    for ours, theirs in zip(model.parameters(), whole_model.parameters(), strict=True):
        for key, value in whole_optimizer.state[theirs].items():
            if isinstance(value, Tensor):
                assert optimizer.state[ours][key].stride() == value.stride()
                if key == "step":  # torch itself moves other scalars (NAdam's) to the device of the parameter
                    assert optimizer.state[ours][key].device == value.device


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_continuing_equals_never_stopping(name: str, tmp_path: Path) -> None:
    assert_continues(name, tmp_path, "cpu")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "sgd" not in name and name != "adagrad"])
def test_steps_counted_on_a_gpu_continue_on_a_cpu(name: str) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    for group in optimizer.param_groups:
        group["capturable"] = True  # as a run on a GPU sets it
    tree = optimizer_state(optimizer, model)
    other = OPTIMIZERS[name](model.parameters())
    load_optimizer_state(other, model, tree)
    train(model, other, range(3, 5))
    assert {float(state["step"]) for state in other.state.values()} == {5.0}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_continuing_equals_never_stopping_on_a_gpu(name: str, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_continues(name, tmp_path, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)


def test_lbfgs_continues_too() -> None:
    def run(model: nn.Linear, optimizer: Optimizer, steps: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(3)) - 1).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)

    def fresh() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    whole, whole_optimizer = fresh()
    run(whole, whole_optimizer, 4)
    part, part_optimizer = fresh()
    run(part, part_optimizer, 2)
    model, optimizer = fresh()
    model.load_state_dict(part.state_dict())
    load_optimizer_state(optimizer, model, unpack(*pack(optimizer_state(part_optimizer, part))))
    run(model, optimizer, 2)
    assert raw(model.weight) == raw(whole.weight)


def test_state_is_by_name_and_survives_another_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = optimizer_state(optimizer, model)
    assert list(tree["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert tree["groups"][0]["settings"]["betas"] == (0.9, 0.999)
    reordered = AdamW(list(model.parameters())[::-1], lr=5.0)
    load_optimizer_state(reordered, model, tree)
    assert reordered.param_groups[0]["lr"] == 1e-3
    for parameter in model.parameters():
        assert_same(dict(reordered.state[parameter]), dict(optimizer.state[parameter]))


def test_groups_are_matched_by_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    optimizer = SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 7.0}], lr=1.0)
    swapped = SGD([{"params": biases[::-1]}, {"params": weights}], lr=0.5)
    load_optimizer_state(swapped, model, optimizer_state(optimizer, model))
    assert [(group["lr"], group["weight_decay"]) for group in swapped.param_groups] == [(7.0, 0), (1.0, 0.1)]
    assert swapped.param_groups[0]["params"][0] is model[1].bias


def test_training_on_does_not_change_the_loaded_tree() -> None:
    model, optimizer = build("adamw foreach")
    train(model, optimizer, range(2))
    tree = unpack(*pack(optimizer_state(optimizer, model)))
    tree = {**tree, "state": {n: {k: v.clone() for k, v in s.items()} for n, s in tree["state"].items()}}
    before = {name: {key: value.clone() for key, value in state.items()} for name, state in tree["state"].items()}
    load_optimizer_state(optimizer, model, tree)
    train(model, optimizer, range(2))
    assert_same(tree["state"], before)


def test_state_wider_than_the_parameter_keeps_its_type() -> None:
    class Precise(SGD):
        """Keeps a float32 copy of a bfloat16 parameter."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.detach().float().clone())
                    master -= group["lr"] * p.grad.float()
                    p.data.copy_(master)

    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = Precise(model.parameters(), lr=1e-4)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    fresh = Precise(model.parameters(), lr=1e-4)
    load_optimizer_state(fresh, model, optimizer_state(optimizer, model))
    for parameter in model.parameters():
        assert_same(dict(fresh.state[parameter]), dict(optimizer.state[parameter]))


def test_a_parameter_outside_the_model_goes_by_its_place() -> None:
    model, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = SGD([*model.parameters(), weight], lr=0.1, momentum=0.9)
    (model(torch.ones(1, 2)).sum() + weight.sum()).backward()
    optimizer.step()
    fresh = SGD([*model.parameters(), weight], lr=0.1, momentum=0.9)
    load_optimizer_state(fresh, model, optimizer_state(optimizer, model))
    assert torch.equal(fresh.state[weight]["momentum_buffer"], torch.ones(3))


def test_names_given_to_the_optimizer_itself_are_kept() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.named_parameters(), lr=0.1)
    reordered = SGD(list(model.named_parameters())[::-1], lr=0.2)
    load_optimizer_state(reordered, model, optimizer_state(optimizer, model))
    assert reordered.param_groups[0]["param_names"] == ["bias", "weight"]


def refused(optimizer: Optimizer, model: nn.Module, tree: dict[str, Any]) -> str:
    before = optimizer.state_dict()
    with pytest.raises(CheckpointError) as error:
        load_optimizer_state(optimizer, model, tree)
    assert_same(optimizer.state_dict(), before)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_refused_by_name() -> None:
    small, large, deep = nn.Linear(2, 2), nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2))
    tree = optimizer_state(SGD(small.parameters(), lr=0.1), small)
    assert "weight: checkpoint (2, 2), model (2, 3)" in refused(SGD(large.parameters(), lr=0.1), large, tree)
    message = refused(SGD(deep.parameters(), lr=0.1), deep, tree)
    assert "0.weight: not in the checkpoint" in message
    assert "weight: not in the optimizer" in message
    assert "the state of SGD, the optimizer is AdamW" in refused(AdamW(small.parameters()), small, tree)
    split = SGD([{"params": [small.weight]}, {"params": [small.bias]}], lr=0.1)
    assert "no saved group has exactly weight" in refused(split, small, tree)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 2), (1, 5), (2, 1, 3)], ids=str)
def test_what_an_optimizer_keeps_is_known_in_advance(shape: tuple[int, ...]) -> None:
    """Else a state of another shape would be loaded, and kernels write past its end."""
    made = [make for name, make in OPTIMIZERS.items() if "fused" not in name]
    made += [torch.optim.Adamax, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adafactor]
    for make in made:
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones_like(parameter)
        optimizer = make([parameter])
        optimizer.step()
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        needed = needed_state(optimizer, settings, parameter)
        assert needed is not None
        kept = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
        assert kept, optimizer
        check_state(kept, needed, "state")
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim():
                with pytest.raises(CheckpointError, match=rf"state\.{key}"):
                    check_state({**kept, key: value.unsqueeze(0)}, needed, "state")
