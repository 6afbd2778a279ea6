"""The gradient of micro-batches is that of the big batch: any terms in any micro-batch, in any order."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.core import ConfigError, LossTerm, Task, TrainingError
from etude.core.task import as_task
from etude.data import as_loader
from etude.engine.evaluation import evaluate
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater

NAMES = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 0.3, "c": torch.tensor(2.0, dtype=torch.float64)}


def head(out, name):
    return out[:, NAMES.index(name)].square()


class Patterned(Task):
    """A batch is (inputs, {term: mask}): the terms that it has, each over the samples of its mask."""

    def __init__(self, knows_counts=True):
        self.knows_counts = knows_counts

    def __call__(self, model, batch, *, metrics):
        inputs, masks = batch
        out = model(inputs)
        terms = {
            name: LossTerm((head(out, name) * mask).sum(), mask.sum(), WEIGHTS[name]) for name, mask in masks.items()
        }
        return terms | {"size": LossTerm(out.detach().abs().sum(), out.numel(), 0.0)}

    def counts(self, batch):
        return {name: mask.sum() for name, mask in batch[1].items()} if self.knows_counts else None


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make_batch(terms, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return inputs, {name: (torch.rand(samples, generator=generator) < 0.7).double() for name in terms}


def gradients(batches, task, precision=None):
    """Return the gradients that a step applies, and its report."""
    model = make_model()
    precision = precision or MixedPrecision("fp32")
    updater = Updater(torch.optim.SGD(model.parameters(), lr=1.0), precision=precision)
    before = copy.deepcopy(model)
    report = Step(model, task, updater, precision)(batches)
    pairs = zip(before.parameters(), model.parameters(), strict=True)
    return torch.cat([(old - new).detach().flatten() for old, new in pairs]), report


def of_the_big_batch(batches):
    """Σ weight·sum/count with the sums and counts of all micro-batches, by autograd alone."""
    model = make_model()
    sums, counts = {}, {}
    for inputs, masks in batches:
        out = model(inputs)
        for name, mask in masks.items():
            sums[name] = sums.get(name, 0.0) + (head(out, name) * mask).sum()
            counts[name] = counts.get(name, 0.0) + mask.sum()
    loss = sum(WEIGHTS[name] * sums[name] / counts[name].clamp_min(1e-12) for name in sums)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


patterns = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES)).map(sorted), st.integers(1, 5)), min_size=1, max_size=4
).filter(lambda parts: any(terms for terms, _ in parts))


@settings(max_examples=60)
@given(parts=patterns, seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_any_pattern_of_terms_in_any_order_has_the_gradient_of_the_big_batch(parts, seed, order):
    batches = [make_batch(terms, samples, seed + place) for place, (terms, samples) in enumerate(parts)]
    expected = of_the_big_batch(batches)
    order.shuffle(batches)
    found, report = gradients(batches, Patterned())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    norm = expected.norm()
    torch.testing.assert_close(report.grad_norm, norm, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_term_first_and_several_later(order):
    """The gradient of the first micro-batch must not stay undivided."""
    parts = [make_batch(["a"], 5, 1), make_batch(["a", "b"], 3, 2), make_batch(["b"], 4, 3)]
    found, _ = gradients([parts[place] for place in order], Patterned())
    torch.testing.assert_close(found, of_the_big_batch(parts), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("others", [["a", "b"], ["b"]])
def test_terms_that_differ_need_counts_ahead(order, others):
    parts = [make_batch(["a"], 5, 1), make_batch(others, 3, 2)]
    with pytest.raises(TrainingError, match=r"several terms \(.*counts\(batch\)"):
        gradients([parts[place] for place in order], Patterned(knows_counts=False))


def test_one_term_needs_no_counts():
    parts = [make_batch(["b"], samples, samples) for samples in (5, 1, 3)]
    found, _ = gradients(parts, Patterned(knows_counts=False))
    torch.testing.assert_close(found, of_the_big_batch(parts), rtol=1e-9, atol=1e-12)


def test_counts_that_lack_a_term_are_an_error():
    class Forgetful(Patterned):
        def counts(self, batch):
            return {"a": 1.0}

    with pytest.raises(TrainingError, match="'b'"):
        gradients([make_batch(["a"], 5, 1), make_batch(["a", "b"], 3, 2)], Forgetful())


def test_the_loss_scale_changes_nothing():
    parts = [make_batch(["a"], 5, 1), make_batch(["a", "b"], 3, 2)]
    precision = MixedPrecision("fp16", summands=8)
    precision.autocast = nullcontext
    found, report = gradients(parts, Patterned(), precision)
    assert not report.skipped
    torch.testing.assert_close(found, of_the_big_batch(parts), rtol=1e-6, atol=1e-9)


def test_a_term_that_is_not_reported_is_trained_and_has_no_number():
    class Penalty(Patterned):
        def __call__(self, model, batch, *, metrics):
            terms = super().__call__(model, batch, metrics=metrics)
            terms["b"].reported = False
            terms["a"].optional = True
            return terms

    parts = [make_batch(["a", "b"], 5, 1)]
    found, report = gradients(parts, Penalty())
    torch.testing.assert_close(found, of_the_big_batch(parts), rtol=1e-9, atol=1e-12)
    assert report.sums.keys() == report.counts.keys() == {"a", "size"}
    assert report.optional == {"a"}


@pytest.mark.parametrize("sizes", [(5,), (5, 1, 3)])
def test_the_only_trained_term_need_not_be_reported(sizes):
    class Penalty(Patterned):
        def __call__(self, model, batch, *, metrics):
            terms = super().__call__(model, batch, metrics=metrics)
            terms["b"].reported = False
            return terms

    parts = [make_batch(["b"], samples, samples) for samples in sizes]
    found, report = gradients(parts, Penalty(knows_counts=False))
    torch.testing.assert_close(found, of_the_big_batch(parts), rtol=1e-9, atol=1e-12)
    assert report.sums.keys() == {"size"}


def test_a_term_that_is_not_reported_is_no_number_of_an_evaluation():
    def task(model, batch, *, metrics):
        loss = model(batch[0]).square()
        penalty = LossTerm(model.weight.square().sum(), 1, 0.1, reported=False)
        return {"loss": LossTerm(loss.sum(), loss.numel()), "penalty": penalty}

    batches = as_loader([(torch.randn(3, 4),), (torch.randn(2, 4),)])
    assert evaluate(nn.Linear(4, 2), task, batches).keys() == {"loss"}


def test_a_function_is_a_task_and_methods_are_not_ignored():
    def function(model, batch, *, metrics):
        return {"loss": LossTerm(model(batch).sum(), 1.0)}

    assert as_task(function)(nn.Identity(), torch.ones(2), metrics=False)["loss"].count == 1.0
    task = Patterned()
    assert as_task(task) is task

    class Duck:
        def __call__(self, model, batch, *, metrics):
            return {}

        def counts(self, batch):
            return {}

    for wrong, said in ((Duck(), "counts"), (Patterned, "Patterned"), (3, "int")):
        with pytest.raises(ConfigError, match=said):
            as_task(wrong)
