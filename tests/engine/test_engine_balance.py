"""Weightings of tasks in a step: each equals a plain loop in float64, with any micro-batches, stops and bad batches."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from etude import Callback, Trainer
from etude.config.registry import lookup
from etude.core import ConfigError, StepReport, TrainingError
from etude.core.batch import JointBatch
from etude.engine.balance import make_balance
from etude.engine.buffers import BufferGuard
from etude.engine.evaluation import evaluate
from etude.engine.ledger import Ledger
from etude.engine.precision import Precision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, MultiLabelLoss, MultiTask, TaskSpec
from etude.losses.weighting import FAMO, GradNorm, UncertaintyWeighting
from etude.metrics import F1
from etude.metrics import Precision as PrecisionMetric
from etude.models import LinearHead, MultiTaskModel
from etude.optim import AdamW

NAN = float("nan")
TASKS = ("kind", "flags", "size")
WEIGHTS = {"kind": 1.0, "flags": 0.3, "size": 2.0}
SIZES = {"kind": 3, "flags": 4, "size": 2}
WEIGHTINGS = (None, "static", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo")


class Trunk(nn.Module):
    feature_dim = 6

    def __init__(self, noisy=False):
        super().__init__()
        middle = (nn.BatchNorm1d(7), nn.Dropout(0.2)) if noisy else ()
        self.layers = nn.Sequential(nn.Linear(5, 7), *middle, nn.Tanh(), nn.Linear(7, 6), nn.Tanh())

    def features(self, x):
        return self.layers(x)

    def forward(self, x):
        return self.layers(x)


def make_weighting(name, tasks=TASKS):
    return None if name is None else lookup("weighting", name).factory(tasks)


def make_model(weighting=None, dtype=torch.float64, noisy=False, tasks=TASKS):
    torch.manual_seed(0)
    heads = {task: LinearHead(SIZES[task], in_features=6) for task in tasks}
    return MultiTaskModel(Trunk(noisy), heads, weighting).to(dtype)


def squared(predictions, labels):
    there = ~labels.isnan()
    return (predictions - labels.nan_to_num())[there].square().sum()


LOSSES = {
    "kind": lambda out, y: (F.cross_entropy(out, y, ignore_index=-100, reduction="sum"), (y != -100).sum()),
    "flags": lambda out, y: (
        F.binary_cross_entropy_with_logits(out[~y.isnan()], y[~y.isnan()], reduction="sum"),
        (~y.isnan()).sum(),
    ),
    "size": lambda out, y: (F.mse_loss(out, y, reduction="sum"), torch.tensor(y.numel())),
}


def make_task(weighting=None, streams=False, tasks=TASKS, **metrics):
    losses = {"kind": ClassificationLoss(), "flags": MultiLabelLoss(), "size": nn.MSELoss()}
    return MultiTask(
        {
            task: TaskSpec(
                task,
                losses[task],
                stream=task if streams else None,
                labels=task,
                weight=WEIGHTS[task],
                metrics=metrics.get(task, {}),
            )
            for task in tasks
        },
        weighting,
    )


def make_step(model, task, optimizer=None, precision=None, metrics=False):
    precision = precision or Precision("fp32")
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.02)
    return Step(model, task, Updater(optimizer, precision=precision), precision, metrics=metrics)


def make_batch(samples, seed, missing=0.3, keys=TASKS, dtype=torch.float64, **extra):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    gone = torch.rand(samples, 5, generator=generator) < missing
    labels = {
        "kind": x[:, :3].argmax(1).masked_fill(gone[:, 0], -100),
        "flags": (x[:, :4] > 0.2).double().masked_fill(gone[:, 1:], NAN).to(dtype),
        "size": (x[:, :2] * 3 + torch.randn(samples, 2, generator=generator)).to(dtype),
    }
    return {"input": x.to(dtype), **{key: labels[key] for key in keys}, **extra}


def whole(batches):
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def cut(batch, *sizes):
    parts = {key: value.split(sizes) for key, value in batch.items()}
    return [{key: parts[key][place] for key in batch} for place in range(len(sizes))]


class ByHand:
    """The same training written plainly: every task's mean loss over all micro-batches, torch's Adam throughout."""

    def __init__(self, name, model):
        self.name, self.model, self.epochs, self.steps = name, model, [], 0
        weighting = model.weighting
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        self.first = {}
        # One optimizer for each task's number: a task that is not there must not move.
        initial = 1.0 if name == "gradnorm" else 0.0
        self.numbers = {t: torch.tensor(initial, dtype=torch.float64, requires_grad=True) for t in TASKS}
        decay = 0.01 if name == "famo" else 0.0
        self.adams = {t: torch.optim.Adam([v], lr=0.025, weight_decay=decay) for t, v in self.numbers.items()}
        self.order = weighting.order if name == "pcgrad" else None

    def losses(self, batches):
        found = {}
        for task in TASKS:
            mine = [batch for batch in batches if task in batch and batch.get("stream", task) == task]
            if not mine:
                continue
            pairs = [LOSSES[task](self.model.heads[task].layer(self.model.trunk(b["input"])), b[task]) for b in mine]
            count = sum(int(count) for _, count in pairs)
            if count:
                found[task] = sum(total for total, _ in pairs) / count
        return found

    def step(self, batches):
        self.optimizer.zero_grad()
        losses = self.losses(batches)
        getattr(self, self.name or "static")(losses)
        for task in TASKS:
            if any(task in batch and batch.get("stream", task) == task for batch in batches):
                for param in self.model.heads[task].parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad  # all labels missing
        self.optimizer.step()
        if self.name == "famo":
            self.famo_after(losses, self.losses(batches))
        self.steps += 1
        return {task: loss.item() for task, loss in losses.items()}

    def static(self, losses):
        sum(WEIGHTS[task] * loss for task, loss in losses.items()).backward()

    def uncertainty(self, losses):
        s = self.model.weighting.log_variances
        parts = [
            WEIGHTS[task] * (torch.exp(-s[TASKS.index(task)]) * loss + s[TASKS.index(task)] / 2)
            for task, loss in losses.items()
        ]
        sum(parts).backward()

    def dwa(self, losses):
        rates = [self.epochs[-1][t] / self.epochs[-2][t] if len(self.epochs) > 1 else 1.0 for t in TASKS]
        shares = 3 * torch.softmax(torch.tensor(rates, dtype=torch.float64) / 2.0, 0)
        sum(shares[TASKS.index(t)] * WEIGHTS[t] * loss for t, loss in losses.items()).backward()

    def gradnorm(self, losses):
        last = list(self.model.trunk.layers[-2].parameters())
        weights = {task: self.numbers[task] for task in losses}
        norms = []
        for task, loss in losses.items():
            self.first.setdefault(task, loss.item())
            rows = torch.autograd.grad(loss, last, retain_graph=True)
            norms.append(weights[task] * torch.cat([row.flatten() for row in rows]).norm())
        sum(weights[t].detach() * WEIGHTS[t] * loss for t, loss in losses.items()).backward()
        norms = torch.stack(norms)
        progress = torch.tensor(
            [loss.item() / self.first[task] for task, loss in losses.items()], dtype=torch.float64
        )
        target = (norms.mean() * (progress / progress.mean()) ** 1.5).detach()
        together = sum(weight.item() for weight in weights.values())
        (norms - target).abs().sum().backward(inputs=list(weights.values()))
        for task in losses:
            self.adams[task].step()
            self.adams[task].zero_grad()
        with torch.no_grad():
            total = sum(weight.item() for weight in weights.values())
            for weight in weights.values():
                weight *= together / total

    def pcgrad(self, losses):
        shared = list(self.model.trunk.parameters())
        rows = {}
        for task, loss in losses.items():
            (WEIGHTS[task] * loss).backward(retain_graph=True, inputs=list(self.model.heads[task].parameters()))
            row = torch.autograd.grad(WEIGHTS[task] * loss, shared, retain_graph=True)
            rows[task] = torch.cat([one.flatten() for one in row])
        total = 0
        for task, others in zip(TASKS, self.order(self.steps).tolist(), strict=True):
            if task not in rows:
                continue
            row = rows[task].clone()
            for other in (rows[TASKS[place]] for place in others if TASKS[place] in rows):
                if row @ other < 0:
                    row -= (row @ other) / (other @ other) * other
            total = total + row
        for param, part in zip(shared, total.split([p.numel() for p in shared]), strict=True):
            param.grad = part.view_as(param)

    def famo(self, losses):
        shares = torch.softmax(torch.stack([self.numbers[task] for task in losses]), 0).detach()
        heights = torch.stack(list(losses.values())) + 1e-8
        c = (shares / heights).sum().detach()
        scale = torch.tensor([WEIGHTS[task] for task in losses], dtype=torch.float64)
        (scale * shares * heights.log() / c).sum().backward()

    def famo_after(self, before, after):
        fell = torch.stack([(before[t] + 1e-8).log() - (after[t] + 1e-8).log() for t in before]).detach()
        logits = torch.stack([self.numbers[task] for task in before])
        (torch.softmax(logits, 0) * fell).sum().backward()
        for task in before:
            self.adams[task].step()
            self.adams[task].zero_grad()


def pair(name, streams=False):
    """A step, and the plain loop with a model of its own."""
    model, twin = (make_model(make_weighting(name)) for _ in range(2))
    return make_step(model, make_task(model.weighting, streams)), ByHand(name, twin)


def assert_same(model, other, rtol=1e-10):
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def ragged(step, dtype=torch.float64):
    """The micro-batches of a step: of different sizes, one without labels of a task, one step without a task."""
    batch = make_batch(12, step, dtype=dtype)
    if step % 4 == 1:
        batch["kind"].fill_(-100)
    parts = cut(batch, 3, 1, 8)
    parts[1]["flags"].fill_(NAN)
    return parts


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
            step.end_epoch({f"{task}/loss": loss for task, loss in expected.items()} | {"kind/accuracy": 0.5})
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
        step = make_step(model, make_task(weighting), optimizer, Precision("bf16"))
        step(micro)
        assert weighting.logits.tolist() == [0.0, 0.0, 0.0]


def test_a_weighting_with_state_must_be_part_of_the_model():
    for kind in (UncertaintyWeighting, FAMO, GradNorm):
        model = make_model()
        with pytest.raises(ConfigError, match=rf"{kind.__name__} is not part of the model.*MultiTaskModel\(trunk"):
            make_step(model, make_task(kind(TASKS)))
    make_step(make_model(), make_task(make_weighting("pcgrad")))([make_batch(4, 0)])  # has none


def test_a_model_must_tell_what_its_tasks_share():
    task, model = make_task(make_weighting("pcgrad")), nn.Linear(2, 2)
    with pytest.raises(TrainingError, match="Linear does not tell which parameters"):
        make_balance(task, model, None, Precision("fp32"), list(model.parameters()), task)


def test_batches_for_no_task_are_an_error_in_one_line():
    step = make_step(make_model(), make_task(streams=True))
    for parts in ([make_batch(3, 0, stream="other")], [make_batch(3, 0, stream="other")] * 2):
        with pytest.raises(TrainingError, match="nothing to learn from"):
            step(parts)


# ------------------------------------------------------------------------------------------------ looking at gradients


def look_at(step, wanted=lambda step: True):
    found = []
    step.task_watchers = [(wanted, found.append)]
    return found


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
    precision = Precision("fp16" if scaled else "fp32", summands=3)
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
    chosen = Precision(precision)
    step = make_step(model, make_task(model.weighting, tasks=tasks), AdamW(model.parameters()), chosen, metrics=True)
    parts = [make_batch(4, place, dtype=torch.float32) for place in range(num_micro)]
    while float(step(parts).skipped):  # up to the first update that counts, the step may look
        pass
    monkeypatch.setattr(BufferGuard, "put_back", lambda *_: None)  # reads on the CPU, where reading waits for nothing
    look_at(step)
    with CountHostReads() as counter:
        step(parts)
    assert counter.reads == 0


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


def trainer(name, folder, callbacks=(), **config):
    model = make_model(make_weighting(name), torch.float32, noisy=True)
    task = make_task(model.weighting, kind={"f1": F1(num_classes=3)})
    batches = [make_batch(6, place, dtype=torch.float32) for place in range(4)]
    batches[2]["kind"].fill_(-100)
    config = {"epochs": 2, "log_interval": 1, "device": "cpu", "train_metrics": True, **config}
    return Trainer(
        model, batches, batches[:2], config=config, task=task, callbacks=callbacks, output_dir=folder, progress=False
    )


def left_behind(folder):
    timing = {"samples_per_s", "data_wait", "epoch_s", "time"}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records = [{key: value for key, value in line.items() if key not in timing} for line in lines]
    return (folder / "checkpoints" / "last" / "model.safetensors").read_bytes(), records


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_stopped_after_any_step_ends_with_the_same_bytes(tmp_path, name, accumulate):
    trainer(name, tmp_path / "straight", grad_accum_steps=accumulate).train()
    weights, records = left_behind(tmp_path / "straight")
    steps = 8 // accumulate
    assert all(value == value for record in records for value in record.values())  # no NaN: one batch has no labels
    for stop in range(1, steps):
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


# ------------------------------------------------------------------------------------------------ numbers


def test_means_of_terms_that_come_and_go():
    """Each over its own labels; a task without labels in a window has no key in it, and none is NaN."""
    ledger = Ledger()

    def add(**pairs):
        sums = {f"{task}/loss": torch.tensor(total) for task, (total, _) in pairs.items()}
        counts = {f"{task}/loss": torch.tensor(count) for task, (_, count) in pairs.items()}
        ledger.add(StepReport(sums, counts, torch.tensor(1.0), 1.0, torch.tensor(0.0), 0.1, 4))

    add(a=(6.0, 3.0))
    add(b=(4.0, 1.0), c=(0.0, 0.0))
    add(a=(2.0, 1.0), b=(2.0, 2.0))
    means = ledger.take_window().means()
    assert means == {"a/loss": 2.0, "b/loss": 2.0}
    add(c=(5.0, 2.0))
    assert ledger.take_window().means() == {"c/loss": 2.5}
    add(a=(NAN, 3.0))
    bad = ledger.take_window().means()
    assert bad["a/loss"] != bad["a/loss"]  # labels were there, and the loss was not finite: that is to be seen
    assert ledger.take_epoch().means() == {"a/loss": 2.0, "b/loss": 2.0, "c/loss": 2.5}


class Batches(list):
    """The least of a loader."""

    def iterate(self, epoch, position=0):
        class Iterator:
            def __init__(self, batches):
                self.batches = iter(batches)

            def __iter__(self):
                return self.batches

            def close(self):
                pass

        return Iterator(self)


def test_metrics_over_batches_are_those_of_scikit_learn_on_the_whole():
    sklearn = pytest.importorskip("sklearn.metrics")
    metrics = {
        "kind": {"f1": F1(num_classes=3), "precision": PrecisionMetric(num_classes=3, average="weighted")},
        "flags": {"f1": F1(num_labels=4), "micro": F1(num_labels=4, average="micro")},
    }
    model, batches = make_model().eval(), Batches(make_batch(size, size) for size in (7, 1, 12, 5))
    task = make_task(**metrics)
    found = evaluate(model, task, batches)
    data = whole(batches)
    with torch.no_grad():
        out = model(data, ["kind", "flags", "size"])
    there = data["kind"] != -100
    true, guess = data["kind"][there], out["kind"].argmax(1)[there]
    assert found["kind/f1"] == pytest.approx(sklearn.f1_score(true, guess, average="macro"))
    assert found["kind/precision"] == pytest.approx(
        sklearn.precision_score(true, guess, average="weighted", zero_division=0)
    )
    assert found["kind/accuracy"] == pytest.approx(sklearn.accuracy_score(true, guess))
    columns = [~data["flags"][:, place].isnan() for place in range(4)]
    each = [
        (data["flags"][rows, place], (out["flags"][rows, place] > 0).double()) for place, rows in enumerate(columns)
    ]
    assert found["flags/f1"] == pytest.approx(sum(sklearn.f1_score(t, g, zero_division=0) for t, g in each) / 4)
    flat = [torch.cat(parts) for parts in zip(*each, strict=True)]
    assert found["flags/micro"] == pytest.approx(sklearn.f1_score(*flat))
    losses = {t: total.item() for t, total in ByHand(None, model).losses([data]).items()}
    assert {t: found[f"{t}/loss"] for t in TASKS} == pytest.approx(losses)
    assert found["loss"] == pytest.approx(sum(WEIGHTS[t] * loss for t, loss in losses.items()))
    assert evaluate(model, task, batches) == found  # counts begin anew
    assert not task._measuring


def test_in_validation_a_task_without_labels_has_no_numbers():
    task = make_task(kind={"f1": F1(num_classes=3)})
    batches = Batches([make_batch(5, 1, missing=2.0)])
    found = evaluate(make_model(), task, batches)
    assert {name for name in found if name != "loss"} == {"size/loss"}
    assert all(value == value for value in found.values())


def test_a_failed_validation_does_not_leave_training_measuring():
    metric = F1(num_classes=3)
    task, model = make_task(kind={"f1": metric}), make_model()
    with pytest.raises(KeyError):
        evaluate(model, task, Batches([make_batch(5, 1), BadBatch(make_batch(5, 1))]))
    before = metric.state().clone()
    make_step(model, task)([make_batch(6, 1)])
    assert torch.equal(metric.state(), before)


class BadBatch(dict):
    def items(self):
        raise KeyError("a broken batch")


def test_names_of_validation_begin_with_val(tmp_path):
    result = trainer(None, tmp_path).train()
    assert {"val_loss", "val_kind/loss", "val_kind/f1", "val_flags/accuracy", "kind/loss", "kind/weight"} <= set(
        result
    )
    _, records = left_behind(tmp_path)
    third = next(record for record in records if record.get("step") == 3)  # its batch has no labels of this task
    assert "kind/loss" not in third
    assert "kind/accuracy" not in third
    assert "flags/loss" in third
