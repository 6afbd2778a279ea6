"""`etude schedule plot`: what a run would schedule, in the terminal and in a file, and `config check` of schedules."""

import pytest
import yaml

SCHEDULER = {
    "name": "per_group",
    "default": {"name": "by_setting", "lr": {"name": "wsd", "warmup_steps": 4}, "weight_decay": {"name": "linear"}},
    "groups": {"biases": "cosine"},
}
OPTIMIZER = {"name": "adamw", "lr": 0.01, "groups": [{"params": "*.bias", "name": "biases", "lr": 0.04}]}


def experiment(config, **more):
    return config(scheduler=SCHEDULER, optimizer=OPTIMIZER, **more)


def test_every_group_and_setting_is_drawn(etude, config):
    outcome = etude("schedule", "plot", experiment(config))
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "lr"
    assert any(line.split() == ["a", "lr", "b", "lr/biases"] for line in lines)
    assert "weight_decay" in lines
    assert lines[1].split()[0] == "0.04"  # the highest rate
    assert not list(config().parent.glob("runs"))


def test_the_data_is_not_needed_where_the_length_is_known(etude, config, tmp_path):
    missing = {"name": "arrays", "path": str(tmp_path / "none.npz")}
    model = {"name": "mlp", "in_features": 4, "hidden": [8], "out_features": 2}
    known = experiment(config, data=missing, model=model, training={"max_steps": 500})
    outcome = etude("schedule", "plot", known)
    assert (outcome.code, "499 step" in outcome.out) == (0, True)
    by_epoch = etude("schedule", "plot", known, "training.epochs=3")
    assert (by_epoch.code, "none.npz" in by_epoch.error) == (2, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 8},
        {"batch_size": {0: 8, 1: 16}, "grad_accum_steps": {0: 1, 2: 2}},
        {"freeze": "*.bias", "unfreeze": {1: "*.bias"}},
    ],
)
def test_the_curves_are_the_rates_of_the_run(config, settings):
    from etude.experiment import build_trainer, load_config, schedule_curves

    loaded = load_config(experiment(config, training={"epochs": 3, "device": "cpu", **settings}))
    curves, depends = schedule_curves(loaded)
    assert not depends
    trainer = build_trainer(loaded, progress=False)
    found = {one.name: one.y.tolist() for one in curves}
    assert len(curves[0].x) == trainer.total_steps
    for step in range(trainer.total_steps):
        trainer.learning_rate.set(step)
        now = trainer.step.updater.rates() | trainer.learning_rate.others()
        assert now == {name: values[step] for name, values in found.items()}


@pytest.mark.parametrize("override", ["training.batch_size={0: 8, 1: 16}", "training.grad_accum_steps={0: 1, 1: 2}"])
@pytest.mark.parametrize("command", [("schedule", "plot"), ("train", "-q")])
def test_epochs_of_different_lengths_are_no_unit(etude, config, command, override):
    file = config(scheduler={"name": "step", "step_size": 1, "unit": "epoch"}, training={"epochs": 2})
    outcome = etude(*command, file, override)
    assert (outcome.code, "steps_per_epoch is unknown" in outcome.error) == (2, True)


def test_a_picture(etude, config, tmp_path):
    pytest.importorskip("matplotlib")
    outcome = etude("schedule", "plot", experiment(config), "--out", tmp_path / "schedule.png")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "schedule.png").read_bytes()[:4] == b"\x89PNG"


def test_a_factor_of_a_metric_is_mentioned(etude, config):
    outcome = etude("schedule", "plot", config(scheduler={"name": "plateau"}))
    assert "metric" in outcome.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scheduler.groups={head: cosine}", ("scheduler", "'head'", "biases")),
        ("scheduler.default.weight_decy=cosine", ("weight_decy", "weight_decay")),
        ("scheduler.default.lr.cooldown_fraction=2", ("cooldown_fraction", "at most 1")),
        ("scheduler.default.lr.warmup_steps=-1", ("warmup_steps", "at least 0")),
        ("scheduler.default.lr={name: wsd, warmup_steps: 70, cooldown_steps: 70}", ("longer than the run",)),
    ],
)
@pytest.mark.parametrize("command", [("config", "check"), ("schedule", "plot"), ("train", "-q")])
def test_mistakes_are_one_line_before_anything_is_trained(etude, config, command, override, words):
    file = experiment(config, training={"max_steps": 100, "batch_size": 8, "device": "cpu", "epochs": 1000})
    outcome = etude(*command, file, override)
    assert outcome.code == 2
    assert all(word in outcome.error for word in words)


def test_help_and_an_unknown_experiment(etude):
    assert "plot" in etude("schedule", "--help").out
    assert "EXPERIMENT" in etude("schedule", "plot", "--help").out
    assert etude("schedule", "plot", "nothing").code == 2


GROUPED = """
from torch import nn

from etude import register


@register("model", "{name}")
class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.top = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.top(self.body(x))

    def parameter_groups(self):
        groups = {{"body": self.body, "top": self.top}}
        return [{{"params": list(one.parameters()), "name": name}} for name, one in groups.items()]
"""


def test_groups_and_the_output_layer_are_those_of_the_model(etude, config, tmp_path):
    (tmp_path / "grouped.py").write_text(GROUPED.format(name="cli_grouped"))
    more = {"imports": [*yaml.safe_load(config().read_text())["imports"], "grouped.py"], "model": "cli_grouped"}
    file = config(scheduler={"name": "per_group", "groups": {"top": "cosine"}}, **more)
    assert etude("config", "check", file).code == 0
    assert "b lr/top" in " ".join(etude("schedule", "plot", file).out.split())
    for command in ("config", "check"), ("train", "-q"):
        outcome = etude(*command, file, "optimizer=muon")
        assert (outcome.code, "no hidden matrices" in outcome.error) == (2, True)
