"""Learning rates through every door: the rate of a step is that of its number, whoever counts the epochs."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

from etude import BasicTrainingLoop, Callback, DataLoader, Trainer, TrainingLoop
from etude.core import ConfigError
from etude.optim import SGD, AdamW, by_setting, cosine, warmup_cosine


def data(samples=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Rates(Callback):
    """Remembers the rate of every step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_step_end(self, report):
        self.seen.append(report.lr)


class StopAt(Callback):
    """Stops after a number of steps of the run."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_step_end(self, report):
        self.control.stop |= self.clock.step == self.step


class Endless:
    """Batches whose number is not known."""

    def __iter__(self):
        return iter([data(8)] * 4)


def schedules(total):
    return {
        "warmup_cosine": warmup_cosine(total, total // 4),
        "halving": lambda step: 0.5 ** (step // 3),
    }


# ------------------------------------------------------------------ loops by epoch


@pytest.mark.parametrize("kind", ["warmup_cosine", "halving"])
@pytest.mark.parametrize("loops", ["one", "one each epoch"])
@pytest.mark.parametrize("tensor", [False, True])
def test_epoch_by_epoch_the_rate_is_base_times_the_factor_of_the_step(kind, loops, tensor):
    """Not of the rate that the epoch before ended with: factors do not compound."""
    one, loader, rates = model(), DataLoader(*data(), 8), Rates()
    schedule = schedules(30)[kind]
    optimizer = torch.optim.AdamW(one.parameters(), lr=torch.tensor(0.5) if tensor else 0.5, foreach=False)
    ends, loop = [], TrainingLoop(callbacks=[rates])
    for epoch in range(5):
        if loops == "one each epoch" and epoch:
            loop, state = TrainingLoop(callbacks=[rates]), loop.state_dict()
            loop.load_state_dict(state)
        ends.append(loop.train_epoch(one, loader, optimizer, schedule, epoch).lr)
    assert rates.seen == pytest.approx([0.5 * schedule(step) for step in range(30)])
    assert ends == pytest.approx([0.5 * schedule(step) for step in range(5, 30, 6)])


def test_a_second_fit_begins_from_the_base_rate():
    one, rates = model(), Rates()
    optimizer = SGD(one.parameters(), lr=0.5)
    loop = BasicTrainingLoop(one, optimizer, cosine(18), callbacks=[rates], config={"batch_size": 8}, progress=False)
    loop.fit(data(), epochs=3)
    assert optimizer.get_lr() < 0.01
    loop.fit(data(), epochs=3)
    assert rates.seen == pytest.approx(2 * [0.5 * cosine(18)(step) for step in range(18)])


def test_the_schedule_goes_on_in_a_new_process_bit_for_bit():
    def run(stop_after):
        one, loader = model(), DataLoader(*data(), 8)
        one.insert(1, nn.Dropout(0.3))
        optimizer, loop = AdamW(one.parameters(), lr=0.05), TrainingLoop(seed=3)
        torch.manual_seed(1)
        saved = None
        for epoch in range(4):
            loop.train_epoch(one, loader, optimizer, warmup_cosine(24, 6), epoch)
            if epoch + 1 == stop_after:
                saved = copy.deepcopy((one.state_dict(), optimizer.state_dict(), loop.state_dict()))
        return one, saved

    straight, saved = run(stop_after=2)
    other, loop = model(), TrainingLoop(seed=3)
    other.insert(1, nn.Dropout(0.3))
    optimizer = AdamW(other.parameters(), lr=0.05)
    torch.rand(7)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loop.load_state_dict(saved[2])
    for epoch in (2, 3):
        loop.train_epoch(other, DataLoader(*data(), 8), optimizer, warmup_cosine(24, 6), epoch)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), other.parameters(), strict=True))
    assert (loop.clock.step, loop.clock.samples) == (24, 192)


# ------------------------------------------------------------------ Trainer


def trainer(config, rates=None, optimizer=None, **more):
    callbacks = [rates] if rates is not None else []
    settings = {"batch_size": 8, "learning_rate": 0.5, **config}
    return Trainer(model(), data(), config=settings, optimizer=optimizer, callbacks=callbacks, progress=False, **more)


def test_training_on_takes_the_base_rate_not_the_present_one():
    rates = Rates()
    one = trainer({"warmup_steps": 3, "epochs": 2}, rates)
    one.train()
    one.train(num_epochs=4)
    expected = [warmup_cosine(12, 3)(step) for step in range(12)] + [warmup_cosine(24, 3)(s) for s in range(12, 24)]
    assert rates.seen == pytest.approx([0.5 * factor for factor in expected])


@pytest.mark.parametrize("keep", [False, True])
def test_the_base_rate_after_loading_is_that_of_the_checkpoint_or_of_the_config(tmp_path, keep):
    schedule = warmup_cosine(24, 3)
    one = trainer({"epochs": 2}, scheduler=schedule, output_dir=tmp_path / "run")
    one.train()
    rates = Rates()
    other = trainer({"epochs": 4, "learning_rate": 0.125}, rates, scheduler=schedule)
    other.load_checkpoint(tmp_path / "run", keep_hyperparameters=keep)
    other.train()
    base = 0.125 if keep else 0.5
    assert rates.seen == pytest.approx([base * schedule(step) for step in range(12, 24)])


def test_a_torch_scheduler_keeps_the_rates_of_its_checkpoint(tmp_path):
    def make(lr, rates, **more):
        one = model()
        optimizer = SGD(one.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        config = {"batch_size": 8, "save_every_steps": 9, "epochs": 4}
        settings = {"optimizer": optimizer, "scheduler": scheduler, "callbacks": [rates], "progress": False, **more}
        return Trainer(one, data(), config=config, **settings)

    rates, seen = Rates(), Rates()
    make(0.5, rates, output_dir=tmp_path / "run").train()
    again = make(0.125, seen)
    path = tmp_path / "run" / "checkpoints" / "step-00000009"
    with pytest.raises(ConfigError, match="torch scheduler"):
        again.load_checkpoint(path, keep_hyperparameters=True)
    again.load_checkpoint(path)
    again.train()
    assert seen.seen == pytest.approx(rates.seen[9:])


# ------------------------------------------------------------------ as long as the run


def factors(schedule, total):
    return [0.5 * schedule(step) for step in range(total)]


@pytest.mark.parametrize("num_epochs", [1, 3, 5, 10])
@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({"warmup_steps": 3}, lambda total: warmup_cosine(total, 3)),
        ({"use_scheduler": True, "scheduler_type": "cosine"}, lambda total: cosine(total)),
        ({"scheduler_type": "linear"}, lambda total: lambda step: 1 - step / total),
    ],
)
@pytest.mark.parametrize("door", ["train", "fit"])
def test_a_schedule_of_the_config_is_as_long_as_the_run(door, config, schedule, num_epochs):
    """`train(num_epochs=N)` and `fit(epochs=N)` take the place of the config's epochs, for the schedule too."""
    rates, settings = Rates(), {"epochs": 5, "batch_size": 8, "learning_rate": 0.5, **config}
    if door == "train":
        trainer(settings, rates).train(num_epochs=num_epochs)
    else:
        BasicTrainingLoop(model(), callbacks=[rates], config=settings, progress=False).fit(data(), epochs=num_epochs)
    assert rates.seen == pytest.approx(factors(schedule(6 * num_epochs), 6 * num_epochs))


