"""The schedule `plateau` against torch's ReduceLROnPlateau, alone and in runs that are stopped and resumed."""

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim import lr_scheduler

from etude import BasicTrainingLoop, Callback, Trainer, TrainingLoop
from etude.callbacks import EarlyStopping, plateau
from etude.config import build_component
from etude.core import Clock, ConfigError
from etude.engine.callback import RunInfo, RunParts
from etude.engine.learning_rate import LearningRate
from etude.optim import SGD, Schedules, cosine, per_group, warmup


def begin(schedules, optimizer, clock, monitor="loss"):
    """Return the rate of a run and its watcher, as a trainer connects them."""
    rate, (watcher,) = LearningRate(optimizer, schedules), Schedules.of(schedules).callbacks
    watcher.bind(RunParts(None, None, val_loader=[], learning_rate=rate))
    watcher.on_train_begin(RunInfo("", None, optimizer, clock, torch.device("cpu"), 1, 1, 1, None))
    return rate, watcher


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.one_of(st.floats(-2, 2), st.just(float("nan"))), min_size=1, max_size=40),
    factor=st.floats(0.1, 0.9),
    patience=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 1e-4, 0.3]),
    kind=st.sampled_from(["rel", "abs"]),
    cooldown=st.integers(0, 3),
    ratio=st.floats(0, 0.5),
    mode=st.sampled_from(["min", "max"]),
    resume_at=st.integers(0, 40),
)
def test_every_check_is_that_of_torch(values, factor, patience, threshold, kind, cooldown, ratio, mode, resume_at):
    reference, ours = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2))
    shared = {"factor": factor, "patience": patience, "threshold": threshold, "threshold_mode": kind, "mode": mode}
    scheduler = lr_scheduler.ReduceLROnPlateau(reference, **shared, cooldown=cooldown, min_lr=ratio, eps=0.0)
    clock = Clock()

    def make():
        return plateau(**shared, cooldown=cooldown, min_lr_ratio=ratio, monitor="loss")

    rate, watcher = begin(make(), ours, clock)
    for count, value in enumerate(values):
        if count == resume_at and count:
            state = json.loads(json.dumps(watcher.state_dict(), allow_nan=False))
            rate, watcher = begin(make(), ours, clock)
            watcher.load_state_dict(state)
        clock.step += 1
        scheduler.step(value)
        watcher.on_epoch_end(count, {"loss": value})
        rate.set(clock.step)
        assert ours.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"], rel=1e-12)


# ------------------------------------------------------------------ in runs


def data(samples=64):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


class Rates(Callback):
    def __init__(self, stop_at=None):
        super().__init__()
        self.seen, self.stop_at = [], stop_at

    def on_step_end(self, report):
        self.seen.append(report.lr)
        self.control.stop |= len(self.seen) == self.stop_at


SECTION = {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.5}
"""No epoch improves by half, so every check after the first reduces the rate."""


def trainer(scheduler, rates=None, config=None, **more):
    settings = {"epochs": 5, "batch_size": 16, **(config or {})}
    callbacks = [] if rates is None else [rates]
    optimizer = {"name": "sgd", "lr": 1e-3}
    parts = {"optimizer": optimizer, "scheduler": scheduler, "callbacks": callbacks, "progress": False, **more}
    return Trainer(model(), data(), data(32), config=settings, **parts)


