"""Small multi-task runs with a curriculum: data of two streams, a model with three heads, and a diary of every step."""

import json

import torch
from torch import nn

from etude import Callback, Trainer
from etude.data import StreamLoader
from etude.losses import ClassificationLoss
from etude.multitask import MultiTask, TaskSpec
from etude.multitask.curriculum import Phase, Ramp, Start
from etude.optim import AdamW

VOCAB, LENGTH, SAMPLES, BATCH = 11, 6, 20, 4
STEPS = SAMPLES // BATCH
ACCUMULATION = {1: {"step": 8, "epochs": 3}, 3: {"step": 4, "epochs": 5, "validate_every_steps": 5}}
"""By micro-batches per step: phase three begins inside an epoch or with one, and four with one or inside."""


class Sequences:
    """Token sequences that can be cut shorter; whether a token is above 5 comes as labels of two kinds."""

    def __init__(self, seed, length=LENGTH):
        self.table = torch.randint(VOCAB, (18, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.seed, self.longest = seed, length

    def __len__(self):
        return len(self.table)

    def with_length(self, length):
        return Sequences(self.seed, length)

    def gather(self, indices, *, epoch, seed):
        tokens = self.table[torch.from_numpy(indices)][:, : self.longest]
        return {"input_ids": tokens, "first": (tokens[:, 0] > 5).long(), "last": (tokens[:, -1] > 5).long()}


class Model(nn.Module):
    """An embedding with dropout, and a head for each task."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Dropout(0.3))
        self.heads = nn.ModuleDict({name: nn.Linear(8, 2) for name in ("first", "last", "mean")})

    def forward(self, batch, heads):
        hidden = self.trunk(batch["input_ids"])
        seen = {"first": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(1)}
        return {name: self.heads[name](seen[name]) for name in heads}


def tasks():
    last = TaskSpec("last", ClassificationLoss(), stream="b", labels="last", weight=0.5)
    mean = TaskSpec("mean", ClassificationLoss(), stream="b", labels="last", weight=0.25)
    return MultiTask(
        {
            "first": TaskSpec("first", ClassificationLoss(), stream="a", labels="first"),
            "last": TaskSpec(**{**{key: getattr(last, key) for key in last.__slots__}, "variants": {"mean": mean}}),
            "mean": TaskSpec("mean", ClassificationLoss(), stream="a", labels="last", weight=2.0),
        }
    )


def loader(**arguments):
    data = {"a": Sequences(1), "b": Sequences(2)}
    return StreamLoader(data, BATCH, **{"epoch_samples": SAMPLES, "seed": 4, "weights": {"a": 1, "b": 1}} | arguments)


def phases(step=8):
    """One of every kind: by epoch, by step and by metric; they change all that a phase can change."""
    return [
        Phase("one", 1, ["first"], sequence_length=4),
        Phase("two", 2, ["first", "last"], Ramp(0.1, epochs=2), variants={"last": "mean"}, mixture={"a": 1, "b": 3}),
        Phase("three", Start(step=step), ["last", "mean"], Ramp(0.0, steps=4), sequence_length=3, lr_scale=0.5),
        Phase("four", Start(metric="val_mean/loss", below=100.0), "all", Ramp(0.5, steps=3)),
    ]


class Diary(Callback):
    """What was active in every step, and which phases began when; the run can be stopped or broken at a step."""

    def __init__(self, stop_at=None, break_at=None):
        super().__init__()
        self.stop_at, self.break_at = stop_at, break_at
        self.steps, self.phases = {}, []

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_phase_begin(self, phase, facts):
        self.phases.append((self.clock.step, phase, facts["number"]))
        assert (facts["step"], facts["epoch"]) == (self.clock.step, self.clock.epoch)

    def on_step_end(self, report):
        task, source = self.task, self.loader
        self.steps[self.clock.step - 1] = {
            "weights": task.weights,
            "phase": self.clock.phase,
            "lr": report.lr,
            "mixture": source.mixture,
            "epoch": self.clock.epoch,
            "position": self.clock.position,
        }
        if self.clock.step == self.stop_at:
            self.control.request_stop("test")
        if self.clock.step == self.break_at:
            raise ArithmeticError("broken")


def trainer(
    folder=None, diary=None, *, curriculum=None, callbacks=(), data=None, task=None, overwrite=False, **config
):
    source, task = loader() if data is None else data, tasks() if task is None else task
    if diary is not None:
        diary.task, diary.loader = task, source
    return Trainer(
        Model(),
        source,
        loader(training=False, shuffle=False, weights=None, epoch_samples=None),
        config={"epochs": 4, "log_interval": 3, "device": "cpu", "validate_every_steps": 4, **config},
        optimizer=lambda params: AdamW(params, lr=0.01),
        task=task,
        curriculum=phases() if curriculum is None else curriculum,
        callbacks=[*([] if diary is None else [diary]), *callbacks],
        output_dir=folder,
        overwrite=overwrite,
        progress=False,
    )


def run(folder, diary, accumulation=1, **config):
    config = {"grad_accum_steps": accumulation, **ACCUMULATION[accumulation], **config}
    return trainer(folder, diary, curriculum=phases(config.pop("step")), **config)


def events(folder, kind="phase"):
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [{k: v for k, v in event.items() if k != "time"} for event in lines if event["kind"] == kind]