def test_the_schedule_of_a_file_stretches_too(tmp_path):
    from etude.experiment import build_trainer, load_config

    (tmp_path / "parts.py").write_text(
        "import torch\nfrom etude.config import register\nfrom etude.data import DataSplits\n\n\n"
        "@register('data', 'of_this_test')\ndef made() -> DataSplits:\n"
        "    return DataSplits(train=(torch.randn(48, 4), torch.arange(48) % 2))\n"
    )
    (tmp_path / "one.yaml").write_text(
        "imports: [parts.py]\nmodel: {name: mlp, in_features: 4, hidden: [8], out_features: 2}\ndata: of_this_test\n"
        "optimizer: {name: sgd, lr: 0.5}\n"
        "scheduler: {name: warmup, warmup_steps: 3, schedule: {name: cosine, min_lr_ratio: 0.1}}\n"
        "training: {epochs: 2, batch_size: 8}\n"
    )
    rates = Rates()
    one = build_trainer(load_config(tmp_path / "one.yaml"), progress=False)
    one.callbacks.append(rates)
    one.train(num_epochs=4)
    assert rates.seen == pytest.approx(factors(warmup_cosine(24, 3), 24))


def test_resumed_with_the_same_plan_is_the_same_run_and_with_another_plan_that_one(tmp_path):
    config = {"epochs": 2, "warmup_steps": 3, "save_every_steps": 9}
    straight = trainer(config, output_dir=tmp_path / "run")
    straight.train(num_epochs=4)
    for num_epochs, same in ((4, True), (6, False)):
        rates = Rates()
        again = trainer(config, rates)
        again.load_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000009")
        again.train(num_epochs=num_epochs)
        pairs = zip(straight.model.parameters(), again.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == same
        assert rates.seen == pytest.approx(factors(warmup_cosine(6 * num_epochs, 3), 6 * num_epochs)[9:])


def test_a_warmup_longer_than_the_run_is_shortened_with_one_warning(caplog):
    rates = Rates()
    trainer({"warmup_steps": 2000, "epochs": 1}, rates).train(num_epochs=5)
    assert rates.seen == pytest.approx(factors(warmup_cosine(30, 3), 30))
    assert [record.message for record in caplog.records if "warmup_steps is 2000" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


# ------------------------------------------------------------------ the keys of the config


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({}, None),
        ({"use_scheduler": True}, warmup_cosine(30, 3)),
        ({"use_scheduler": True, "warmup_steps": 5}, warmup_cosine(30, 5)),
        ({"use_scheduler": True, "scheduler_type": "cosine_annealing"}, cosine(30)),
        ({"use_scheduler": False, "scheduler_type": "cosine", "warmup_steps": 5}, None),
        ({"scheduler_type": "inverse_sqrt", "warmup_steps": 5}, lambda s: s / 5 if s < 5 else (5 / s) ** 0.5),
    ],
)
def test_keys_of_a_schedule_mean_the_same_in_python_and_in_a_file(config, schedule, tmp_path):
    from etude.experiment import load_config

    expected = [0.5] * 30 if schedule is None else factors(schedule, 30)
    (tmp_path / "one.yaml").write_text(json.dumps({"training": {**config, "learning_rate": 0.5, "epochs": 5}}))
    loaded = load_config(tmp_path / "one.yaml").training
    for settings in ({**config, "epochs": 5}, {**loaded.model_dump(), "batch_size": 8}):
        rates = Rates()
        trainer(settings, rates).train()
        assert rates.seen == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"scheduler_type": "nonsense"}, "nonsense.*cosine"),
        ({"scheduler_type": "cosin"}, "cosin.*did you mean 'cosine'"),
        ({"scheduler_type": "step"}, "step_size"),
        ({"scheduler_type": "cosine", "warmup_steps": 3}, "warmup_steps"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused_when_the_trainer_is(config, words):
    with pytest.raises(ConfigError, match=words) as refused:
        trainer({"use_scheduler": True, **config})
    assert "\n" not in str(refused.value)


def test_a_scheduler_beside_use_scheduler_false_is_refused():
    with pytest.raises(ConfigError, match="use_scheduler is false"):
        trainer({"use_scheduler": False}, scheduler=cosine(9))


def test_a_schedule_without_an_end_is_refused_when_the_trainer_is_made():
    batches = ((x, y) for x, y in [data()])
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        Trainer(model(), lambda: batches, config={"warmup_steps": 3}, progress=False)
    Trainer(model(), lambda: batches, config={"warmup_steps": 3, "max_steps": 9}, progress=False)
    only_measured = Trainer(model(), val_loader=data(), config={"warmup_steps": 3}, progress=False)
    assert only_measured.evaluate()["loss"] > 0


@pytest.mark.parametrize("scheduler", ["cosine", {"name": "linear"}, lambda step: 1.0])
def test_a_scheduler_and_a_config_that_turns_it_off_contradict(scheduler):
    with pytest.raises(ConfigError, match="use_scheduler"):
        Trainer(model(), data(), scheduler=scheduler, config={"use_scheduler": False}, progress=False)


@pytest.mark.parametrize("setting", [{"warmup_steps": 3}, {"scheduler_type": "linear"}], ids=str)
def test_settings_of_a_schedule_beside_a_scheduler_do_nothing_and_are_warned_of(setting, caplog):
    with caplog.at_level(logging.WARNING, logger="etude"):
        Trainer(model(), data(), scheduler=lambda step: 1.0, config=setting, progress=False)
    assert [f"training.{name}" in caplog.text for name in setting] == [True]


# ------------------------------------------------------------------ other settings, and groups


SCHEDULED = {
    "name": "warmup",
    "warmup_steps": 3,
    "schedule": {
        "name": "by_setting",
        "lr": {"name": "per_group", "default": "cosine", "groups": {"first": {"name": "wsd", "cooldown_steps": 5}}},
        "weight_decay": {"name": "linear", "start": 0.2, "end": 1.0},
        "beta2": {"name": "cosine", "start": 0.9, "min_lr_ratio": 1.0},
    },
}
GROUPED = {"name": "adamw", "lr": 0.05, "weight_decay": 0.3, "groups": [{"params": "0.*", "name": "first"}]}


class Stop(Rates):
    def on_step_end(self, report):
        super().on_step_end(report)
        self.control.stop |= len(self.seen) == 10


def test_settings_and_groups_resume_bit_for_bit_and_are_logged(tmp_path):
    def run(folder, callback, path=None):
        config = {"batch_size": 8, "epochs": 4, "log_interval": 1}
        parts = {"optimizer": GROUPED, "scheduler": SCHEDULED, "callbacks": [callback], "progress": False}
        one = Trainer(model(), data(), config=config, output_dir=folder, **parts)
        if path is not None:
            one.load_checkpoint(path)
        one.train()
        return one

    straight = run(tmp_path / "straight", Rates())
    run(tmp_path / "stopped", Stop())
    again = run(None, Rates(), tmp_path / "stopped")
    pairs = zip(straight.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    lines = (tmp_path / "straight/metrics.jsonl").read_text().splitlines()
    logged = [one for one in map(json.loads, lines) if one.get("split") == "train"]
    decays = [0.3 * (0.2 + 0.8 * max(0, step - 3) / 21) for step in range(24)]  # it waits for the warm-up
    assert [one["weight_decay"] for one in logged] == pytest.approx(decays)
    assert logged[-1]["beta2"] == pytest.approx(0.999, abs=1e-3)
    assert [one["lr/first"] for one in logged][3:17] == pytest.approx([0.05] * 14)
    assert logged[20]["lr/first"] < 0.05


def test_weights_follow_a_scheduled_weight_decay_as_in_a_loop_of_torch():
    one, x = model(), data()
    reference = copy.deepcopy(one)
    schedule = {"name": "by_setting", "weight_decay": "linear", "momentum": {"name": "linear", "end": 0.5}}
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.2}
    config = {"epochs": 6, "batch_size": 48, "gradient_clip_norm": None}
    Trainer(one, DataLoader(*x, 48, shuffle=False), config=config, optimizer=optimizer, scheduler=schedule,
            progress=False).train()  # fmt: skip
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.8, weight_decay=0.2)
    for step in range(6):
        theirs.param_groups[0].update(weight_decay=0.2 * (1 - step / 6), momentum=0.8 * (1 - 0.5 * step / 6))
        theirs.zero_grad()
        nn.functional.cross_entropy(reference(x[0]), x[1]).backward()
        theirs.step()
    for mine, other in zip(one.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_lengths_beyond_the_run_are_warned_of(caplog):
    trainer({"epochs": 2}, scheduler={"name": "cosine", "total_steps": 100})
    trainer({"epochs": 2}, scheduler={"name": "multistep", "milestones": [1, 3], "unit": "epoch"})
    trainer(
        {"epochs": 2}, scheduler={"name": "warmup", "warmup_steps": 2, "schedule": {"name": "step", "step_size": 13}}
    )
    trainer({"epochs": 2}, scheduler={"name": "sgdr", "first_period": 12})  # not longer
    words = [record.message for record in caplog.records]
    places = ["scheduler.total_steps", "scheduler.milestones", "scheduler.schedule.step_size"]
    assert [text.split(":")[0] for text in words] == places
    assert all("12 of the run" in text for text in words)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ({"name": "multistep", "milestones": [6, 12]}, 1),  # the rate would change after the last step
        ({"name": "step", "step_size": 12}, 1),
        ({"name": "multistep", "milestones": [6, 11]}, 0),
        ({"name": "cosine_restarts", "first_period": 12}, 0),
        ({"name": "cosine", "total_steps": 12}, 0),
    ],
)
def test_a_change_at_the_very_end_of_the_run_is_warned_of(schedule, count, caplog):
    trainer({"epochs": 2}, scheduler=schedule).train()
    assert caplog.text.count("of the run") == count


