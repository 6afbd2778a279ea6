"""Steps in smaller parts: the same update as whole ones, and steps that are done again when memory runs out."""

import random

import pytest
import torch
from captured_steps import make as make_captured
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.core.task import LossTerm, Task
from etude.engine.precision import MixedPrecision
from etude.engine.splitter import MicroBatchSplitter
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import SupervisedTask, as_strategy
from etude.metrics.metric_set import MetricSet

FEATURES = 5


class Limited(nn.Module):
    """Has memory for at most `most` samples at once, in its forward or in its backward pass."""

    def __init__(self, most=10**9, fails_in="forward", between=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), *between, nn.Linear(8, 3)).double()
        self.most, self.fails_in, self.failures = most, fails_in, 0

    def forward(self, x):
        y = self.layers(x)
        if self.training and len(x) > self.most:
            if self.fails_in == "forward":
                self.fail(None)
            y.register_hook(self.fail)
        return y

    def fail(self, _gradient):
        self.failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Masked(Task):
    """Cross entropy over the positions that a mask keeps: every sample counts differently."""

    def __call__(self, model, batch, *, metrics):
        logits = model(batch["x"]).flatten(0, -2)
        errors = nn.functional.cross_entropy(logits, batch["y"].flatten(), reduction="none")
        kept = batch["mask"].flatten()
        return {"loss": LossTerm((errors * kept).sum(), kept.sum())}

    def counts(self, batch):
        return {"loss": batch["mask"].sum(), "size": batch["mask"].numel()}


class TwoTerms(Masked):
    def __call__(self, model, batch, *, metrics):
        output = model(batch["x"])
        return {
            **super().__call__(model, batch, metrics=metrics),
            "size": LossTerm(output.square().sum(), batch["mask"].numel(), 0.1),
        }


def ragged(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(size, 4, FEATURES, generator=generator, dtype=torch.float64),
            "y": torch.randint(3, (size, 4), generator=generator),
            "mask": (torch.rand(size, 4, generator=generator) < 0.6).double(),
        }
        for size in sizes
    ]


def make(model, task=None, size=None, recovers=True, **options):
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), clip_norm=1.0)
    splitter = MicroBatchSplitter(size, recovers=recovers)
    step = Step(model, task or Masked(), updater, MixedPrecision("fp32"), splitter=splitter, **options)
    step.warnings = []
    step.warn = step.warnings.append
    return step


def compare(one, other, tolerance=1e-12):
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 9), st.sampled_from([Masked, TwoTerms]))
def test_a_divided_step_is_the_whole_step(sizes, size, task):
    whole, divided = make(Limited(), task(), recovers=False), make(Limited(), task(), size, recovers=False)
    for seed in range(2):
        for step in (whole, divided):
            step.report = step(ragged(sizes, seed))
        assert float(whole.report.sums["loss"]) == pytest.approx(float(divided.report.sums["loss"]), rel=1e-12)
        assert float(whole.report.counts["loss"]) == float(divided.report.counts["loss"])
    compare(whole, divided)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("task", [Masked, TwoTerms])
def test_a_step_that_runs_out_of_memory_is_done_again(fails_in, task):
    whole, limited = make(Limited(), task()), make(Limited(3, fails_in), task())
    draw = random.Random(0)
    for seed in range(8):
        sizes = [draw.randint(1, 12) for _ in range(draw.randint(1, 3))]
        for step in (whole, limited):
            step(ragged(sizes, seed))
    compare(whole, limited)
    assert limited.model.failures
    assert limited.splitter.size <= 3
    assert whole.splitter.size is None
    assert any("out of memory" in line for line in limited.warnings)
    failures = limited.model.failures
    limited(ragged([12]))
    assert limited.model.failures == failures  # the size is remembered


def test_memory_may_run_out_in_any_step():
    """A limit that falls now and then, as fragmentation does; batches below it are left whole."""
    whole, limited = make(Limited()), make(Limited())
    for seed, most in enumerate([20, 20, 9, 20, 5, 20]):
        limited.model.most = most
        for step in (whole, limited):
            step(ragged([16], seed))
    compare(whole, limited)
    assert limited.model.failures == 2
    assert limited.splitter.size == 4


def test_metrics_count_every_sample_once():
    def counted(most):
        task = SupervisedTask(as_strategy(nn.CrossEntropyLoss()))
        task.measure(MetricSet.of("accuracy", True))
        step = make(Limited(most, "backward"), task, metrics=True)
        generator = torch.Generator().manual_seed(0)
        for size in (7, 16, 5):
            x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
            step([(x, torch.randint(3, (size,), generator=generator)), (x[:2], torch.zeros(2, dtype=torch.long))])
        state = task.measures.state_dict()
        return dict(_tensors(state))

    whole, limited = counted(100), counted(3)
    assert whole.keys() == limited.keys()
    assert whole
    for key, value in whole.items():
        assert torch.equal(value, limited[key]), key


