"""Several tasks at once: which batch is for which, sums over each task's own labels, one pass."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from three_tasks import NAN, by_hand, gradients, language_model, make_batch, make_model, specs
from torch import nn

from etude.core.batch import DataBatch, JointBatch
from etude.losses import BinaryLoss, ClassificationLoss, LanguageModelingLoss, MultiLabelLoss
from etude.multitask import MultiTask, TaskSpec
from etude.multitask.spec import strategy_of
from etude.multitask.weighting import DynamicWeightAverage, GradNorm, PCGrad, StaticWeights, UncertaintyWeighting


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.sampled_from([0.0, 0.4, 0.9]))
def test_each_loss_is_a_sum_over_the_labels_of_its_own_task(seed, samples, missing):
    model, task, batch = make_model(), MultiTask(specs()), make_batch(samples, seed, missing)
    terms = task(model, batch, metrics=False)
    assert list(terms) == ["kind/loss", "flags/loss", "belongs/loss"]
    assert len(model.trunk.calls) == 1
    ahead = task.counts(batch)
    for name, (total, count) in by_hand(model, batch).items():
        term = terms[f"{name}/loss"]
        assert int(term.count) == int(ahead[f"{name}/loss"]) == count
        torch.testing.assert_close(term.sum, total, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(gradients(model, term.sum), gradients(model, total), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    assert [terms[f"{name}/loss"].weight for name in task.tasks] == [1.0, 0.5, 2.0]


def all_losses():
    """Every loss that a task may have, with a batch without a single label of it."""
    x, ids = torch.randn(4, 4, dtype=torch.float64), torch.randint(9, (4, 6))
    nothing = torch.full((4,), -100)
    return {
        "cross_entropy": ("kind", ClassificationLoss(), {"input": x, "y": nothing}),
        "class_weights": ("kind", ClassificationLoss(class_weights=[1.0, 2.0, 3.0]), {"input": x, "y": nothing}),
        "smoothed": ("kind", ClassificationLoss(label_smoothing=0.1), {"input": x, "y": nothing}),
        "torch": ("kind", nn.CrossEntropyLoss(), {"input": x, "y": nothing}),
        "inferred": ("kind", None, {"input": x, "y": nothing}),
        "multi_label": ("flags", MultiLabelLoss(), {"input": x, "y": torch.full((4, 2), NAN)}),
        "label_weights": (
            "flags",
            MultiLabelLoss(label_weights=[1.0, 0.5]),
            {"input": x, "y": torch.full((4, 2), NAN)},
        ),
        "integer labels": ("flags", MultiLabelLoss(), {"input": x, "y": torch.full((4, 2), -100)}),
        "binary": ("belongs", BinaryLoss(pos_weight=3.0), {"input": x, "y": torch.full((4,), NAN)}),
        "language": ("code", LanguageModelingLoss(shift=False), {"input_ids": ids, "y": torch.full((4, 6), -100)}),
    }


@pytest.mark.parametrize("name", all_losses())
def test_a_task_without_any_labels_has_count_0_gradient_0_and_no_nan(name):
    head, loss, batch = all_losses()[name]
    model = language_model() if head == "code" else make_model()
    terms = MultiTask({"t": TaskSpec(head, loss, labels="y")})(model, batch, metrics=True)
    for term in terms.values():
        assert term.sum.item() == 0
        assert float(term.count) == 0
    assert terms["t/loss"].sum.requires_grad  # ranks that train together meet in its gradient
    assert all(gradient.eq(0).all() for gradient in gradients(model, terms["t/loss"].sum))


def test_labels_of_other_tasks_do_not_reach_a_loss():
    """`labels` of the batch are the language model's; a task with a key of its own must not see them."""
    model = language_model()
    ids = torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "quality": torch.tensor([0, -100, 2])}
    task = MultiTask(
        {
            "code": TaskSpec("code", LanguageModelingLoss(shift=False)),
            "quality": TaskSpec("quality", nn.CrossEntropyLoss(), labels="quality"),
        }
    )
    terms = task(model, batch, metrics=False)
    logits = model.trunk(ids)
    code = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(terms["code/loss"].sum, code)
    quality = model(batch, ["quality"])["quality"]
    torch.testing.assert_close(terms["quality/loss"].sum, F.cross_entropy(quality[[0, 2]], torch.tensor([0, 2])) * 2)
    assert int(terms["quality/loss"].count) == 2