def test_a_schedule_with_a_length_of_its_own_needs_none_of_the_run():
    one = Trainer(
        model(), Endless(), config={"epochs": 1}, scheduler={"name": "linear", "total_steps": 8}, progress=False
    )
    assert one.train()["lr"] == pytest.approx(3e-4 * 5 / 8)


def test_a_warmup_of_inverse_sqrt_is_shortened_too(caplog):
    rates = Rates()
    trainer({"scheduler_type": "inverse_sqrt", "epochs": 5}, rates).train()
    assert max(rates.seen) == rates.seen[3] == 0.5
    assert caplog.text.count("warmup_steps is 2000") == 1


def test_a_name_is_refused_where_no_length_is_known():
    one = model()
    with pytest.raises(ConfigError, match="length of the run"):
        TrainingLoop().train_epoch(one, DataLoader(*data(), 8), SGD(one.parameters()), "cosine")


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (lambda _: 0.0, ["0 in all 18 steps"]),
        ({"name": "cosine", "total_steps": 6}, ["0 from step 6 of 18 on"]),
        (lambda step: 1 - step / 17, []),  # only the last step
        ("cosine", []),
        ({"name": "warmup", "warmup_steps": 6, "schedule": "linear"}, []),
    ],
)
def test_a_rate_of_zero_to_the_end_of_the_run_is_one_warning(scheduler, words, caplog):
    one = Trainer(model(), data(), config={"epochs": 3, "batch_size": 8}, scheduler=scheduler, progress=False)
    one.train()
    said = [record.getMessage() for record in caplog.records if "nothing is learned" in record.getMessage()]
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


