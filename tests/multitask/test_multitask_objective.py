"""Weightings of tasks in a step: each equals a plain loop in float64, with any micro-batches, stops and bad batches."""

import copy
from contextlib import nullcontext

import pytest
import torch
from task_parts import (
    LOSSES,
    NAN,
    TASKS,
    WEIGHTINGS,
    WEIGHTS,
    ByHand,
    assert_same,
    cut,
    left_behind,
    make_batch,
    make_model,
    make_step,
    make_task,
    make_weighting,
    pair,
    ragged,
    trainer,
    whole,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from etude import Callback
from etude.core import ConfigError, TrainingError
from etude.core.batch import JointBatch
from etude.core.buffers import BufferGuard
from etude.distributed import World
from etude.engine.callback_list import CallbackList
from etude.engine.objective import ObjectiveParts
from etude.engine.precision import MixedPrecision
from etude.multitask.gradients import TaskGradientWatcher
from etude.multitask.rules import make_objective
from etude.multitask.weighting import FAMO, GradNorm, UncertaintyWeighting
from etude.optim import AdamW


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("micro", [True, False], ids=["micro-batches", "one batch"])
def test_every_weighting_equals_the_loop_by_hand(name, micro):
    step, plain = pair(name)
    for place in range(20):
        parts = ragged(place)
        step.clock.step = place
        report = step(parts if micro else [whole(parts)])
        expected = plain.step(parts)
        for task, loss in expected.items():
            assert (report.sums[f"{task}/loss"] / report.counts[f"{task}/loss"]).item() == pytest.approx(
                loss, rel=1e-10
            )
        if place in (6, 12, 18):  # the ends of epochs
            step.objective.end_epoch(
                {f"{task}/loss": loss for task, loss in expected.items()} | {"kind/accuracy": 0.5}
            )
            plain.epochs.append(dict(expected))
    assert_same(step.model, plain.model)
    numbers = {"gradnorm": "weights", "famo": "logits"}.get(name)
    if numbers:
        expected = torch.stack(list(plain.numbers.values())).detach()
        torch.testing.assert_close(getattr(step.model.weighting, numbers), expected, rtol=1e-9, atol=1e-12)
        assert (expected - expected.mean()).abs().max() > 1e-3  # it did learn something


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_micro_batches_of_different_streams_equal_the_loop_by_hand(name):
    """Tasks take turns: of one step, other micro-batches than of the next; a joint batch is the same as its parts."""
    step, plain = pair(name, streams=True)
    joined, _ = pair(name, streams=True)
    turns = [("kind", "flags", "size"), ("flags", "kind", "flags"), ("size",), ("kind", "size", "size", "kind")]
    for place in range(16):
        parts = [
            make_batch(3 + 2 * turn, 10 * place + turn, stream=task)
            for turn, task in enumerate(turns[place % len(turns)])
        ]
        step.clock.step = joined.clock.step = place
        step(parts)
        joined([JointBatch(parts)])
        plain.step(parts)
    assert_same(step.model, plain.model)
    assert_same(joined.model, plain.model)


def test_pcgrad_in_a_step_is_that_of_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    tasks = TASKS[1:]
    model = make_model(make_weighting("pcgrad", tasks), tasks=tasks)
    twin = copy.deepcopy(model)
    step = make_step(model, make_task(model.weighting, tasks=tasks))
    plain, optimizer = ByHand(None, twin), torch.optim.Adam(twin.parameters(), lr=0.02)
    conflicts = 0
    for place in range(20):
        batch = make_batch(9, place, keys=tasks)
        step([batch])
        plain.model = twin
        optimizer.zero_grad()
        heads = [p for task in tasks for p in twin.heads[task].parameters()]
        trunk = list(twin.trunk.parameters())
        rows = []
        pairs = {t: LOSSES[t](twin.heads[t].layer(twin.trunk(batch["input"])), batch[t]) for t in tasks}
        weighed = {t: WEIGHTS[t] * total / count for t, (total, count) in pairs.items()}
        for loss in weighed.values():
            grads = torch.autograd.grad(loss, trunk, retain_graph=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        sum(weighed.values()).backward(inputs=heads)
        conflicts += int(rows[0] @ rows[1] < 0)
        merged = aggregation.PCGrad()(torch.stack(rows))
        for param, part in zip(trunk, merged.split([p.numel() for p in trunk]), strict=True):
            param.grad = part.view_as(param)
        optimizer.step()
    assert conflicts > 2
    assert_same(model, twin)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_step_in_which_no_task_has_labels_goes_on_and_changes_no_state(name):
    model = make_model(make_weighting(name), tasks=TASKS[:2])
    weighting = make_weighting(name, TASKS[:2])
    model = make_model(weighting, tasks=TASKS[:2])
    step = make_step(model, make_task(weighting, tasks=TASKS[:2]), torch.optim.SGD(model.parameters(), lr=0.1))
    step([make_batch(6, 0)])
    before = copy.deepcopy(model.state_dict())
    for parts in ([make_batch(6, 1, missing=2.0)], cut(make_batch(6, 1, missing=2.0), 2, 4)):
        report = step(parts)
        assert float(report.skipped) == 0
        assert all(float(value) == 0 for value in (*report.sums.values(), *report.counts.values()))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    report = step([make_batch(6, 2)])
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert float(report.skipped) == 0


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("parts", [(8,), (3, 5)])
def test_a_skipped_update_leaves_no_trace_in_model_or_weighting(name, parts):
    models = [make_model(make_weighting(name), torch.float32, noisy=True) for _ in range(2)]
    steps = [make_step(m, make_task(m.weighting), AdamW(m.parameters(), lr=0.01)) for m in models]
    for place in range(5):
        batch = make_batch(8, place, dtype=torch.float32)
        if place in (1, 3):
            bad = copy.deepcopy(batch)
            bad["input"][1, 2] = NAN
            state = copy.deepcopy(models[1].state_dict())
            torch.manual_seed(100 + place)
            assert float(steps[1](cut(bad, *parts)).skipped) == 1.0
            assert all(torch.equal(value, state[key]) for key, value in models[1].state_dict().items())
        for step in steps:
            torch.manual_seed(place)
            step.clock.step = place
            step(cut(batch, *parts))
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(*(m.state_dict().values() for m in models), strict=True)
    )


def test_heads_of_tasks_that_rest_are_left_alone_by_every_weighting():
    """Neither weight decay nor the momentum of the optimizer may move them."""
    for name in WEIGHTINGS:
        model = make_model(make_weighting(name))
        task = make_task(model.weighting)
        step = make_step(model, task, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
        step([make_batch(6, 0)])
        task.activate({"kind": 1.0, "flags": 0.5})
        head = copy.deepcopy(model.heads["size"].state_dict())
        trunk = copy.deepcopy(model.trunk.state_dict())
        step([make_batch(6, 1)])
        assert all(torch.equal(head[key], value) for key, value in model.heads["size"].state_dict().items()), name
        assert not any(torch.equal(trunk[key], value) for key, value in model.trunk.state_dict().items()), name


def test_the_losses_of_famo_before_and_after_are_of_the_same_precision():
    """With a learning rate of 0 nothing falls; rounding of bf16 in one of the two would be taken for progress."""
    for micro in ([make_batch(8, 1, dtype=torch.float32)], cut(make_batch(8, 1, dtype=torch.float32), 3, 5)):
        weighting = FAMO(TASKS, decay=0.0)
        model = make_model(weighting, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = make_step(model, make_task(weighting), optimizer, MixedPrecision("bf16"))
        step(micro)
        assert weighting.logits.tolist() == [0.0, 0.0, 0.0]


def test_a_weighting_with_state_must_be_part_of_the_model():
    for kind in (UncertaintyWeighting, FAMO, GradNorm):
        model = make_model()
        with pytest.raises(ConfigError, match=rf"{kind.__name__} is not part of the model.*task\.join\(model\)"):
            make_step(model, make_task(kind(TASKS)))
    make_step(make_model(), make_task(make_weighting("pcgrad")))([make_batch(4, 0)])  # has none


def test_a_model_must_tell_what_its_tasks_share():
    task, model = make_task(make_weighting("pcgrad")), nn.Linear(2, 2)
    with pytest.raises(TrainingError, match="Linear does not define which parameters"):
        make_objective(
            task,
            ObjectiveParts(model, list(model.parameters()), torch.device("cpu"), World(), MixedPrecision("fp32")),
        )


def test_batches_for_no_task_are_an_error_in_one_line():
    step = make_step(make_model(), make_task(streams=True))
    for parts in ([make_batch(3, 0, stream="other")], [make_batch(3, 0, stream="other")] * 2):
        with pytest.raises(TrainingError, match="no active task learns from the stream"):
            step(parts)


# ------------------------------------------------------------------------------------------------ looking at gradients


class Watcher(TaskGradientWatcher):
    def __init__(self, wanted):
        super().__init__()
        self.wants_task_gradients, self.found = wanted, []

    def on_task_gradients(self, gradients):
        self.found.append(gradients)


def look_at(step, wanted=lambda step: True):
    watcher = Watcher(wanted)
    step.objective.connect(CallbackList([watcher]))
    return watcher.found


def products_by_hand(model, batches):
    losses = ByHand(None, model).losses(batches)
    params = list(model.trunk.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)])
        for loss in losses.values()
    ]
    matrix = torch.stack(rows)
    return tuple(losses), (matrix @ matrix.T)


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_tasks_are_those_of_separate_backward_passes(name, scaled):
    """Of unweighted mean losses over all micro-batches, unscaled, even in a step in which the loss scale changes."""
    precision = MixedPrecision("fp16" if scaled else "fp32", summands=3)
    precision.autocast = nullcontext
    if scaled:
        precision.scaler.growth_interval = 1
    model = make_model(make_weighting(name), torch.float32)
    step = make_step(model, make_task(model.weighting), precision=precision)
    found = look_at(step)
    for place in range(3):
        parts = ragged(2 * place, torch.float32)
        tasks, products = products_by_hand(model, parts)
        step.clock.step = place
        assert float(step(parts).skipped) == 0
        assert found[-1].tasks == tasks
        assert found[-1].step == place
        torch.testing.assert_close(found[-1].products, products, rtol=1e-4, atol=1e-5)
    if scaled:
        assert float(precision.scaler.scale) == 65536.0 * 2**3


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_looking_changes_nothing(name):
    results = []
    for looks in (False, True):
        model = make_model(make_weighting(name), torch.float32, noisy=True)
        step = make_step(model, make_task(model.weighting), AdamW(model.parameters(), lr=0.01))
        found = look_at(step, lambda step: step % 2 == 0) if looks else []
        torch.manual_seed(3)
        for place in range(6):
            step.clock.step = place
            step(cut(make_batch(8, place, dtype=torch.float32), 3, 5))
        assert [look.step for look in found] == ([0, 2, 4] if looks else [])
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


