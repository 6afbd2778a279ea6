"""The methods of torchjd as weightings: each against torchjd itself, over stops, and with tasks that have no part."""

import copy
import importlib
import inspect
import sys
from typing import Any

import pytest
import task_parts as parts
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from etude.config.registry import lookup, names
from etude.config.selection import component_model
from etude.core.errors import ConfigError, TrainingError
from etude.multitask.weighting import (
    FAMO,
    DynamicWeightAverage,
    ImpartialLosses,
    PCGrad,
    StaticWeights,
    TorchjdAggregator,
    TorchjdScalarizer,
    UncertaintyWeighting,
    Weighting,
)
from etude.multitask.weighting.torchjd_adapter import CLASSES, STATE

pytestmark = pytest.mark.filterwarnings("ignore:You are solving a parameterized problem")  # Nash-MTL's, by cvxpy
torchjd = pytest.importorskip("torchjd")
aggregation = importlib.import_module("torchjd.aggregation")
scalarization = importlib.import_module("torchjd.scalarization")

TASKS = ["a", "b", "c", "d"]
VECTOR = {"a": 0.5, "b": 2.0, "c": 1.0, "d": 0.25}
SETTINGS: dict[str, dict[str, Any]] = {
    "cagrad": {"c": 0.5},
    "cosmos": {"lambda_": 1.0, "weights": VECTOR},
    "fairgrad": {"alpha": 1.0},
    "krum": {"n_byzantine": 0},
    "pbi": {"theta": 1.0, "weights": VECTOR},
    "stch": {"mu": 0.5, "weights": VECTOR},
    "trimmed_mean": {"trim_number": 1},
    "upgrad": {"pref_vector": VECTOR},
}
OWN = {
    "Constant": "static",
    "DWA": "dwa",
    "FAMO": "famo",
    "IMTLL": "imtl_l",
    "PCGrad": "pcgrad",
    "Sum": "static",
    "UW": "uncertainty",
}
"""Methods of torchjd that we have ourselves."""
SCALARIZERS = [name for name, path in CLASSES.items() if path.startswith("scalarization")]
AGGREGATORS = [name for name in CLASSES if name not in SCALARIZERS and name != "excess_mtl"]
DRAWS = ["graddrop", "gradvac", "random"]


def class_of(name: str) -> Any:
    module, _, kind = CLASSES[name].partition(".")
    return getattr({"aggregation": aggregation, "scalarization": scalarization}[module], kind)


def make(name: str, tasks: list[str] = TASKS, **others: Any) -> Any:
    given = SETTINGS.get(name, {}) | others
    chosen = {
        key: {task: value[task] for task in tasks} if isinstance(value, dict) else value
        for key, value in given.items()
    }
    try:
        made = lookup("weighting", name).factory(tasks=tasks, **chosen)
    except ConfigError as error:
        if "requires" in str(error):
            pytest.skip(str(error))
        raise
    assert isinstance(made, TorchjdAggregator | TorchjdScalarizer)
    return made.double()


def original(name: str) -> Any:
    """Return the method as torchjd makes it."""
    tensors = {
        key: torch.tensor([value[task] for task in TASKS], dtype=torch.float64) if isinstance(value, dict) else value
        for key, value in SETTINGS.get(name, {}).items()
    }
    counted = {"n_tasks": len(TASKS)} if name == "nash_mtl" else {}
    return class_of(name)(**tensors, **counted)