def test_a_batch_is_for_the_tasks_of_its_stream_and_for_no_other_head():
    tasks = specs()
    streamed = {
        name: TaskSpec(s.head, s.loss, stream="ab"[name == "flags"], labels=name) for name, s in tasks.items()
    }
    task, model = MultiTask(streamed), make_model()
    assert task.streams() == {"a", "b"}
    assert list(task(model, make_batch(stream="b"), metrics=False)) == ["flags/loss"]
    assert model.head_calls == ["flags"]
    model.head_calls.clear()
    assert list(task(model, make_batch(stream="a"), metrics=False)) == ["kind/loss", "belongs/loss"]
    assert model.head_calls == ["kind", "belongs"]
    assert task(model, make_batch(stream="c"), metrics=False) == {}
    assert len(model.trunk.calls) == 2  # nothing was run for the last


def test_without_streams_a_batch_is_for_the_tasks_whose_labels_it_has():
    task, model, batch = MultiTask(specs()), make_model(), make_batch()
    del batch["kind"], batch["belongs"]
    assert list(task(model, batch, metrics=False)) == ["flags/loss"]
    assert list(task.counts(batch)) == task.weighted_terms(batch) == ["flags/loss"]
    assert task.streams() is None


def test_tasks_that_rest_are_never_run_and_variants_have_other_heads_labels_and_losses():
    simple = TaskSpec("kind:simple", nn.CrossEntropyLoss(), labels="simple")
    tasks = specs(kind=TaskSpec("kind", ClassificationLoss(), labels="kind", variants={"simple": simple}))
    task, model = MultiTask(tasks), make_model()
    batch = make_batch(simple=torch.tensor([0, 1] * 4))
    task.activate({"kind": 0.3})
    assert task.weights == {"kind": 0.3}
    assert list(task(model, batch, metrics=False)) == ["kind/loss"]
    assert model.head_calls == ["kind"]
    version = task.version
    task.activate({"kind": 1.0, "belongs": 0.1}, {"kind": "simple"})
    assert task.version != version
    terms = task(model, batch, metrics=False)
    assert model.head_calls == ["kind", "kind:simple", "belongs"]
    hidden = torch.tanh(model.trunk.layer(batch["input"]))
    expected = F.cross_entropy(model.heads["kind:simple"].layer(hidden), batch["simple"], reduction="sum")
    torch.testing.assert_close(terms["kind/loss"].sum, expected)
    assert terms["belongs/loss"].weight == 0.1
    task.activate({"kind": 1.0})  # without a variant it is itself again
    task(model, batch, metrics=False)
    assert model.head_calls[-1] == "kind"


def test_tasks_that_differ_in_causal_take_two_passes_in_one_call():
    tasks = specs(
        kind=TaskSpec("kind", ClassificationLoss(), labels="kind", causal=True),
        flags=TaskSpec("flags", MultiLabelLoss(), labels="flags", causal=False),
        size=TaskSpec("size", nn.MSELoss(), labels="size", causal=True),
    )
    task, model = MultiTask(tasks), make_model()
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(args))
    batch = make_batch(size=torch.randn(8, 1, dtype=torch.float64))
    terms = task(model, batch, metrics=False)
    assert len(calls) == 1  # data parallelism counts calls
    assert model.trunk.calls == [True, False, None]
    assert "causal" not in batch
    for name, (total, _) in by_hand(model, batch).items():
        torch.testing.assert_close(terms[f"{name}/loss"].sum, total)


@pytest.mark.parametrize("weighting", [None, UncertaintyWeighting(["kind", "flags", "belongs"]).double()])
def test_a_joint_batch_is_the_sum_over_its_parts(weighting):
    task, model = MultiTask(specs(), weighting), make_model(weighting)
    parts = [make_batch(8, 1, stream="a"), make_batch(5, 2, stream="b"), make_batch(3, 3, stream="c")]
    del parts[1]["kind"]
    joint = task(model, JointBatch(parts), metrics=True)
    alone = [task(model, part, metrics=True) for part in parts]
    assert set(joint) == set().union(*alone)
    for name, term in joint.items():
        mine = [terms[name] for terms in alone if name in terms]
        torch.testing.assert_close(term.sum, sum(one.sum for one in mine))
        torch.testing.assert_close(torch.as_tensor(term.count), torch.as_tensor(sum(one.count for one in mine)))
    counts = task.counts(JointBatch(parts))
    assert list(counts) == task.weighted_terms(JointBatch(parts))
    assert all(float(count) == float(joint[name].count) for name, count in counts.items())


def test_counts_ahead_are_those_of_the_terms_with_penalties():
    weighting = UncertaintyWeighting(["kind", "flags", "belongs"]).double()
    task, model, batch = MultiTask(specs(), weighting), make_model(weighting), make_batch()
    batch["kind"] = torch.full((8,), -100)
    terms, ahead = task(model, batch, metrics=False), task.counts(batch)
    assert list(terms) == list(ahead)
    assert {name: float(term.count) for name, term in terms.items()} == {n: float(c) for n, c in ahead.items()}
    assert terms["kind/penalty"].count.item() == terms["kind/penalty"].sum.item() == 0  # no labels: nothing to learn
    assert float(terms["flags/penalty"].count) == 1


