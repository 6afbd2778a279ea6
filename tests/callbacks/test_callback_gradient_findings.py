"""What the gradient monitor says: sick layers are named, healthy ones are not; NaN is traced to its layer."""

import json
import logging
import math
import statistics

import pytest
import torch
from monitored_models import Bad, Fragile, backward, data, dense, poisoned, sick, tokens_net, trainer
from torch import nn

from etude import (
    Callback,
    GradientMonitor,
    LanguageModelingLoss,
    LeNet5,
    Trainer,
)
from etude.callbacks.gradient_health import Judge
from etude.cli.process import errors_in_words
from etude.core import Clock, TrainingError
from etude.engine.callback import Gradients, RunInfo
from etude.engine.callback_list import CallbackList
from etude.engine.precision import MixedPrecision

# --- findings


def test_deep_sigmoid_network_vanishes_at_its_input():
    model = dense(*[8] * 14, 4, activation=nn.Sigmoid)
    backward(model)
    norms = {
        f"{2 * i}": math.hypot(*(p.grad.norm() for p in layer.parameters())) for i, layer in enumerate(model[::2])
    }
    limit = max(1e-7, 1e-4 * statistics.median(norms.values()))
    (finding,) = GradientMonitor().check(model).findings
    assert finding.kind == "vanishing"
    assert finding.layers == tuple(name for name, norm in norms.items() if norm < limit)
    assert finding.layers[0] == "0"
    assert "gradient vanishes" in finding.message
    assert "initialisation" in finding.message


def test_single_layer_far_below_the_others_vanishes():
    model = dense(8, 16, 16, 16, 4)
    backward(model)
    for param in model[2].parameters():
        param.grad *= 1e-6
    (finding,) = GradientMonitor().check(model).findings
    assert (finding.kind, finding.layers) == ("vanishing", ("2",))
    assert finding.message.startswith("layer 2: the gradient vanishes (norm ")
    assert "median of layers" in finding.message


def test_huge_initialisation_explodes():
    model = dense(8, 16, 16, 4)
    with torch.no_grad():
        for param in model.parameters():
            param *= 100
    backward(model)
    (finding,) = GradientMonitor().check(model).findings
    assert finding.kind == "exploding"
    assert "initialisation" in finding.message
    for name in finding.layers:
        assert float(torch.cat([p.grad.flatten() for p in model.get_submodule(name).parameters()]).norm()) > 1e3


def test_dead_relu_layer_is_named_after_three_looks():
    model = dense(8, 16, 16, 4)
    with torch.no_grad():
        model[2].bias.fill_(-1e4)  # no unit of the second layer is ever positive
    monitor = GradientMonitor(patience=3)
    for look in range(3):
        backward(model)
        health = monitor.check(model)
        assert health.healthy == (look < 2)
    (finding,) = health.findings
    assert (finding.kind, finding.layers) == ("dead", ("0", "2"))
    assert "exactly zero in the last 3 checks" in finding.message
    with torch.no_grad():
        model[2].bias.zero_()
    backward(model)
    assert monitor.check(model).healthy


def test_unused_parameter_is_named_and_frozen_ones_are_not():
    class WithSpare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.spare, self.frozen = dense(8, 16, 4), nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.body(x)

    model, monitor = WithSpare(), GradientMonitor(patience=2)
    for _ in range(2):
        backward(model)
        health = monitor.check(model)
    (finding,) = health.findings
    assert (finding.kind, finding.layers) == ("unused", ("spare.weight", "spare.bias"))
    assert "requires_grad_(False)" in finding.message
    assert health.layers["spare"] is None


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_first_layer_of_the_backward_pass_that_is_not_finite_is_named(value, word):
    torch.manual_seed(0)
    bad = Bad()
    bad.value = value
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), bad, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    backward(model)
    (finding,) = GradientMonitor().check(model).findings
    assert (finding.kind, finding.layers) == ("non-finite", ("2", "0"))
    assert finding.message.startswith(f"layer 2: the gradient is {'NaN' if word == 'NaN' else ''}")
    assert "first of 2 such layers (of 4)" in finding.message


def test_the_order_is_that_of_the_model_where_dtypes_are_mixed():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    for place, layer in enumerate(model):
        for param in layer.parameters():
            param.grad = torch.full_like(param, 1.0 if place == 3 else math.nan)
    health = GradientMonitor().check(model)
    assert list(health.layers) == ["0", "1", "2", "3"]
    assert health.findings[0].layers == ("2", "1", "0")