def rows_of(step: int, number: int = 4) -> Tensor:
    return torch.randn(number, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def losses_of(step: int) -> Tensor:
    return rows_of(step)[:, 0].abs() + 0.1


def test_every_method_of_torchjd_has_a_name() -> None:
    """A new version may bring another: this test says which."""
    found = {
        kind.__name__
        for module in (aggregation, scalarization)
        for kind in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(kind)
        and issubclass(kind, (aggregation.Aggregator, scalarization.Scalarizer))
        and not inspect.isabstract(kind)
        and kind not in (aggregation.WeightedAggregator, aggregation.GramianWeightedAggregator)
    }
    assert found == {path.partition(".")[2] for path in CLASSES.values()} | OWN.keys()
    assert set(CLASSES) | set(OWN.values()) <= set(names("weighting"))


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name not in DRAWS])
def test_an_aggregator_is_that_of_torchjd(name: str) -> None:
    weighting, reference = make(name), original(name)
    for step in range(4):
        rows = rows_of(step)
        torch.testing.assert_close(weighting.combine(rows, step=step), reference(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_a_function_of_seed_and_step(name: str) -> None:
    """Nothing is drawn from the generators of the run, and nothing is taken from them."""
    rows = rows_of(0) - rows_of(0).mean(0)  # in conflict, so that an order matters
    one, same, other = make(name), make(name), make(name, seed=1)
    found = []
    for step in range(6):
        torch.manual_seed(step)
        before = torch.get_rng_state()
        first = one.combine(rows, step=step)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(77)
        assert torch.equal(first, same.combine(rows, step=step))
        found.append((first, other.combine(rows, step=step)))
    assert any(not torch.equal(first, found[0][0]) for first, _ in found)
    assert any(not torch.equal(first, second) for first, second in found)


@pytest.mark.parametrize("name", SCALARIZERS)
def test_the_gradient_of_a_scalarizer_is_that_of_torchjd(name: str) -> None:
    weighting, reference = make(name), original(name)
    for step in range(4):
        inputs = losses_of(step).requires_grad_()
        (expected,) = torch.autograd.grad(reference(inputs.square()), inputs)
        again = losses_of(step).requires_grad_()
        (found,) = torch.autograd.grad(weighting(again.square()), again)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(weighting.latest(torch.ones(4)), weighting.coefficients(again.square()))


@pytest.mark.parametrize("name", [*AGGREGATORS, *SCALARIZERS])
@pytest.mark.parametrize("stop", [1, 5])
def test_resuming_gives_the_same_bytes(name: str, stop: int) -> None:
    """Some tasks have no part in some of the steps, where the method can do without them."""

    def drive(weighting: Any, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            scale = torch.ones(4, dtype=torch.float64)
            if step % 3 == 2 and name not in ("pcd", "krum"):
                scale[step % 4] = 0.0
            if name in SCALARIZERS:
                found.append(weighting.coefficients(losses_of(step), scale))
            else:
                found.append(weighting.combine(rows_of(step), step=step, scale=scale))
        return found

    whole = drive(make(name), range(8))
    first, second = make(name), make(name)
    head = drive(first, range(stop))
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    resumed = head + drive(second, range(stop, 8))
    assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name not in ("pcd", "nash_mtl")])
@given(seed=st.integers(0, 1000), absent=st.integers(0, 3), factor=st.floats(0.5, 2.0))
def test_a_task_without_a_part_changes_nothing_for_the_others(
    name: str, seed: int, absent: int, factor: float
) -> None:
    """The result is that of a weighting of the other tasks alone, even if the absent gradient is NaN."""
    others = [place for place in range(4) if place != absent]
    weighting, without = make(name), make(name, [TASKS[place] for place in others])
    for step in range(3):
        rows = rows_of(seed + step)
        rows[absent] = torch.nan
        scale = torch.full((4,), factor, dtype=torch.float64)
        scale[absent] = 0.0
        expected = without.combine(rows[others], step=step, scale=scale[others])
        torch.testing.assert_close(weighting.combine(rows, step=step, scale=scale), expected)


def test_nash_mtl_leaves_tasks_without_a_part_out() -> None:
    weighting, without = make("nash_mtl"), make("nash_mtl", TASKS[:3])
    scale = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    for step in range(3):
        found = weighting.combine(rows_of(step), step=step, scale=scale)
        torch.testing.assert_close(found, without.combine(rows_of(step)[:3], step=step), rtol=1e-4, atol=1e-5)
    assert weighting.prvs_alpha[3] == 1.0


@pytest.mark.parametrize("name", SCALARIZERS)
def test_a_loss_without_a_part_changes_nothing_for_the_others(name: str) -> None:
    weighting, without = make(name), make(name, TASKS[:3])
    scale = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    losses = losses_of(3)
    losses[3] = torch.nan
    found = weighting.coefficients(losses, scale)
    torch.testing.assert_close(found[:3], without.coefficients(losses[:3], scale[:3]))
    assert found[3] == 0
    assert weighting.latest(scale)[3] == 0


@pytest.mark.parametrize("name", AGGREGATORS)
def test_without_any_task_there_is_no_gradient(name: str) -> None:
    assert not make(name).combine(rows_of(0), step=0, scale=torch.zeros(4, dtype=torch.float64)).any()


@pytest.mark.parametrize(
    ("name", "words"), [("pcd", "all tasks"), ("krum", "3 of 4 tasks"), ("trimmed_mean", "1 of 4")]
)
def test_too_few_tasks_are_an_error_that_says_so(name: str, words: str) -> None:
    weighting = make(name, **({"n_byzantine": 1} if name == "krum" else {}))
    scale = torch.tensor([1.0, 0.0, 0.0, 0.0] if name == "trimmed_mean" else [1.0, 1.0, 1.0, 0.0])
    with pytest.raises(TrainingError, match=words):
        weighting.combine(rows_of(0), step=0, scale=scale.double())


def test_a_method_with_a_state_that_cannot_be_saved_is_refused() -> None:
    stateful = {name for name in CLASSES if issubclass(class_of(name), torchjd.Stateful)}
    assert stateful == {"excess_mtl", "gradvac", "nash_mtl", "pcd"}
    assert {class_of(name).__name__ for name in stateful - {"excess_mtl"}} == set(STATE)
    with pytest.raises(ConfigError, match=r"ExcessMTL.*state"):
        lookup("weighting", "excess_mtl").factory(tasks=TASKS)


def test_settings_are_the_arguments_of_torchjd() -> None:
    """Without `n_tasks`, which we know, and what no file can hold; vectors are mappings by task."""
    for name in CLASSES:
        model = component_model(lookup("weighting", name), ["tasks"])
        theirs = set(inspect.signature(class_of(name)).parameters) - {"n_tasks", "f", "projector"}
        assert set(model.model_fields) == theirs | {"tasks", "seed"}
        with pytest.raises(ValueError, match="unheard_of"):
            model.model_validate({**SETTINGS.get(name, {}), "unheard_of": 1})
    stch = component_model(lookup("weighting", "stch"), ["tasks"])
    for wrong in ({}, {"mu": "large"}, {"mu": 0.1, "weights": [1, 2]}, {"mu": 0.1, "weights": {"a": "much"}}):
        with pytest.raises(ValueError, match=r"mu|weights"):
            stch.model_validate(wrong)
    aligned = component_model(lookup("weighting", "aligned_mtl"), ["tasks"])
    with pytest.raises(ValueError, match="scale_mode"):
        aligned.model_validate({"scale_mode": "largest"})


@pytest.mark.parametrize(
    ("name", "given_settings", "words"),
    [
        ("stch", {"mu": 0.1, "weights": {"a": 1.0}}, "weights.*'b'"),
        ("stch", {"mu": 0.1, "weights": {**VECTOR, "e": 1.0}}, "weights.*'e'"),
        ("aligned_mtl", {"pref_vector": {**VECTOR, "d": float("nan")}}, "pref_vector.*d is nan"),
    ],
)
def test_vectors_have_a_number_for_each_task(name: str, given_settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lookup("weighting", name).factory(tasks=TASKS, **given_settings)


def test_without_torchjd_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "torchjd"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torchjd", None)
    factory = lookup("weighting", "mgda").factory
    assert "settings" in inspect.signature(factory).parameters
    with pytest.raises(ConfigError, match=r"etude\[torchjd\]") as raised:
        factory(tasks=TASKS, max_iters=3)
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------------ in a step

IN_A_STEP = [("mgda", {}), ("aligned_mtl", {"scale_mode": "rmse"}), ("stch", {"mu": 0.5}), ("geometric_mean", {})]


@pytest.mark.parametrize(("name", "given_settings"), IN_A_STEP)
@pytest.mark.parametrize("sizes", [(12,), (5, 3, 4)])
@pytest.mark.parametrize("missing", [0.3, 2.0], ids=["all tasks", "without labels of some"])
def test_a_step_is_the_method_of_torchjd_on_the_whole_batch(
    name: str, given_settings: dict[str, Any], sizes: tuple[int, ...], missing: float
) -> None:
    """Micro-batches are one batch, and a task without labels is left out, even of the heads."""
    weighting = lookup("weighting", name).factory(tasks=parts.TASKS, **given_settings)
    model = parts.make_model(weighting)
    twin = copy.deepcopy(model)
    step = parts.make_step(model, parts.make_task(weighting), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = parts.make_batch(12, 3, missing=missing)
    step(parts.cut(batch, *sizes))

    sums = {
        task: parts.LOSSES[task](twin.heads[task].layer(twin.trunk(batch["input"])), batch[task])
        for task in parts.TASKS
    }
    losses = {task: total / count for task, (total, count) in sums.items() if count > 0}
    assert len(losses) == (3 if missing < 1 else 1)
    values, weights = torch.stack(list(losses.values())), torch.tensor([parts.WEIGHTS[task] for task in losses])
    trunk, method = list(twin.trunk.parameters()), class_of(name)(**given_settings)
    if name in SCALARIZERS:
        inputs = values.detach().requires_grad_()
        factors = torch.autograd.grad(method(inputs), inputs)[0] * weights
        (factors * values).sum().backward()
    else:
        rows = [
            torch.autograd.grad(weight * loss, trunk, retain_graph=True)
            for weight, loss in zip(weights, values, strict=True)
        ]
        merged = method(torch.stack([torch.cat([one.flatten() for one in row]) for row in rows]))
        (weights * values).sum().backward()
        for param, part in zip(trunk, merged.split([param.numel() for param in trunk]), strict=True):
            param.grad = part.view_as(param)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for (key, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=key)


# ------------------------------------------------------------------------------------------------ our own


def step_of_torchjd(scalarizer: Any, losses: Tensor) -> Tensor:
    inputs = losses.clone().requires_grad_()
    return torch.autograd.grad(scalarizer(inputs), inputs)[0]


def test_pcgrad_of_two_tasks_is_that_of_torchjd() -> None:
    for seed in range(10):
        rows = rows_of(seed, 2)
        torch.testing.assert_close(PCGrad(["a", "b"]).combine(rows, step=seed), aggregation.PCGrad()(rows))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(UncertaintyWeighting(TASKS, regression=TASKS), "UW"), (ImpartialLosses(TASKS), "IMTLL")],
)
def test_learned_weights_follow_those_of_torchjd(ours: Weighting, theirs: str) -> None:
    ours, reference = ours.double(), getattr(scalarization, theirs)(4).double()
    pairs = [(weighting, list(weighting.parameters())) for weighting in (ours, reference)]
    for step in range(5):
        results = [weighting(losses_of(step)) for weighting, _ in pairs]
        torch.testing.assert_close(*results)
        for result, (_, params) in zip(results, pairs, strict=True):
            for param, gradient in zip(params, torch.autograd.grad(result, params), strict=True):
                param.data -= 0.1 * gradient
    torch.testing.assert_close(pairs[0][1][0], pairs[1][1][0])


def test_static_weights_are_those_of_torchjd() -> None:
    weights = torch.tensor(list(VECTOR.values()), dtype=torch.float64)
    for ours, reference in (
        (StaticWeights(TASKS, VECTOR), scalarization.Constant(weights)),
        (StaticWeights(TASKS), scalarization.Sum()),
    ):
        torch.testing.assert_close(ours.double()(losses_of(0)), reference(losses_of(0)))


def test_dwa_is_that_of_torchjd() -> None:
    ours, reference = DynamicWeightAverage(TASKS, temperature=1.5).double(), scalarization.DWA(1.5)
    for epoch in range(5):
        found = torch.stack([losses_of(10 * epoch + step) for step in range(3)])
        for losses in found:
            torch.testing.assert_close(ours.coefficients(losses), step_of_torchjd(reference, losses))
        ours.end_epoch(found.mean(0))
        reference.step()


def test_famo_is_that_of_torchjd() -> None:
    ours, reference = FAMO(TASKS, decay=0.001).double(), scalarization.FAMO(4, weight_decay=0.001).double()
    for step in range(8):
        before, after = losses_of(step), losses_of(step + 50)
        torch.testing.assert_close(ours.coefficients(before), step_of_torchjd(reference, before))
        ours.after_update(before, after)
        reference.update(after)