# ------------------------------------------------------------------------------------------------ nothing waits


class CountHostReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_step_reads_nothing_from_the_device(monkeypatch, name, precision, num_micro):
    tasks = ("kind", "size")
    model = make_model(make_weighting(name, tasks), torch.float32, tasks=tasks)
    chosen = MixedPrecision(precision)
    step = make_step(model, make_task(model.weighting, tasks=tasks), AdamW(model.parameters()), chosen, metrics=True)
    parts = [make_batch(4, place, dtype=torch.float32) for place in range(num_micro)]
    while float(step(parts).skipped):  # up to the first update that counts, the step may look
        pass
    monkeypatch.setattr(BufferGuard, "put_back", lambda *_: None)  # reads on the CPU, where reading waits for nothing
    look_at(step)
    with CountHostReads() as counter:
        step(parts)
    assert counter.reads == 2  # the norm, and whether it is finite: on the CPU that does not wait


# ------------------------------------------------------------------------------------------------ resuming


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, run):
        self.run = run

    def on_step_end(self, report):
        if self.run.clock.step == self.step:
            self.control.request_stop("test")


@pytest.mark.parametrize("stops", ["a third", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_stopped_after_any_step_ends_with_the_same_bytes(tmp_path, name, accumulate, stops):
    trainer(name, tmp_path / "straight", grad_accum_steps=accumulate).train()
    weights, records = left_behind(tmp_path / "straight")
    steps = 8 // accumulate
    assert all(value == value for record in records for value in record.values())  # no NaN: one batch has no labels
    some = range(1 + list(WEIGHTINGS).index(name) % 3, steps, 3)  # three weightings have all of them together
    for stop in range(1, steps) if stops == "all" else some:
        folder = tmp_path / f"{stop}"
        trainer(name, folder, [StopAt(stop)], grad_accum_steps=accumulate).train()
        torch.rand(stop)
        second = trainer(name, folder, grad_accum_steps=accumulate)
        second.load_checkpoint(folder)
        assert second.state.clock.step == stop
        second.train()
        found = left_behind(folder)
        assert found[0] == weights, stop
        assert found[1] == records, stop


# ------------------------------------------------------------------------------------------------ memory


class LargeTensors(TorchDispatchMode):
    """Counts the results of operations that are new memory of at least so many elements, outside of autograd's own."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.numel() >= self.numel:
                self.count += one.untyped_storage().data_ptr() not in given
        return result


@pytest.mark.parametrize("name", ["pcgrad", "gradnorm", "static"])
@pytest.mark.parametrize("parts", [(8,), (3, 5)])
def test_a_step_makes_no_copies_of_all_gradients_of_the_tasks(name, parts):
    """A matrix of them, new in each step, costs page faults: it is made once and written over."""
    model = make_model(make_weighting(name), torch.float32)
    step = make_step(model, make_task(model.weighting), AdamW(model.parameters(), lr=0.01))
    look_at(step)
    step(cut(make_batch(8, 0, dtype=torch.float32), *parts))
    shared = sum(param.numel() for param in model.shared_parameters())
    with LargeTensors(len(TASKS) * shared) as large:
        step(cut(make_batch(8, 1, dtype=torch.float32), *parts))
    assert large.count == 0


def test_rows_of_a_step_know_nothing_of_the_step_before():
    """The memory is the same: a task that is missing, a parameter that is not used and a NaN leave nothing there."""
    for name in ("pcgrad", "gradnorm"):
        models = [make_model(make_weighting(name), torch.float32) for _ in range(2)]
        steps = [make_step(m, make_task(m.weighting), torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
        bad = make_batch(8, 5, dtype=torch.float32)
        bad["input"][:] = NAN
        assert float(steps[1]([bad]).skipped) == 1.0
        for step in steps:
            step.task.activate({"kind": 1.0, "flags": 0.5})
            step([make_batch(8, 1, dtype=torch.float32)])
        for mine, theirs in zip(*(m.state_dict().values() for m in models), strict=True):
            assert torch.equal(mine, theirs), name
