"""Lookahead and SAM by themselves: equal to hand-written loops in float64, around any optimizer, saved and loaded."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.config import build_component
from etude.core import CheckpointError, ConfigError, TrainingError
from etude.optim import SAM, SGD, AdamW, Lookahead, Optimizers, Perturbed, RMSprop
from etude.optim.groups import NamedParams, names_of
from etude.optim.several import optimizers_in, owner_of, perturbed_in
from etude.optim.wrappers import _move_if, _zero_unless

KINDS = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.05),
    "rmsprop": lambda params: RMSprop(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "groups": lambda params: SGD([{"params": params[:1], "lr": 0.2}, {"params": params[1:]}], lr=0.1, momentum=0.5),
    "several": lambda params: Optimizers([SGD(params[:2], lr=0.1), AdamW(params[2:], lr=0.05)]),
}


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def backward(model, step):
    data = torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    model.zero_grad()
    model(data).square().sum().backward()


def close(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def lookahead_by_hand(model, optimizer, steps, k, alpha):
    slow = [param.detach().clone() for param in model.parameters()]
    for step in steps:
        backward(model, step)
        optimizer.step()
        if (step + 1) % k == 0:
            with torch.no_grad():
                for old, param in zip(slow, model.parameters(), strict=True):
                    old += alpha * (param - old)
                    param.copy_(old)


def sam_by_hand(model, optimizer, steps, rho, adaptive=False):
    params = list(model.parameters())
    for step in steps:
        backward(model, step)
        scale = [param.detach().abs() if adaptive else torch.ones_like(param) for param in params]
        norm = sum((one * param.grad).square().sum() for one, param in zip(scale, params, strict=True)).sqrt()
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for one, param in zip(scale, params, strict=True):
                param += rho * one**2 * param.grad / norm
        backward(model, step)
        with torch.no_grad():
            for old, param in zip(before, params, strict=True):
                param.copy_(old)
        optimizer.step()


def train(model, optimizer, steps):
    """Train as a step does."""
    for step in steps:
        backward(model, step)
        if (inner := perturbed_in(optimizer)) is not None:
            inner.perturb()
            backward(model, step)
            inner.restore()
        optimizer.step()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_lookahead_is_the_published_loop_around_any_optimizer(make):
    one, two = net(), net()
    train(one, Lookahead(make([*one.parameters()]), k=3, alpha=0.4), range(8))
    lookahead_by_hand(two, make([*two.parameters()]), range(8), k=3, alpha=0.4)
    close(one, two)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_sam_is_the_published_loop_around_any_optimizer(make, adaptive):
    one, two = net(), net()
    train(one, SAM(make([*one.parameters()]), rho=0.3, adaptive=adaptive), range(5))
    sam_by_hand(two, make([*two.parameters()]), range(5), 0.3, adaptive)
    close(one, two)


@settings(deadline=None, max_examples=30)
@given(k=st.integers(1, 6), alpha=st.floats(0.01, 1.0), steps=st.integers(1, 9))
def test_lookahead_with_any_settings(k, alpha, steps):
    one, two = net(), net()
    train(one, Lookahead(SGD(one.parameters(), lr=0.1), k, alpha), range(steps))
    lookahead_by_hand(two, SGD(two.parameters(), lr=0.1), range(steps), k, alpha)
    close(one, two)


NESTED = {
    "lookahead": lambda inner: Lookahead(inner, k=2),
    "sam": SAM,
    "lookahead of sam": lambda inner: Lookahead(SAM(inner), k=2),
    "sam of lookahead": lambda inner: SAM(Lookahead(inner, k=2)),
}


@pytest.mark.parametrize("wrap", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_saved_and_loaded_between_any_two_steps(make, wrap):
    expected = net()
    train(expected, wrap(make([*expected.parameters()])), range(5))
    for stop in range(5):
        one, two = net(), net()
        optimizer, loaded = (wrap(make([*model.parameters()])) for model in (one, two))
        train(one, optimizer, range(stop))
        two.load_state_dict(one.state_dict())
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(two, loaded, range(stop, 5))
        assert all(itertools.starmap(torch.equal, zip(two.parameters(), expected.parameters(), strict=True)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("wrap", NESTED.values(), ids=NESTED)
def test_a_copy_continues_as_the_original_does(wrap, duplicate):
    expected, model = net(), net()
    train(expected, wrap(KINDS["several"]([*expected.parameters()])), range(5))
    optimizer = wrap(KINDS["several"]([*model.parameters()]))
    optimizer.register_step_pre_hook(lambda *_: None)  # torch leaves hooks out of copies
    for step in range(5):
        model, optimizer = duplicate((model, optimizer))
        train(model, optimizer, [step])
    assert all(itertools.starmap(torch.equal, zip(model.parameters(), expected.parameters(), strict=True)))


def test_a_count_that_gets_other_memory_goes_on_there():
    """As `share_memory_()` and `set_()` give it."""
    model = net()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1), k=100)
    train(model, optimizer, range(2))
    count = optimizer.state["lookahead"]["step"]
    count.data = torch.tensor(40)
    train(model, optimizer, range(2))
    assert count.item() == 42


def test_after_its_state_is_cleared_it_begins_again():
    one, two = net(), net()
    optimizer = Lookahead(SGD(one.parameters(), lr=0.1, momentum=0.9), k=2)
    train(one, optimizer, range(3))
    two.load_state_dict(one.state_dict())
    optimizer.state.clear()
    train(one, optimizer, range(5))
    lookahead_by_hand(two, SGD(two.parameters(), lr=0.1, momentum=0.9), range(5), k=2, alpha=0.5)
    close(one, two)


def test_both_orders_of_nesting_are_the_same():
    one, two = net(), net()
    train(one, NESTED["lookahead of sam"](AdamW(one.parameters())), range(5))
    train(two, NESTED["sam of lookahead"](AdamW(two.parameters())), range(5))
    close(one, two)


def test_a_parameter_whose_first_gradient_comes_late_starts_from_its_own_weights():
    model = net()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = Lookahead(AdamW([*model.parameters(), unused], lr=0.1, weight_decay=0.0), k=2, alpha=0.5)
    train(model, optimizer, range(3))
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))
    backward(model, 3)
    unused.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(unused.detach(), torch.full((2,), 0.95, dtype=torch.float64))  # half of 0.1


def test_a_parameter_that_is_frozen_between_two_moves_stays_as_it_is():
    one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = Lookahead(SGD([one, other], lr=0.25), k=2, alpha=0.5)
    for is_frozen in (False, True):
        other.requires_grad_(not is_frozen)
        one.grad, other.grad = torch.ones(1), None if is_frozen else torch.ones(1)
        optimizer.step()
    assert (one.item(), other.item()) == (0.75, 0.75)


def test_all_parameters_may_be_frozen():
    model = net()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1), k=2)
    train(model, optimizer, range(1))
    before = copy.deepcopy(model.state_dict())
    model.requires_grad_(False).zero_grad()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    _move_if(torch.tensor(True), [], [], 0.5)  # on a device


def test_a_state_loaded_by_the_wrapped_optimizer_is_used():
    weight = nn.Parameter(torch.ones(1))
    inner = SGD([weight], lr=0.25)
    optimizer = Lookahead(inner, k=2, alpha=0.5)
    for start in (1.0, 5.0):
        for _ in range(2):
            weight.grad = torch.ones(1)
            optimizer.step()
        assert weight.item() == start - 0.25
        saved = copy.deepcopy(inner.state_dict())
        saved["state"][0]["slow"].fill_(5.0)
        inner.load_state_dict(saved)
        weight.data.fill_(5.0)


def test_a_step_without_any_gradient_changes_nothing():
    weight = nn.Parameter(torch.ones(1))
    optimizer = Lookahead(SGD([weight], lr=0.1), k=1)
    optimizer.step()
    assert (weight.item(), len(optimizer.state)) == (1.0, 0)


def test_skipped_updates_are_not_counted():
    weight = nn.Parameter(torch.ones(1))
    optimizer = Lookahead(SGD([weight], lr=0.25), k=2, alpha=0.5)
    found = []
    for skipped in (0.0, 1.0, 0.0, 1.0, 0.0):
        weight.grad = torch.ones(1)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(skipped)
        optimizer.step()
        found.append(weight.item())
    assert found == [0.75, 0.75, 0.75, 0.75, 0.5]  # 1 → 0.75 → (0.5, halfway back: 0.75) → 0.5


@pytest.mark.parametrize("is_due", [True, False])
def test_what_a_device_decides_is_what_the_host_decides(is_due):
    slow, fast = [torch.randn(3)], [torch.randn(3)]
    expected = torch.lerp(slow[0], fast[0], 0.3)
    wanted = (expected, expected) if is_due else (slow[0].clone(), fast[0].clone())
    _move_if(torch.tensor(is_due), slow, fast, 0.3)
    assert torch.equal(slow[0], wanted[0])
    assert torch.equal(fast[0], wanted[1])
    _zero_unless(torch.tensor(is_due), slow)
    assert torch.equal(slow[0], wanted[0] if is_due else torch.zeros(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gradient_that_is_not_finite_moves_nothing(bad, adaptive):
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = SAM(SGD(model.parameters()), adaptive=adaptive)
    backward(model, 0)
    model[0].weight.grad[1, 1] = bad
    assert not optimizer.perturb().isfinite()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_to_the_bit(dtype):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size, dtype=dtype) * 1e3) for size in (7, 11)]
    before = [param.detach().clone() for param in params]
    optimizer = SAM(SGD(params), rho=100.0)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.perturb()
    assert not any(map(torch.equal, params, before))
    optimizer.restore()
    assert all(map(torch.equal, params, before))


def test_groups_and_rates_are_those_of_the_wrapped_optimizer():
    model = net()
    inner = KINDS["several"]([*model.parameters()])
    optimizer = Lookahead(SAM(inner))
    optimizer.param_groups[1]["lr"] = 0.7
    assert inner.optimizers[1].param_groups[0]["lr"] == 0.7
    assert optimizers_in(optimizer) == inner.optimizers
    assert owner_of(optimizer, 1) is inner.optimizers[1]


@pytest.mark.parametrize("wrap", NESTED.values(), ids=NESTED)
def test_hooks_of_a_wrapper_run_once(wrap):
    Optimizers([SGD([nn.Parameter(torch.ones(1))])])  # torch wraps the step of every class that has been made
    model, calls = net(), []
    optimizer = wrap(SGD(model.parameters()))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, range(1))
    assert calls == [1]


def test_any_optimizer_that_takes_its_gradient_elsewhere():
    """Extragradient: a plain step first, then one from the start with the gradient found there."""

    class Extragradient(Perturbed):
        def move(self, params, grads):
            torch._foreach_add_(params, grads, alpha=-0.5)
            return grads[0].sum()

    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Extragradient(SGD([weight], lr=0.5))
    for _ in range(2):
        optimizer.zero_grad()
        weight.square().sum().backward()
        if weight.item() == 1.0:
            optimizer.perturb()
    optimizer.restore()
    optimizer.step()
    assert weight.item() == 1.0  # the gradient at 1 - 0.5·2 = 0 is 0


def build(section):
    model = net()
    params = NamedParams(model.parameters(), names_of(model))
    return build_component("optimizer", section, provided={"params": params})


def test_built_from_sections():
    patterns = {"name": "several", "patterns": ["0.*", "*"], "optimizers": [{"name": "sgd", "lr": 0.3}, "adamw"]}
    made = build({"name": "lookahead", "k": 3, "optimizer": {"name": "sam", "rho": 0.2, "optimizer": patterns}})
    assert isinstance(made, Lookahead)
    assert (made.k, made.alpha, made.optimizer.rho, made.optimizer.adaptive) == (3, 0.5, 0.2, False)
    assert [type(one) for one in optimizers_in(made)] == [SGD, AdamW]
    assert made.param_groups[0]["lr"] == 0.3


SGD_SECTION = {"name": "sgd", "lr": 0.1}
MISTAKES = {
    "optimizer.rho": {"name": "sam", "optimizer": SGD_SECTION, "rho": 0.0},
    "optimizer.alpha": {"name": "lookahead", "optimizer": SGD_SECTION, "alpha": 1.5},
    "optimizer.k": {"name": "lookahead", "optimizer": SGD_SECTION, "k": 0},
    "did you mean 'rho'": {"name": "sam", "optimizer": SGD_SECTION, "rh": 0.1},
    "did you mean 'optimizer.optimizer.lr'": {"name": "sam", "optimizer": SGD_SECTION, "lr": 0.1},
    "optimizer.optimizer.lr": {"name": "sam", "optimizer": {"name": "sgd", "lr": -1}},
    "optimizer.optimizer": {"name": "sam"},
    "SAM is inside SAM": {"name": "sam", "optimizer": {"name": "sam", "optimizer": SGD_SECTION}},
    "Lookahead is inside Lookahead": {
        "name": "lookahead",
        "optimizer": {"name": "sam", "optimizer": {"name": "lookahead", "optimizer": SGD_SECTION}},
    },
    "optimizers inside SAM": {
        "name": "several",
        "patterns": ["0.*", "*"],
        "optimizers": [{"name": "sam", "optimizer": SGD_SECTION}, "adamw"],
    },
}


@pytest.mark.parametrize(("words", "section"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_in_a_section_is_one_line(words, section):
    with pytest.raises(ConfigError) as error:
        build(section)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("arguments", [{"rho": -0.1}, {"rho": 0}, {"rho": float("nan")}, {"rho": float("inf")}])
def test_a_radius_that_is_not_above_zero_is_refused(arguments):
    with pytest.raises(ConfigError, match="SAM: rho"):
        SAM(SGD(net().parameters()), **arguments)


@pytest.mark.parametrize("arguments", [{"k": 0}, {"k": -1}, {"k": 2.5}, {"alpha": 0.0}, {"alpha": 1.01}])
def test_settings_of_lookahead_outside_their_range_are_refused(arguments):
    with pytest.raises(ConfigError, match="Lookahead: "):
        Lookahead(SGD(net().parameters()), **arguments)


@pytest.mark.parametrize("inner", [SGD, "sgd", [1]])
def test_only_optimizers_are_wrapped(inner):
    for kind in (SAM, Lookahead):
        with pytest.raises(ConfigError, match=f"{kind.__name__} wraps an optimizer"):
            kind(inner)


def test_a_step_of_sam_without_a_second_gradient_is_refused():
    model = net()
    optimizer = Lookahead(SAM(SGD(model.parameters())))
    backward(model, 0)
    with pytest.raises(TrainingError, match="second gradient"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = SAM(SGD(table.parameters(), kernel="loop"))
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TrainingError, match="sparse=False"):
        optimizer.perturb()


def test_slow_weights_of_another_shape_are_refused():
    model = net()
    optimizer = Lookahead(AdamW(model.parameters()))
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["slow"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=r"\(2, 2\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", ["momentum", "adamw", "groups"])
def test_torchs_cycles_of_the_momentum_are_those_of_the_wrapped_optimizer(name):
    plain, wrapped = (KINDS[name]([*net().parameters()]) for _ in range(2))
    both = plain, Lookahead(SAM(wrapped))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=5) for one in both]
    for _ in range(3):
        for scheduler in schedulers:
            scheduler.optimizer._opt_called = True  # no step is needed
            scheduler.step()
        for one, other in zip(plain.param_groups, wrapped.param_groups, strict=True):
            assert [one.get(key) for key in ("lr", "momentum", "betas")] == [
                other.get(key) for key in ("lr", "momentum", "betas")
            ]


def test_adaptive_sam_moves_complex_weights_along_the_gradient():
    weight = nn.Parameter(torch.tensor([3 + 4j, 1j]))
    weight.grad = torch.tensor([1 + 0j, 2 + 2j])
    norm = float((weight.detach().abs() * weight.grad.abs()).norm())
    wanted = weight.detach() + 0.5 * weight.detach().abs() ** 2 * weight.grad / norm
    SAM(SGD([weight], lr=0.1), rho=0.5, adaptive=True).perturb()
    torch.testing.assert_close(weight.detach(), wanted)
