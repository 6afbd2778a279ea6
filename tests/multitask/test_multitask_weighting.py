"""Weightings of several losses, each against its formula written plainly in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from etude.config.registry import lookup, names
from etude.config.selection import component_model
from etude.core.errors import ConfigError
from etude.multitask.weighting import (
    FAMO,
    DynamicWeightAverage,
    GradNorm,
    PCGrad,
    StaticWeights,
    UncertaintyWeighting,
    Weighting,
    assign_gradients,
)

TASKS = ["a", "b", "c"]
ALL = ["dwa", "famo", "gradnorm", "imtl_l", "pcgrad", "static", "uncertainty"]


def task_gradients(losses: Tensor, parameter: Tensor) -> Tensor:
    """Return each loss's gradient of a parameter: (tasks, elements)."""
    return torch.stack([torch.autograd.grad(loss, parameter, retain_graph=True)[0].flatten() for loss in losses])


def make(name: str) -> Weighting:
    weighting = lookup("weighting", name).factory(TASKS)
    assert isinstance(weighting, Weighting)
    return weighting.double()


def vectors(seed: int, rows: int = 1, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, width, generator=generator, dtype=torch.float64) + 0.2


def drive(weighting: Weighting, steps: range, scale: Tensor | None = None) -> list[Tensor]:
    """Give a weighting everything it asks for and return its objectives."""
    objectives = []
    for step in steps:
        losses, after, rows = vectors(step)[0], vectors(step + 500)[0], vectors(step + 900, 3, 5) - 0.7
        objectives.append(weighting(losses, scale).detach().clone())
        if weighting.needs == "layer_gradients":
            weighting.observe(losses, rows, scale)
        if weighting.needs == "gradients":
            objectives.append(weighting.combine(rows, step=step, scale=scale))
        if weighting.needs == "updates":
            weighting.after_update(losses, after, scale)
        if step % 2:
            weighting.end_epoch(losses, scale)
        for parameter in weighting.parameters():
            (gradient,) = torch.autograd.grad(weighting(losses, scale), parameter)
            parameter.data -= 0.1 * gradient
    return objectives


def test_all_ways_are_registered() -> None:
    assert set(ALL) <= set(names("weighting"))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resuming_gives_the_same_objectives(name: str, stop: int) -> None:
    whole = drive(make(name), range(10))
    first, second = make(name), make(name)
    head = drive(first, range(stop))
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    assert all(isinstance(value, Tensor) for value in first.state_dict().values())
    resumed = head + drive(second, range(stop, 10))
    assert len(resumed) == len(whole)
    assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_task_of_scale_zero_changes_nothing_whatever_its_loss(name: str) -> None:
    """The others are weighed as if it were not there, even if its loss is NaN; its own state stays as it was."""
    weighting, without = make(name), lookup("weighting", name).factory(TASKS[:2]).double()
    scale = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    before = {key: value.clone() for key, value in weighting.state_dict().items()}
    for step in range(4):
        losses = vectors(step)[0]
        losses[2] = torch.nan
        rows = vectors(step + 9, 3, 5)
        rows[2] = torch.nan
        torch.testing.assert_close(weighting(losses, scale), without(losses[:2]), rtol=1e-12, atol=0)
        if weighting.needs == "layer_gradients":
            weighting.observe(losses, rows, scale)
            without.observe(losses[:2], rows[:2])
        if weighting.needs == "gradients":
            # Two tasks meet each other only, so the order does not matter.
            torch.testing.assert_close(
                weighting.combine(rows, step=step, scale=scale), without.combine(rows[:2], step=step)
            )
        if weighting.needs == "updates":
            weighting.after_update(losses, 0.5 * losses, scale)
            without.after_update(losses[:2], 0.5 * losses[:2])
        weighting.end_epoch(losses, scale)
        without.end_epoch(losses[:2])
    for key, value in weighting.state_dict().items():
        assert torch.equal(value[2:], before[key][2:]), key
    assert torch.isfinite(weighting(torch.full((3,), torch.nan, dtype=torch.float64), torch.zeros(3).double()))