def test_terms_of_weight_0_are_not_among_those_that_ranks_agree_on():
    task = MultiTask(specs())
    task.activate({"kind": 1.0, "flags": 0.0})
    assert task.weighted_terms(make_batch()) == ["kind/loss"]
    adapted = MultiTask(specs(), DynamicWeightAverage(["kind", "flags", "belongs"]))
    adapted.activate({"kind": 1.0, "flags": 0.0})
    assert adapted.weighted_terms(make_batch()) == ["kind/loss"]


def test_data_batches_and_plain_pairs_serve_a_task_without_a_key():
    task = MultiTask({"kind": TaskSpec("kind", ClassificationLoss())})
    x, y = make_batch(missing=0)["input"], make_batch(missing=0)["kind"]
    model = make_model()
    for batch in ((x, y), DataBatch(x, y), {"input": x, "labels": y}):
        term = task(model, batch, metrics=False)["kind/loss"]
        torch.testing.assert_close(term.sum, F.cross_entropy(model((x,), ["kind"])["kind"], y, reduction="sum"))


def test_static_weights_multiply_those_of_the_tasks():
    task = MultiTask(specs(), StaticWeights(["kind", "flags", "belongs"], {"flags": 4.0}))
    assert task.weights == {"kind": 1.0, "flags": 2.0, "belongs": 2.0}
    assert task.numbers() == {"kind/weight": 1.0, "flags/weight": 2.0, "belongs/weight": 2.0}
    means = {"kind/loss": 1.0, "flags/loss": 3.0, "other": 9.0}
    assert task.derived(means) == {}  # a sum without one of the tasks that are trained would look like progress
    task.activate({"kind": 0.1, "flags": 0.7})
    assert task.derived(means)["loss"] == 1.0 + 2.0 * 3.0  # ramps do not change what is compared over epochs


def test_derived_numbers_are_those_of_each_loss():
    task = MultiTask(
        {"code": TaskSpec("code", LanguageModelingLoss()), "tests": TaskSpec("code", LanguageModelingLoss())}
    )
    derived = task.derived({"code/loss": 2.0, "tests/loss": 0.5, "code/accuracy": 0.3})
    assert derived == pytest.approx(
        {"loss": 2.5, "code/perplexity": math.exp(2.0), "tests/perplexity": math.exp(0.5)}
    )


@pytest.mark.parametrize("kind", [UncertaintyWeighting, DynamicWeightAverage, GradNorm])
def test_weights_that_are_known_ahead_are_the_factors_of_the_terms(kind):
    weighting = kind(["kind", "flags", "belongs"]).double()
    for tensor in (*weighting.parameters(), *weighting.buffers()):
        tensor.data += torch.tensor([0.1, 0.7, 1.3], dtype=torch.float64)
    task = MultiTask(specs(), weighting)
    task.activate({"kind": 0.3, "belongs": 0.7})
    scale = torch.tensor([0.3, 0.0, 0.7], dtype=torch.float64)
    terms = task(make_model(weighting), make_batch(), metrics=False)
    expected = weighting.coefficients(torch.zeros(3, dtype=torch.float64), scale)
    torch.testing.assert_close(terms["kind/loss"].weight, expected[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(terms["belongs/loss"].weight, expected[2], rtol=1e-14, atol=0)
    assert "flags/loss" not in terms
    assert task.numbers() == {"kind/weight": expected[0].item(), "belongs/weight": expected[2].item()}


def test_vectors_of_weights_are_kept_for_every_device():
    task = MultiTask(specs(), PCGrad(["kind", "flags", "belongs"]))
    cpu, meta = (task.scale(torch.device(name)) for name in ("cpu", "meta"))
    assert task.scale(torch.device("cpu")) is cpu
    assert task.scale(torch.device("meta")) is meta
    task.activate({"flags": 0.25})
    assert task.scale(torch.device("cpu")).tolist() == [0.0, 0.25, 0.0]


def test_torch_losses_know_their_counts_ahead():
    """So tasks with them can be trained with gradient accumulation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator)
    classes, values = torch.tensor([0, 1, 2, -100, 1, 0]), torch.rand(6, 3, generator=generator)
    for loss, labels in (
        (nn.CrossEntropyLoss(), classes),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])), classes),
        (F.cross_entropy, classes),
        (nn.MSELoss(), values),
        (nn.HuberLoss(), values),
        (nn.BCEWithLogitsLoss(), values),
    ):
        task = MultiTask({"t": TaskSpec("kind", loss, labels="y")})
        batch = {"input": torch.zeros(6, 4, dtype=torch.float64), "y": labels}
        term = strategy_of(task.tasks["t"]).terms(x, {"labels": labels}, metrics=False)["loss"]
        assert float(task.counts(batch)["t/loss"]) == float(term.count)