def test_loss_that_is_not_finite_is_reported_as_such():
    model = dense(8, 16, 4)
    x, y = data()
    backward(model, x * math.nan, y)
    (finding,) = GradientMonitor().check(model).findings
    assert finding.kind == "non-finite"
    assert "all 2 layers are NaN, so the loss is too" in finding.message


@pytest.mark.parametrize("kind", ["lenet", "transformer", "mlp", "converged"])
def test_healthy_training_is_silent(kind, caplog):
    torch.manual_seed(0)
    monitor = GradientMonitor(every=1)
    config = {"epochs": 3, "batch_size": 16, "log_interval": 5, "device": "cpu", "learning_rate": 3e-3}
    loss = None
    if kind == "lenet":
        x = torch.randn(96, 1, 28, 28)
        model, batches = LeNet5(), (x, (x.mean((1, 2, 3)) > 0).long())
    elif kind == "transformer":
        ids = torch.randint(30, (96, 1)) + torch.arange(12)
        model, batches, loss = tokens_net(vocabulary=50), [{"input_ids": part} for part in ids.split(16)], None
        loss = LanguageModelingLoss()
    else:
        model, batches = dense(8, 32, 32, 4), data(96)
        config["epochs"] = 40 if kind == "converged" else 3
        config["learning_rate"] = 3e-2 if kind == "converged" else 3e-3
    with caplog.at_level(logging.WARNING, "etude"):
        Trainer(model, batches, config=config, loss=loss, callbacks=[monitor], progress=False).train()
    assert monitor.report.healthy
    assert not caplog.records


def test_parameters_that_nobody_updates_are_not_looked_at():
    """Their gradients are not zeroed and add up from step to step."""
    model, monitor = dense(8, 16, 4), GradientMonitor(every=1)
    config = {"epochs": 2, "batch_size": 32, "device": "cpu"}
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    Trainer(model, data(), config=config, optimizer=optimizer, callbacks=[monitor], progress=False).train()
    assert list(monitor.report.layers) == ["2"]


# --- telling


def test_a_run_says_it_once_in_the_log_the_display_and_the_run_folder(tmp_path, caplog, capsys):
    monitor = GradientMonitor(every=2)
    config = {"epochs": 2, "batch_size": 32, "log_interval": 4, "device": "cpu"}
    run = Trainer(sick(), data(), config=config, callbacks=[monitor], output_dir=tmp_path, progress=True)
    run.train()
    shown = capsys.readouterr().out
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (warning,) = [event for event in events if event["kind"] == "warning"]
    assert warning["message"].startswith("layer 2: the gradient vanishes")
    assert (warning["finding"], warning["layers"], warning["step"]) == ("vanishing", ["2"], 4)
    assert shown.count("layer 2: the gradient vanishes") == 1
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "etude"):
        trainer(sick(), GradientMonitor()).train()
    assert [record.getMessage()[:7] for record in caplog.records] == ["layer 2"]


def test_lasting_findings_are_reported_at_growing_intervals():
    model, monitor = sick(), GradientMonitor()
    reported = []
    for look in range(1, 251):
        if look <= 2:
            backward(model)
        health = monitor.check(model)
        assert len(health.findings) == 1
        reported += [look] * len(health.warnings)
    assert reported == [1, 10, 100]


def test_state_holds_what_was_reported_and_what_was_not():
    model = sick()
    first, second = GradientMonitor(every=2), GradientMonitor(every=2)
    run = trainer(model, first)
    run.train()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    backward(model)
    assert second.check(model).findings
    assert not second.report.warnings


@pytest.mark.parametrize("stop_at", [3, 5, 6])
def test_resumed_run_says_what_an_unbroken_one_says(tmp_path, stop_at):
    class Stop(Callback):
        def on_step_end(self, report):
            Stop.seen += 1
            if Stop.seen == stop_at:
                self.control.request_stop("test")

    def run(folder, *more):
        config = {"epochs": 2, "batch_size": 32, "log_interval": 4, "device": "cpu"}
        callbacks = [GradientMonitor(every=1, patience=3), *more]
        return Trainer(sick(), data(), config=config, callbacks=callbacks, output_dir=folder, progress=False)

    def said(folder):
        events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        return [(event["step"], event["message"]) for event in events if event["kind"] == "warning"]

    Stop.seen = 0
    whole = run(tmp_path / "whole")
    whole.train()
    run(tmp_path / "parts", Stop()).train()
    resumed = run(tmp_path / "parts")
    resumed.load_checkpoint(tmp_path / "parts")
    resumed.train()
    assert [message for _, message in said(tmp_path / "parts")] == [m for _, m in said(tmp_path / "whole")]
    assert len(said(tmp_path / "whole")) == 2  # the first and the tenth time
    states = [next(iter(one.callbacks)).state_dict() for one in (whole, resumed)]
    assert states[0] == states[1]