class Unlucky(Limited):
    """Runs out of memory in some of its calls."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x):
        self.calls += 1
        return self.fail(None) if self.calls in self.fails else self.layers(x)


@pytest.mark.parametrize("fails", [(1, 3), (1, 3, 4), (1, 3, 5), (1, 2, 6, 8)])
def test_metrics_count_every_sample_once_if_later_parts_fail(fails):
    """Parts of 10 samples: 5 + 5, of which the first is counted, then 3 + 2 + 3 + 2 and so on."""
    task = SupervisedTask(as_strategy(nn.CrossEntropyLoss()))
    task.measure(MetricSet.of("accuracy", True))
    step = make(Unlucky(fails), task, metrics=True)
    x = torch.randn(10, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = step.model.layers(x).argmax(1)
    step([(x, torch.where(torch.arange(10) < 4, labels, (labels + 1) % 3))])
    ((_, counted),) = _tensors(task.measures.state_dict())
    assert counted.tolist() == [4, 10]


def _tensors(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for place, value in enumerate(tree):
            yield from _tensors(value, f"{path}.{place}")


def test_random_numbers_are_those_before_the_failed_attempt():
    """A step done again in halves equals one that was divided from the start: it draws the same masks."""
    failed, divided = (
        make(Limited(4, "backward", [nn.Dropout(0.5)])),
        make(Limited(between=[nn.Dropout(0.5)]), size=4),
    )
    for step in (failed, divided):
        torch.manual_seed(7)
        step(ragged([8]))
        step.next = torch.rand(1)
    compare(failed, divided, 0.0)
    assert torch.equal(failed.next, divided.next)
    assert failed.model.failures == 1


def test_dropout_has_the_expected_gradient():
    """Masks of a divided step are others, from the same distribution: gradients agree on average."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 3, bias=False)).double()

    def mean_norm(size):
        step = make(model, size=size)
        step.updater.optimizer.param_groups[0]["lr"] = 0.0
        torch.manual_seed(1)
        return torch.stack([step(ragged([32])).norm / step.objective.counts["loss"] for _ in range(100)]).mean()

    assert float(mean_norm(4)) == pytest.approx(float(mean_norm(None)), rel=0.05)


def test_buffers_are_those_of_one_pass():
    """Running statistics of a failed attempt are undone; those of batch norm are reported as different."""
    norm = nn.BatchNorm1d(8).double()
    model = Limited(4, "backward", [norm])
    step = make(model, SupervisedTask(as_strategy(nn.CrossEntropyLoss())))
    x = torch.randn(8, FEATURES, dtype=torch.float64)
    step([(x, torch.zeros(8, dtype=torch.long))])
    assert int(norm.num_batches_tracked) == 2
    assert sum("batch norm" in line for line in step.warnings) == 1
    step([(x, torch.zeros(8, dtype=torch.long))])
    assert sum("batch norm" in line for line in step.warnings) == 1


@pytest.mark.parametrize("recovers", [True, False])
def test_errors_that_remain(recovers):
    """One sample that does not fit, a batch that cannot be divided, and every failure without `recovers`."""
    single = make(Limited(0), recovers=recovers)
    with pytest.raises(torch.OutOfMemoryError):
        single(ragged([4]))
    whole = make(Limited(2), recovers=recovers)
    batch = {**ragged([4])[0], "offsets": torch.zeros(7)}
    with pytest.raises(torch.OutOfMemoryError):
        whole([batch])
    other = make(Limited(), recovers=recovers)
    other.model.layers = nn.Linear(9, 9)
    with pytest.raises(Exception, match=r"(?i)shapes|dtype|accept"):
        other(ragged([4]))


def test_a_failed_update_is_not_done_again():
    step = make(Limited())
    step.updater._step = lambda: Limited(0).fail(None)
    with pytest.raises(torch.OutOfMemoryError):
        step(ragged([4]))
    assert step.splitter.size is None


def test_state_is_that_of_this_setting():
    found = MicroBatchSplitter(recovers=True)
    found._halve(8)
    assert found.state_dict() == {"size": 4, "given": 0}
    again, other = MicroBatchSplitter(), MicroBatchSplitter(6)
    for one in (again, other):
        one.load_state_dict(found.state_dict())
    assert (again.size, other.size) == (4, 6)
    assert MicroBatchSplitter(6).state_dict() == {}


def test_captured_steps_are_recorded_again():
    model = Limited(between=[])
    step, capture, _ = make_captured(model)
    step.splitter.recovers = True
    generator = torch.Generator().manual_seed(0)

    def batch():
        return [(torch.randn(8, FEATURES, generator=generator).double(), torch.randint(3, (8,), generator=generator))]

    for _ in range(6):
        step(batch())
    assert (capture.recorder.recorded, len(capture._graphs)) == (1, 1)
    model.most = 4
    step.splitter._halve(8)  # graphs hold their memory, so only an eager step can run out of it
    assert not capture._graphs
    replayed = capture.recorder.replayed
    for _ in range(6):
        step(batch())
    assert capture.recorder.recorded == 2
    assert capture.recorder.replayed > replayed
    assert not model.failures


def test_a_step_that_fails_before_it_is_recorded_is_recorded_divided():
    model = Limited()
    step, capture, _ = make_captured(model)
    step.splitter.recovers = True
    generator = torch.Generator().manual_seed(0)
    for number in range(9):
        model.most = 4 if number >= 2 else 99
        step([(torch.randn(8, FEATURES, generator=generator).double(), torch.randint(3, (8,), generator=generator))])
    assert model.failures == 1
    assert (capture.recorder.recorded, len(capture._graphs)) == (1, 1)
    assert capture.refused is None