@pytest.mark.parametrize(("lr", "is_said"), [(0.0, True), (1e-9, False)])
@pytest.mark.parametrize("scheduler", [None, "cosine"])
def test_an_optimizer_with_a_rate_of_zero_is_a_warning(lr, is_said, scheduler, caplog):
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=lr)
    config = {"epochs": 1, "batch_size": 8}
    Trainer(one, data(), config=config, optimizer=optimizer, scheduler=scheduler, progress=False).train()
    assert is_said == any("nothing is learned" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["batch_size", "grad_accum_steps"])
@pytest.mark.parametrize(("epoch", "is_late"), [(1, False), (2, True)])
def test_a_size_that_changes_after_the_last_epoch_is_a_warning(name, epoch, is_late, caplog):
    config = {"epochs": 2, "batch_size": 8, name: {0: 2, epoch: 4}}
    Trainer(model(), data(), config=config, progress=False).train()
    assert is_late == any(f"training.{name} changes in epoch {epoch}" in one.getMessage() for one in caplog.records)


def test_a_setting_that_is_no_longer_scheduled_has_its_base_value(tmp_path):
    settings = {"name": "adamw", "lr": 0.5, "weight_decay": 0.4, "betas": [0.8, 0.9]}
    both = by_setting(lr=cosine(24), weight_decay=cosine(24), beta1=cosine(24))
    trainer({"epochs": 2, "learning_rate": None}, None, settings, scheduler=both, output_dir=tmp_path / "run").train()
    kept = by_setting(lr=cosine(24), beta1=cosine(24))
    other = trainer({"epochs": 3, "learning_rate": None}, None, settings, scheduler=kept)
    other.load_checkpoint(tmp_path / "run")
    other.train()
    (group,) = other.optimizer.param_groups
    assert group["weight_decay"] == 0.4
    assert group["betas"] == (0.8 * cosine(24)(17), 0.9)