@pytest.mark.parametrize("name", ["dwa", "famo", "gradnorm"])
def test_a_task_that_pauses_goes_on_where_it_was(name: str) -> None:
    weighting = make(name)
    drive(weighting, range(6))
    before = {key: value.clone() for key, value in weighting.state_dict().items()}
    drive(weighting, range(6, 12), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    after = weighting.state_dict()
    assert all(torch.equal(after[key][2:], value[2:]) for key, value in before.items())
    assert not all(torch.equal(after[key][:2], value[:2]) for key, value in before.items())


class Waits(TorchDispatchMode):
    """Fails on operations that bring a number from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_read_on_the_host(name: str) -> None:
    weighting = make(name)
    with Waits():
        drive(weighting, range(3))
        drive(weighting, range(3), torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64))


def test_the_guard_notices_a_read() -> None:
    with Waits(), pytest.raises(AssertionError):
        torch.ones(()).item()


@pytest.mark.parametrize("name", ALL)
def test_scale_multiplies_the_coefficients(name: str) -> None:
    weighting, losses = make(name), vectors(3)[0]
    scale = torch.tensor([0.1, 1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(weighting.coefficients(losses, scale), scale * weighting.coefficients(losses))


def test_uncertainty_is_the_formula_and_so_are_its_gradients() -> None:
    weighting = UncertaintyWeighting(TASKS, regression=["a"], initial={"a": 0.4, "c": -1.0}).double()
    losses = vectors(0)[0].requires_grad_()
    sigma = torch.tensor([0.4, 0.0, -1.0], dtype=torch.float64).mul(0.5).exp()  # initial values pass through float32
    weighting(losses).backward()
    first, second, third = losses.detach().tolist()
    one, two, three = sigma.tolist()
    expected = first / (2 * one**2) + second / two**2 + third / three**2 + sigma.log().sum().item()
    assert weighting(losses).item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(
        losses.grad, torch.tensor([1 / (2 * one**2), 1 / two**2, 1 / three**2]).double(), rtol=1e-6, atol=0
    )
    # d/ds of (e^-s)/2·L + s/2, and of e^-s·L + s/2
    by_hand = [0.5 - first / (2 * one**2), 0.5 - second / two**2, 0.5 - third / three**2]
    assert weighting.log_variances.grad is not None
    assert weighting.log_variances.grad.tolist() == pytest.approx(by_hand, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), max_size=5), st.floats(0.5, 5))
def test_dwa_is_the_formula(epochs: list[list[float]], temperature: float) -> None:
    weighting = DynamicWeightAverage(TASKS, temperature).double()
    for epoch in epochs:
        weighting.end_epoch(torch.tensor(epoch, dtype=torch.float64))
    rates = [1.0] * 3 if len(epochs) < 2 else [a / b for a, b in zip(epochs[-1], epochs[-2], strict=True)]
    powers = torch.tensor(rates, dtype=torch.float64).div(temperature).sub(max(rates) / temperature).exp()
    torch.testing.assert_close(weighting.coefficients(torch.zeros(3).double()), 3 * powers / powers.sum())


def test_dwa_counts_the_epochs_of_each_task() -> None:
    weighting = DynamicWeightAverage(["a", "b"]).double()
    only_first = torch.tensor([1.0, 0.0]).double()
    for loss in (4.0, 2.0):
        weighting.end_epoch(torch.tensor([loss, 99.0]).double(), only_first)
    weighting.end_epoch(torch.tensor([1.0, 5.0]).double())
    rates = torch.tensor([0.5, 1.0]).double()  # one epoch of b: no rate yet
    torch.testing.assert_close(weighting.coefficients(rates), 2 * torch.softmax(rates / 2, 0))


def test_famo_is_the_formula_with_torchs_adam() -> None:
    """The objective of the paper, differentiated by autograd, and logits moved by torch.optim.Adam."""
    weighting = FAMO(TASKS, lr=0.05, decay=0.02, floor={"b": -1.0}).double()
    floor = torch.tensor([0.0, -1.0, 0.0]).double()
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.05, weight_decay=0.02)
    for step in range(20):
        before, after = vectors(step)[0].requires_grad_(), vectors(step + 77)[0]
        shares = torch.softmax(logits.detach(), 0)
        height = before - floor + 1e-8
        c = (shares / height).sum().detach()
        (expected,) = torch.autograd.grad((height.log() * shares / c).sum(), before)
        (found,) = torch.autograd.grad(weighting(before), before)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        fell = height.detach().log() - (after - floor + 1e-8).log()
        adam.zero_grad()
        (logits.softmax(0) * fell).sum().backward()
        adam.step()
        weighting.after_update(before.detach(), after)
        torch.testing.assert_close(weighting.logits, logits.detach(), rtol=1e-9, atol=1e-12)


def test_gradnorm_is_the_formula_with_torchs_adam() -> None:
    """Gradient norms of w·L through autograd, Σ|G − mean·rᵅ| differentiated by autograd, weights renormalised."""
    torch.manual_seed(0)
    shared, heads = nn.Linear(4, 5).double(), [nn.Linear(5, 1).double() for _ in TASKS]
    weighting = GradNorm(TASKS, alpha=0.7, lr=0.01).double()
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=0.01)
    first: Tensor | None = None
    for step in range(15):
        x = vectors(step, 8, 4)
        hidden = torch.tanh(shared(x))
        losses = torch.stack([(head(hidden) - 3**place).square().mean() for place, head in enumerate(heads)])
        first = losses.detach() if first is None else first
        norms = torch.stack(
            [
                torch.autograd.grad(weight * loss, shared.weight, create_graph=True)[0].norm()
                for weight, loss in zip(weights, losses, strict=True)
            ]
        )
        progress = losses.detach() / first
        target = (norms.mean() * (progress / progress.mean()) ** 0.7).detach()
        adam.zero_grad()
        weights.grad = torch.autograd.grad((norms - target).abs().sum(), weights, retain_graph=True)[0]
        adam.step()
        with torch.no_grad():
            weights *= 3 / weights.sum()
        weighting.observe(losses, task_gradients(losses, shared.weight))
        torch.testing.assert_close(weighting.weights, weights.detach(), rtol=1e-9, atol=0)
        with torch.no_grad():
            for parameter in (shared.weight, *(head.weight for head in heads)):
                parameter += 0.01 * torch.sin(parameter)
    assert (weighting.weights - 1).abs().max() > 0.05


def test_gradnorm_counts_from_the_given_losses() -> None:
    given, found = GradNorm(["a", "b"], initial={"a": 2.0}), GradNorm(["a", "b"])
    for weighting in (given, found):
        weighting.observe(torch.tensor([1.0, 3.0]), torch.ones(2, 4))
    assert given.first.tolist() == [2.0, 3.0]
    assert found.first.tolist() == [1.0, 3.0]


def plain_pcgrad(rows: Tensor, order: Tensor) -> Tensor:
    projected = rows.clone()
    for task, others in enumerate(order.tolist()):
        for other in others:
            dot = projected[task] @ rows[other]
            if dot < 0:
                projected[task] -= dot / (rows[other] @ rows[other]) * rows[other]
    return projected.sum(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_pcgrad_is_the_formula(seed: int, tasks: int, width: int, step: int) -> None:
    weighting = PCGrad([str(task) for task in range(tasks)], seed=seed)
    rows = torch.randn(tasks, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(weighting.combine(rows, step=step), plain_pcgrad(rows, weighting.order(step)))


def test_pcgrad_is_that_of_torchjd() -> None:
    """With two tasks there is only one order, so the seeds of the two need not agree."""
    aggregation = pytest.importorskip("torchjd.aggregation")
    for seed in range(10):
        rows = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(PCGrad(["a", "b"]).combine(rows, step=seed), aggregation.PCGrad()(rows))


def test_pcgrad_order_is_a_function_of_seed_and_step() -> None:
    weighting = PCGrad([str(task) for task in range(6)], seed=3)
    for step in range(20):
        order = weighting.order(step)
        assert torch.equal(order, PCGrad(weighting.tasks, seed=3).order(step))
        for task, others in enumerate(order.tolist()):
            assert sorted([task, *others]) == list(range(6))
    assert len({str(weighting.order(step).tolist()) for step in range(20)}) == 20
    assert not torch.equal(weighting.order(0), PCGrad(weighting.tasks, seed=4).order(0))


def test_pcgrad_leaves_gradients_without_conflict_and_zeros_alone() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    assert PCGrad(TASKS).combine(rows, step=0).tolist() == [2.0, 2.0]


def test_a_vector_becomes_the_gradients_of_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    assign_gradients(torch.arange(10.0), parameters)
    assert torch.equal(parameters[0].grad, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(parameters[1].grad, torch.arange(6.0, 10.0))


def test_assigned_gradients_have_the_layout_of_their_parameter():
    """Fused kernels read them so; on the CPU without a check."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=layout))
        assign_gradients(torch.arange(24.0), [weight])
        torch.optim.SGD([weight], lr=0.1, fused=True).step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: StaticWeights(TASKS, {"a": -1.0}), "the weight of task 'a' is -1.0"),
        (lambda: StaticWeights(TASKS, {"a": float("nan")}), "the weight of task 'a' is nan"),
        (lambda: StaticWeights(["code", "tests"], {"test": 1.0}), "names the task 'test'; did you mean 'tests'?"),
        (lambda: StaticWeights([]), "needs a list of tasks"),
        (lambda: StaticWeights(["a", "a"]), "'a' twice"),
        (lambda: UncertaintyWeighting(TASKS, regression=["depth"]), "regression names the task 'depth'"),
        (lambda: UncertaintyWeighting(TASKS, initial={"a": float("inf")}), "a is inf"),
        (lambda: DynamicWeightAverage(TASKS, temperature=0), "temperature is 0"),
        (lambda: GradNorm(TASKS, alpha=-1), "alpha is -1"),
        (lambda: GradNorm(TASKS, initial={"a": 0.0}), "the initial loss of task 'a' is 0.0"),
        (lambda: FAMO(TASKS, lr=float("nan")), "lr is nan"),
        (lambda: FAMO(TASKS, floor={"d": 0.0}), "floor names the task 'd'"),
        (lambda: StaticWeights(TASKS)(torch.ones(2)), r"losses have the shape \(2,\)"),
    ],
)
def test_mistakes_are_explained(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        build()
    assert "\n" not in str(raised.value)


def test_sections_are_checked_by_the_signatures() -> None:
    """The tasks come from whoever builds the weighting; everything else has a default and a type."""
    for name in ALL:
        model = component_model(lookup("weighting", name), frozenset({"tasks"}))
        assert "required" not in model.model_json_schema()
        model.model_validate({})
        with pytest.raises(ValueError, match="unheard_of"):
            model.model_validate({"unheard_of": 1})
    with pytest.raises(ValueError, match="temperature"):
        component_model(lookup("weighting", "dwa"), frozenset({"tasks"})).model_validate({"temperature": "hot"})