def test_resumed_run_records_the_layers_that_an_unbroken_one_records(tmp_path):
    def run(folder, steps):
        config = {"epochs": None, "max_steps": steps, "batch_size": 32, "log_interval": 2, "device": "cpu"}
        monitor = GradientMonitor(every=4, log_layers=True)
        one = Trainer(dense(8, 8, 4), data(), config=config, callbacks=[monitor], output_dir=folder, progress=False)
        if steps == 8 and folder.name == "parts":
            one.load_checkpoint(folder)
        one.train()

    def layers(folder):
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        logs = {record["step"]: record for record in records if record["split"] == "train"}
        return {step: {k: v for k, v in log.items() if k.startswith("grad_norm/")} for step, log in logs.items()}

    run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 3)  # the look at step 1 is reported at step 4 too, the next one is at step 5
    run(tmp_path / "parts", 8)
    assert layers(tmp_path / "parts") == layers(tmp_path / "whole")
    assert [list(numbers) for numbers in layers(tmp_path / "whole").values()] == [["grad_norm/0", "grad_norm/2"]] * 4


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_main_process_speaks(caplog, is_main):
    monitor = GradientMonitor()
    listed = CallbackList([monitor])
    backward(model := sick())
    model_run = RunInfo("x", model, None, Clock(), torch.device("cpu"), 1, 1, 1, None, is_main=is_main)
    listed.on_train_begin(model_run)
    listed.on_gradients(Gradients(model, (), 1.0, MixedPrecision("fp32")))
    with caplog.at_level(logging.WARNING, "etude"):
        listed.on_log({})
    assert len(caplog.records) == int(is_main)


# --- updates that are not finite


def test_a_single_skipped_update_between_two_looks_is_explained(caplog):
    monitor = GradientMonitor(every=100)
    with caplog.at_level(logging.WARNING, "etude"):
        result = trainer(Fragile(), monitor, poisoned(12, [6]), log_interval=4).train()
    assert result["skipped"] == 1
    layer, epoch = (record.getMessage() for record in caplog.records)
    assert layer.startswith("layer second: the gradient is NaN, the first of 2 such layers (of 3)")
    assert epoch.startswith("1 of 12")


def test_where_asking_would_wait_the_steps_after_a_log_point_are_watched(monkeypatch, caplog):
    """As on a device: the host learns of a skipped update at the log point only."""
    monkeypatch.setattr(GradientMonitor, "on_step_end", Callback.on_step_end)
    monitor = GradientMonitor(every=100)
    with caplog.at_level(logging.WARNING, "etude"):
        trainer(Fragile(), monitor, poisoned(16, [6, 10]), log_interval=4).train()
    assert [record.getMessage()[:12] for record in caplog.records] == ["layer second", "2 of 16 (12%"]
    assert not monitor._watching  # back to its pace
    caplog.clear()
    with caplog.at_level(
        logging.WARNING, "etude"
    ):  # the last step before the log point: its gradients are still there
        trainer(Fragile(), GradientMonitor(every=100), poisoned(5, [4]), log_interval=4).train()
    assert [record.getMessage()[:12] for record in caplog.records] == ["layer second", "1 of 5 (20%)"]


@pytest.mark.parametrize("cpu", [True, False])
def test_error_about_updates_that_are_not_finite_names_the_layer(monkeypatch, cpu, capsys):
    if not cpu:
        monkeypatch.setattr(GradientMonitor, "on_step_end", Callback.on_step_end)
    run = trainer(Fragile(), GradientMonitor(), poisoned(8, range(3, 9)), log_interval=8, max_skipped_steps=5)
    with pytest.raises(TrainingError, match="not finite in the last 6 steps") as raised:
        run.train()
    (note,) = raised.value.__notes__
    assert note.startswith("layer second: the gradient is NaN")
    with pytest.raises(SystemExit), errors_in_words():
        raise raised.value
    first, second = capsys.readouterr().err.splitlines()
    assert "not finite in the last 6 steps" in first
    assert second == f"etude: {note}"


def test_overflow_while_a_loss_scale_adapts_is_no_news():
    bad = {"a.weight": math.inf}
    scaled, plain = (Judge(vanishing=1e-7, exploding=1e3, patience=3) for _ in range(2))
    assert [scaled.judge(step, bad, is_scaled=True).healthy for step in range(12)] == [True] * 10 + [False] * 2
    assert not plain.judge(0, bad).healthy