@pytest.mark.parametrize("later", [None, cosine(24)])
@pytest.mark.parametrize("door", ["fit", "train_epoch"])
def test_another_schedule_on_the_same_optimizer_begins_with_its_values(door, later):
    one = model()
    optimizer = AdamW(one.parameters(), lr=0.5, weight_decay=0.4)
    both = by_setting(lr=cosine(24), weight_decay=cosine(24))
    if door == "fit":
        loop = BasicTrainingLoop(one, optimizer, both, config={"batch_size": 8}, progress=False)
        loop.fit(data(), epochs=2)
        loop.scheduler = later
        loop.fit(data(), epochs=2)
    else:
        epochs = TrainingLoop()
        for epoch, schedule in enumerate((both, later)):
            epochs.train_epoch(one, DataLoader(*data(), 8), optimizer, schedule, epoch)
    assert optimizer.param_groups[0]["weight_decay"] == 0.4


@pytest.mark.parametrize("keep", [False, True])
def test_a_rate_that_a_schedule_has_left_behind_is_a_warning(tmp_path, caplog, keep):
    trainer({"epochs": 2}, scheduler=cosine(24), output_dir=tmp_path / "run").train()
    other = trainer({"epochs": 3})
    other.load_checkpoint(tmp_path / "run", keep_hyperparameters=keep)
    result = other.train()
    assert result["lr"] == pytest.approx(0.5 if keep else 0.5 * cosine(24)(11))
    assert [record.message for record in caplog.records if "base 0.5" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == (not keep)


class Counts(torch.optim.SGD):
    """Counts its steps in the group, as optimizers of some packages do."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure=None):
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def test_kept_hyperparameters_are_arguments_and_not_counts(tmp_path):
    def make(lr, epochs, **more):
        one = model()
        optimizer, config = Counts(one.parameters(), lr=lr), {"batch_size": 8, "epochs": epochs}
        return Trainer(one, data(), config=config, optimizer=optimizer, progress=False, **more)

    make(0.5, 2, output_dir=tmp_path / "run").train()
    other = make(0.125, 3)
    other.load_checkpoint(tmp_path / "run", keep_hyperparameters=True)
    (group,) = other.optimizer.param_groups
    assert (group["lr"], group["count"]) == (0.125, 12)


@pytest.mark.parametrize(
    ("name", "more"), [("adam", {"amsgrad": True}), ("rmsprop", {"centered": True, "momentum": 0.9})]
)
@pytest.mark.parametrize("prefix", ["", "torch"])
def test_a_kept_setting_may_need_state_that_the_checkpoint_lacks(tmp_path, name, more, prefix):
    """It begins with zeros, as in a new optimizer."""
    kind = {"adam": "torch.optim.Adam", "rmsprop": "torch.optim.RMSprop"}[name] if prefix else name

    def make(epochs, folder=None, **settings):
        optimizer = {"name": kind, "lr": 0.01, **settings}
        config = {"batch_size": 8, "epochs": epochs}
        return Trainer(model(), data(), config=config, optimizer=optimizer, output_dir=folder, progress=False)

    make(2, tmp_path / "run").train()
    other = make(3, **more)
    other.load_checkpoint(tmp_path / "run", keep_hyperparameters=True)
    before = [{key: value.clone() for key, value in state.items()} for state in other.optimizer.state.values()]
    assert {"max_exp_avg_sq", "grad_avg"} & set(before[0])
    other.train()
    for state, old in zip(other.optimizer.state.values(), before, strict=True):
        if name == "adam":  # the largest since then
            assert bool((state["max_exp_avg_sq"] >= state["exp_avg_sq"]).all())
        assert float(state["step"]) == float(old["step"]) + 6


def test_settings_of_a_checkpoint_that_differ_from_those_given_are_a_warning(tmp_path, caplog):
    def make(epochs, lr, **more):
        config, optimizer = {"batch_size": 8, "epochs": epochs}, AdamW((one := model()).parameters(), lr=lr)
        return Trainer(one, data(), config=config, optimizer=optimizer, progress=False, **more)

    make(2, 0.5, output_dir=tmp_path / "run", scheduler=cosine(24)).train()
    make(3, 0.5, output_dir=tmp_path / "run", scheduler=cosine(24), resume=True).train()
    assert not caplog.records
    make(4, 0.25, output_dir=tmp_path / "run", scheduler=cosine(24), resume=True).train()
    (record,) = caplog.records
    assert all(word in record.message for word in ("lr 0.5", "0.25", "keep_hyperparameters=True"))


def test_what_a_torch_scheduler_has_changed_is_no_difference(tmp_path, caplog):
    for epochs in (1, 2):
        one = model()
        optimizer = SGD(one.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "output_dir": tmp_path / "run", "resume": True}
        Trainer(one, data(), config={"batch_size": 8, "epochs": epochs}, progress=False, **parts).train()
    assert not caplog.records


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({"batch_size": 20}, 4 + 1 + 2 * 3),  # 16 samples are left of the epoch
        ({"batch_size": 4}, 4 + 4 + 2 * 12),
        ({"grad_accum_steps": 3}, 4 + 1 + 2 * 2),
        ({"batch_size": {0: 8, 2: 24}}, 4 + 2 + 6 + 2),
        ({"batch_size": 20, "drop_last": True}, 4 + 0 + 2 * 2),
    ],
)
@pytest.mark.parametrize("stop", [0, 7, 9])
def test_a_schedule_ends_with_a_run_that_is_resumed_with_other_batches(tmp_path, changed, steps, stop):
    """Also if it is stopped and resumed again: every part of it counts the steps that were taken."""

    def parts(**config):
        rates = Rates()
        settings = {"output_dir": tmp_path, "resume": True, "scheduler": "linear"}
        one = trainer({"epochs": 3, **config}, rates, **settings)
        one.train()
        assert one.total_steps == (steps if changed.items() <= config.items() and "max_steps" not in config else 4)
        return rates.seen

    parts(max_steps=4)
    if stop:
        trainer({"epochs": 3, **changed}, StopAt(stop), output_dir=tmp_path, resume=True, scheduler="linear").train()
    seen = parts(**changed)
    assert seen == pytest.approx([0.5 * (1 - step / steps) for step in range(max(4, stop), steps)])


def test_a_setting_that_no_torch_scheduler_changes_is_a_difference(tmp_path, caplog):
    for decay in (0.1, 0.2):
        optimizer = AdamW((one := model()).parameters(), lr=0.1, weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "output_dir": tmp_path / "run", "resume": True}
        Trainer(one, data(), config={"batch_size": 8, "epochs": 1}, progress=False, **parts).train()
    (record,) = caplog.records
    assert "weight_decay 0.1, not 0.2" in record.message
