"""A loader that reads something else inside an epoch: nothing is lost, doubled or left open."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from etude import Callback, Trainer

SAMPLES, BATCH = 22, 4  # six batches, the last one of two samples


class Edition:
    """A loader whose samples are numbers; the hundreds are the edition, which can be changed at any time."""

    def __init__(self, sizes=(SAMPLES,)):
        self.edition, self.sizes, self.asked, self.open, self.batches = 0, sizes, [], 0, None

    def __len__(self):
        return -(-self.sizes[0] // BATCH)

    def iterate(self, epoch, position=0):
        self.asked.append((epoch, position))
        self.open += 1
        self.batches = Batches(self, self.numbers(), position)
        return self.batches

    def numbers(self):
        return 100 * self.edition + torch.arange(self.sizes[min(self.edition, len(self.sizes) - 1)])

    def change(self, position):
        """Read another edition from a position of the epoch on."""
        self.edition += 1
        if self.batches is not None and not self.batches.closed:
            self.asked.append(("changed", position))
            self.batches.numbers, self.batches.position = self.numbers(), position


class Batches:
    def __init__(self, loader, numbers, position):
        self.loader, self.numbers, self.position, self.closed = loader, numbers, position, False

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.numbers[self.position : self.position + BATCH]
        if not len(batch):
            raise StopIteration
        self.position += len(batch)
        return batch.float().unsqueeze(1), torch.zeros(len(batch), dtype=torch.long)

    def close(self):
        self.loader.open -= not self.closed
        self.closed = True


class Seen(nn.Module):
    """Remembers the samples of every training step."""

    def __init__(self):
        super().__init__()
        self.layer, self.batches = nn.Linear(1, 2), []

    def forward(self, x):
        if self.training:
            self.batches.append(x[:, 0].int().tolist())
        return self.layer(x)


class Change(Callback):
    """Changes the edition: before a step, after one, in a validation, or at the beginning of an epoch."""

    def __init__(self, loader, when, steps):
        super().__init__()
        self.loader, self.when, self.steps, self.lines = loader, when, steps, []

    def change(self, step):
        if step in self.steps:
            self.steps = self.steps - {step}
            self.loader.change(self.clock.position)

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_epoch_begin(self, epoch):
        self.lines.append(f"epoch {epoch}")
        if self.when == "epoch":
            self.change(self.clock.step)

    def on_step_begin(self, step):
        assert step == self.clock.step
        if self.when == "before":
            self.change(step)

    def on_step_end(self, report):
        self.lines.append(self.clock.position)
        if self.when == "after":
            self.change(self.clock.step)

    def on_validation_end(self, epoch, metrics):
        if self.when == "validation":
            self.change(self.clock.step)

    def on_epoch_end(self, epoch, logs):
        self.lines.append(f"end {epoch}")
        self.logs = dict(logs)


def run(when, steps, *, sizes=(SAMPLES,), validate=False, output_dir=None, **config):
    loader = Edition(sizes)
    callback, model = Change(loader, when, frozenset(steps)), Seen()
    trainer = Trainer(
        model, loader, Edition() if validate else None, callbacks=[callback], progress=False, output_dir=output_dir,
        config={"epochs": 2, "device": "cpu", "log_interval": 1, "learning_rate": 1e-6, **config},
    )  # fmt: skip
    trainer.train()
    assert loader.open == 0
    return trainer, loader, callback, model


def flat(model):
    return [sample for batch in model.batches for sample in batch]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(1, 6))
def test_the_epoch_goes_on_from_its_position_with_other_batches(when, step):
    trainer, loader, callback, model = run(when, {step})
    whole = list(range(SAMPLES))
    expected = [sample + 100 * (sample >= step * BATCH) for sample in whole] + [100 + sample for sample in whole]
    assert flat(model) == expected
    assert loader.asked == [(0, 0), ("changed", step * BATCH), (1, 0)]
    steps = [4, 8, 12, 16, 20, 22]
    assert callback.lines == ["epoch 0", *steps, "end 0", "epoch 1", *steps, "end 1"]  # an epoch begins once
    assert (trainer.state.clock.step, trainer.state.clock.samples) == (12, 2 * SAMPLES)


@pytest.mark.parametrize("when", ["before", "epoch"])
def test_a_change_as_an_epoch_begins(when):
    _, loader, _, model = run(when, {6})
    assert flat(model) == [*range(SAMPLES), *range(100, 100 + SAMPLES)]
    assert loader.asked == {"epoch": [(0, 0), (1, 0)], "before": [(0, 0), (1, 0), ("changed", 0)]}[when]


def test_a_change_after_the_last_step_of_an_epoch_adds_nothing_to_it():
    _, loader, _, model = run("after", {6})
    assert flat(model) == [*range(SAMPLES), *range(100, 100 + SAMPLES)]
    assert loader.asked == [(0, 0), ("changed", SAMPLES), (1, 0)]


@pytest.mark.parametrize(("accumulation", "step"), [(2, 1), (2, 2), (4, 1)])
def test_with_gradient_accumulation_steps_stay_whole(accumulation, step):
    trainer, loader, _, model = run("after", {step}, grad_accum_steps=accumulation, epochs=1)
    boundary = step * accumulation * BATCH
    assert flat(model) == [sample + 100 * (sample >= boundary) for sample in range(SAMPLES)]
    assert loader.asked == [(0, 0), ("changed", boundary)]
    assert trainer.state.clock.step == -(-6 // accumulation)


def test_a_change_in_a_validation_inside_an_epoch():
    _, loader, _, model = run("validation", {2}, validate=True, validate_every_steps=2, epochs=1)
    assert flat(model) == [sample + 100 * (sample >= 8) for sample in range(SAMPLES)]
    assert loader.asked == [(0, 0), ("changed", 8)]


def test_several_changes_in_one_epoch():
    _, _, _, model = run("before", {1, 2, 4}, epochs=1)
    assert flat(model) == [s + 100 * ((s >= 4) + (s >= 8) + (s >= 16)) for s in range(SAMPLES)]


def test_an_epoch_that_becomes_shorter_ends_there():
    trainer, _, callback, model = run("after", {3}, sizes=(SAMPLES, 14), epochs=1)
    assert flat(model) == [*range(12), 112, 113]
    assert callback.lines[-1] == "end 0"
    assert trainer.state.clock.epoch == 1
    trainer, _, callback, _ = run("after", {4}, sizes=(SAMPLES, 14), epochs=1)
    assert callback.lines == ["epoch 0", 4, 8, 12, 16, "end 0"]


def test_the_numbers_of_the_epoch_are_those_of_all_its_steps():
    losses = {}
    for when in ("before", "never"):
        _, _, callback, _ = run(when, {3}, epochs=1)
        losses[when] = callback.logs
    assert losses["before"]["samples_per_s"] > 0
    assert losses["before"]["loss"] != losses["never"]["loss"]

    class Sums(Callback):
        def __init__(self):
            super().__init__()
            self.sum = self.count = 0.0

        def on_step_end(self, report):
            self.sum += float(report.sums["loss"])
            self.count += float(report.counts["loss"])

    loader, sums = Edition(), Sums()
    change = Change(loader, "before", frozenset({3}))
    Trainer(Seen(), loader, callbacks=[change, sums], progress=False, config={"epochs": 1, "device": "cpu"}).train()
    assert sums.count == SAMPLES
    assert change.logs["loss"] == pytest.approx(sums.sum / sums.count, rel=1e-5)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_the_time_of_an_epoch_is_that_of_all_its_steps(monkeypatch, when):
    now = [0.0]

    class Ticks(Callback):
        def on_step_end(self, report):
            now[0] += 1.0

    monkeypatch.setattr("etude.engine.step_log.time", SimpleNamespace(perf_counter=lambda: now[0]))
    loader = Edition()
    change = Change(loader, when, frozenset({4}))
    config = {"epochs": 1, "device": "cpu", "log_interval": 100}
    Trainer(Seen(), loader, callbacks=[change, Ticks()], progress=False, config=config).train()
    assert change.logs["epoch_s"] == 6
    assert change.logs["samples_per_s"] == SAMPLES / 6


@pytest.mark.parametrize("max_steps", [2, 3, 4])
def test_a_run_that_ends_where_a_change_was_asked_for(tmp_path, max_steps):
    trainer, loader, _, model = run("after", {3}, max_steps=max_steps, output_dir=tmp_path)
    assert len(model.batches) == max_steps
    assert loader.asked == [(0, 0)] + [("changed", 12)] * (max_steps > 2)
    assert trainer.state.clock.position == max_steps * BATCH


def test_a_stop_comes_before_a_change():
    loader = Edition()

    class Stop(Callback):
        def on_step_end(self, report):
            self.control.request_stop("enough")
            loader.change(BATCH)

    Trainer(Seen(), loader, callbacks=[Stop()], progress=False, config={"epochs": 1, "device": "cpu"}).train()
    assert loader.asked == [(0, 0), ("changed", BATCH)]
    assert loader.open == 0


def test_batches_are_closed_when_a_hook_before_a_step_breaks():
    loader = Edition()

    class Broken(Callback):
        def on_step_begin(self, step):
            if step == 2:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        Trainer(Seen(), loader, callbacks=[Broken()], progress=False, config={"epochs": 1, "device": "cpu"}).train()
    assert loader.open == 0