def test_it_is_a_factor_of_the_schedule_inside_or_around_it():
    halved = [0.5 ** max(0, step // 4 - 1) for step in range(20)]
    for scheduler, inner in [
        (SECTION, lambda step: 1.0),
        ({"name": "warmup", "warmup_steps": 6, "schedule": SECTION}, warmup(lambda step: 1.0, 6)),
        ({**SECTION, "schedule": {"name": "warmup", "warmup_steps": 6, "schedule": "cosine"}}, warmup(cosine(14), 6)),
        ({**SECTION, "schedule": "cosine"}, cosine(20)),
        ({"name": "per_group", "groups": {"1": "constant"}, "default": SECTION}, None),
    ]:
        rates = Rates()
        if inner is None:  # the factor is that of every group
            optimizer = {"name": "sgd", "lr": 1e-3, "groups": [{"params": "0.*", "name": "1"}]}
            one = trainer(scheduler, rates, optimizer=optimizer)
            one.train()
            assert [group["lr"] for group in one.optimizer.param_groups] == pytest.approx([1e-3 * halved[-1]] * 2)
            continue
        trainer(scheduler, rates).train()
        assert rates.seen == pytest.approx([1e-3 * halved[step] * inner(step) for step in range(20)])


@pytest.mark.parametrize("stop_at", [3, 8, 13])
def test_a_resumed_run_has_the_bytes_of_one_that_never_stopped(tmp_path, stop_at):
    config = {"validate_every_steps": 4}
    scheduler = {"name": "warmup", "warmup_steps": 3, "schedule": {**SECTION, "cooldown": 1}}
    straight = trainer(scheduler, config=config)
    straight.train()
    trainer(scheduler, Rates(stop_at), config, output_dir=tmp_path / "run").train()
    again = trainer(scheduler, config=config)
    again.load_checkpoint(tmp_path / "run")
    assert again.state.clock.step == stop_at
    again.train()
    assert again.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"] < 1e-3
    pairs = zip(straight.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_training_on_with_more_epochs_keeps_the_factor_and_stretches_the_schedule():
    rates = Rates()
    one = trainer({**SECTION, "schedule": "cosine"}, rates, {"epochs": 2})
    one.train()
    one.train(num_epochs=4)
    halved = [0.5 ** max(0, step // 4 - 1) for step in range(16)]
    cosines = [*map(cosine(8), range(8)), *map(cosine(16), range(8, 16))]
    assert rates.seen == pytest.approx([1e-3 * a * b for a, b in zip(halved, cosines, strict=True)])


def test_validations_between_epochs_count_once_each():
    rates = Rates()
    trainer(SECTION, rates, {"epochs": 2, "validate_every_steps": 2}).train()
    assert rates.seen == pytest.approx([1e-3 * 0.5 ** max(0, step // 2 - 1) for step in range(8)])


def test_through_other_doors_and_from_the_full_rate_in_every_fit():
    schedule, rates, one = plateau(patience=0, factor=0.5, threshold=0.9, monitor="loss"), Rates(), model()
    loop = BasicTrainingLoop(one, SGD(one.parameters(), lr=1e-3), schedule, callbacks=[rates], progress=False,
                             config={"batch_size": 32})  # fmt: skip
    for _ in range(2):
        loop.fit(data(), epochs=3)
    assert rates.seen == pytest.approx(2 * [1e-3, 1e-3, 1e-3, 1e-3, 5e-4, 5e-4])
    optimizer, loop, found = SGD(one.parameters(), lr=1e-3), TrainingLoop(), []
    from etude import DataLoader

    for epoch in range(4):
        loop.train_epoch(one, DataLoader(*data(), 32), optimizer, schedule, epoch)
        found.append(optimizer.get_lr())
    assert found == pytest.approx([1e-3, 1e-3, 5e-4, 2.5e-4])


def test_what_happened_is_reported(tmp_path):
    trainer({**SECTION, "min_lr_ratio": 0.2}, output_dir=tmp_path / "run").train()
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    words = [one["message"] for one in events if "no longer improves" in str(one.get("message"))]
    assert [text.split("learning rate ")[1] for text in words] == [f"x {x} from now on" for x in (0.5, 0.25, 0.2)]
    assert all(text.startswith("val_loss") for text in words)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"patience": -1}, "patience"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 1.0}, "factor"),
        ({"min_lr": 1e-5}, "min_lr.*did you mean 'min_lr_ratio'"),
        ({"mode": "least"}, "mode"),
        ({"monitor": "nonsense"}, "mode"),
    ],
)
def test_mistakes_are_one_line(section, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_component("scheduler", {"name": "plateau", **section})
    assert "\n" not in str(caught.value)


def test_a_mode_of_the_threshold_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="threshold_mode is 'relative'"):
        plateau(threshold_mode="relative")


def test_a_validation_metric_without_validation_is_refused():
    one = Trainer(model(), data(), scheduler="plateau", config={"epochs": 1}, progress=False)
    with pytest.raises(ConfigError, match="'val_loss', but there is no validation data"):
        one.train()


def test_per_group_inside_is_kept():
    schedules = plateau(per_group({"head": cosine(10)}))
    assert schedules.of_group("head")(5) == cosine(10)(5)
    assert len(schedules.callbacks) == 1


@pytest.mark.parametrize("changed", [{"monitor": "val_accuracy"}, {"monitor": "val_loss", "mode": "max"}])
def test_a_run_resumed_with_another_metric_begins_the_count_again(tmp_path, changed):
    """A best loss says nothing about accuracies; the factor so far stays."""
    rates, stopping = Rates(), EarlyStopping(patience=1, min_delta=0.5, **changed)
    trainer(SECTION, config={"epochs": 3}, callbacks=[EarlyStopping(patience=9)], output_dir=tmp_path).train()
    later = {"callbacks": [stopping, rates], "output_dir": tmp_path, "resume": True}
    one = trainer({**SECTION, **changed, "threshold": 0.0}, config={"epochs": 5}, **later)
    one.train()
    assert rates.seen[:8] == pytest.approx([1e-3 * 0.25] * 8)
    assert len(rates.seen) == 8
    assert stopping.monitored.best_epoch == 3
    assert stopping.control.reason.startswith(changed["monitor"])
