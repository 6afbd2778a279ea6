"""Models, tasks and batches for tests of several tasks in a step, and the same step in plain torch."""

import torch
import torch.nn.functional as F
from torch import nn

from etude import Trainer
from etude.config.registry import lookup
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, MultiLabelLoss
from etude.metrics import F1
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from run_files import records, weights

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
    model = MultiTaskModel(Trunk(noisy), heads)
    model.weighting = weighting
    return model.to(dtype)


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
    precision = precision or MixedPrecision("fp32")
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
    return weights(folder), records(folder)
