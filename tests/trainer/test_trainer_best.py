"""Best, and by what: the monitored metric, its best weights, and where last and best are shown."""

import json

import pytest
import torch
from torch import nn

from etude import BasicTrainingLoop, EarlyStopping, ModelCheckpoint, Trainer, TrainingLoop
from etude.callbacks.best import BestMetric
from etude.checkpoint import CheckpointManager
from etude.core.errors import ConfigError, TrainingError
from etude.core.monitor import Best
from etude.core.task import LossTerm, Task

DATA = [torch.zeros(4, 1)] * 2


class Scripted(Task):
    """Trains a counter; validation reports a score that goes up and down with it."""

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, model, batch, *, metrics):
        loss = model(batch).sum()
        if torch.is_grad_enabled():
            return {"loss": LossTerm(loss, 1)}
        step = round(-model.bias.item())
        return {
            "loss": LossTerm(torch.tensor(self.scores.get(step, 9.0)), 1),
            "thing": LossTerm(torch.tensor(2.0), 1, 0.0),
        }


def trainer(scores, folder=None, *, val=True, epochs=4, **settings):
    """Return a trainer of 2 steps per epoch whose bias is minus the number of steps."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    config = {"epochs": epochs, "gradient_clip_norm": None, "keep_best": 1, **settings}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    more = {"output_dir": folder, "resume": folder is not None}
    task = Scripted(scores)
    data = {"train_loader": DATA, "val_loader": DATA if val else None}
    return Trainer(model, config=config, optimizer=optimizer, task=task, progress=False, **data, **more)


SCORES = {2: 5.0, 4: 1.0, 6: 3.0, 8: 2.0}


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 2)])
@pytest.mark.parametrize("in_folder", [True, False])
def test_the_best_weights_are_restored(tmp_path, mode, best, in_folder):
    one = trainer(SCORES, tmp_path if in_folder else None, monitor="val_loss", mode=mode, restore_best=True)
    one.train()
    assert round(-one.model.bias.item()) == best
    assert one.evaluate()["loss"] == SCORES[best]
    if in_folder:
        assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        (found,) = [event["message"] for event in events if event["kind"] == "restore"]
        assert f"step {best} " in found


def test_without_it_the_last_weights_stay(tmp_path):
    one = trainer(SCORES, tmp_path)
    one.train()
    assert round(-one.model.bias.item()) == 8


@pytest.mark.parametrize("in_folder", [True, False])
def test_training_continues_from_the_last_weights(tmp_path, in_folder):
    one = trainer(SCORES, tmp_path if in_folder else None, epochs=2, restore_best=True, checkpoint_interval=0)
    one.train()
    assert round(-one.model.bias.item()) == 4
    one.train(num_epochs=3)
    assert round(-one.model.bias.item()) == 4
    if in_folder:
        one.save_checkpoint()
        saved = CheckpointManager(tmp_path / "checkpoints").load("last")
        assert saved.meta["step"] == 6
        assert round(-saved.model_state["bias"].item()) == 6


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_the_best_is_exact_after_a_resume(tmp_path, stop):
    for epochs in (stop, 4):
        one = trainer(SCORES, tmp_path, epochs=epochs, restore_best=True, checkpoint_interval=0)
        one.train()
    assert round(-one.model.bias.item()) == 4
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["best"]["step"], result["best"]["epoch"], result["best"]["value"]) == (4, 2, 1.0)
    assert (result["last"]["step"], result["last"]["epoch"], result["last"]["value"]) == (8, 4, 2.0)
    assert result["restored"] is True


@pytest.mark.parametrize("settings", [{"monitor": "val_thing", "mode": "max"}, {"mode": "max"}])
def test_the_best_of_another_metric_is_not_that_of_a_resumed_run(tmp_path, settings):
    trainer({**SCORES, 2: 50.0}, tmp_path, epochs=1).train()
    one = trainer(SCORES, tmp_path, **settings)
    one.train()
    result = json.loads((tmp_path / "result.json").read_text())
    value = {"val_thing": 2.0, None: 3.0}[settings.get("monitor")]
    assert (result["best"]["value"], result["mode"]) == (value, "max")


def test_validations_inside_an_epoch_count(tmp_path):
    scores = {one: float(abs(one - 3)) for one in range(9)}
    one = trainer(scores, tmp_path, validate_every_steps=1, restore_best=True)
    one.train()
    assert round(-one.model.bias.item()) == 3
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["best"]["step"], result["best"]["epoch"]) == (3, 2)


def test_a_metric_of_training_without_validation(tmp_path):
    one = trainer({}, tmp_path, val=False, monitor="loss", restore_best=True)
    one.train()
    assert json.loads((tmp_path / "result.json").read_text())["best"]["step"] == 8
    assert CheckpointManager(tmp_path / "checkpoints").monitor == "loss"


def test_a_metric_that_is_not_reported_is_an_error_after_the_first_validation(tmp_path):
    one = trainer(SCORES, tmp_path, monitor="val_f1")
    with pytest.raises(TrainingError, match=r"'val_f1'.*val_loss, val_thing"):
        one.train()
    assert one.state.clock.step == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"monitor": "val_thing"}, "val_thing.*mode"),
        ({"monitor": "val_los"}, "did you mean 'val_loss'"),
        ({"mode": "least"}, "mode"),
        ({"monitor": "val_accuracy", "mode": "min"}, "val_accuracy.*max"),
        ({"restore_best": True, "keep_best": 0}, "keep_best"),
        ({"monitor": "val_f1", "val": False}, "training.monitor.*val_f1.*validation"),
        ({"restore_best": True, "val": False}, "training.restore_best.*val_loss.*validation"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        trainer(SCORES, **settings)


def test_callbacks_and_checkpoints_follow_the_same_metric(tmp_path):
    stop, keep = EarlyStopping(patience=1), ModelCheckpoint("best.safetensors")
    model = nn.Linear(1, 1)
    one = trainer(SCORES, tmp_path, monitor="val_thing", mode="max")
    two = Trainer(
        model,
        DATA,
        DATA,
        task=one.task,
        config=one.config,
        callbacks=[stop, keep],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        output_dir=tmp_path / "two",
        progress=False,
    )
    one.task.scores = dict.fromkeys(range(-9, 9), 1.0)
    two.train()
    assert two.state.clock.epoch == 2  # the metric is the same in every epoch
    assert (stop.monitored.name, keep.monitored.mode) == ("val_thing", "max")
    assert CheckpointManager(tmp_path / "two" / "checkpoints").best().name == "step-00000002"


def test_last_and_best_are_displayed(tmp_path, capsys):
    one = trainer(SCORES, tmp_path)
    Trainer(
        one.model, DATA, DATA, task=one.task, config=one.config, optimizer=one.optimizer, output_dir=tmp_path / "two"
    ).train()
    shown = capsys.readouterr().out
    assert "best val loss 1.0000 in epoch 2 (step 4), last 2.0000 in epoch 4 (step 8)" in shown


@pytest.mark.parametrize("fit", [False, True])
def test_after_training_the_model_is_in_evaluation_mode(fit):
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    data = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    if fit:
        BasicTrainingLoop(model, progress=False).fit(data, epochs=1)
    else:
        Trainer(model, data, config={"epochs": 1}, progress=False).train()
    assert not any(module.training for module in model.modules())


def test_a_loop_tries_its_validation_data_before_the_first_step():
    model = nn.Linear(3, 2)
    data = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    before = model.weight.detach().clone()
    wrong = torch.randn(8, 4), torch.tensor([0, 1] * 4)
    with pytest.raises(Exception, match="4") as caught:
        TrainingLoop().train_epoch(model, data, torch.optim.SGD(model.parameters()), val_dataloader=wrong)
    assert "before the first step" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("in_folder", [True, False])
def test_with_a_moving_average_the_best_weights_are_averages(tmp_path, in_folder):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    config = {"epochs": 6, "batch_size": 4, "ema": 0.5, "restore_best": True, "monitor": "val_loss", "mode": "max"}

    def made(**more):
        torch.manual_seed(0)
        return Trainer(nn.Linear(3, 1), (x, y), (x.flip(0), y), config=config, progress=False, **more)

    one, whole = made(output_dir=tmp_path if in_folder else None), made()
    one.train()
    best = one.output.judge.best
    assert best.best.step < best.last.step
    assert one.evaluate()["loss"] == best.best.value
    assert one.train(num_epochs=7)["val_loss"] == whole.train(num_epochs=7)["val_loss"]


def test_a_run_that_stops_early_also_ends_with_its_best_weights(tmp_path):
    one = trainer(SCORES, tmp_path, restore_best=True)
    more = {"config": one.config, "optimizer": one.optimizer, "task": one.task, "progress": False}
    stop = EarlyStopping(patience=1)
    Trainer(one.model, DATA, DATA, callbacks=[stop], output_dir=tmp_path / "two", **more).train()
    assert stop.control.reason
    assert round(-one.model.bias.item()) == 4


def test_a_value_that_is_not_finite_is_never_the_best_and_survives_a_resume(tmp_path):
    scores = {2: float("nan"), 4: 1.0, 6: float("inf"), 8: float("nan")}
    for epochs in (1, 3, 4):
        one = trainer(scores, tmp_path, epochs=epochs, restore_best=True)
        one.train()
    assert round(-one.model.bias.item()) == 4
    assert one.output.judge.best.last.step == 8


@pytest.mark.parametrize("phases", [1, 2])
def test_a_metric_may_come_in_a_later_phase_also_after_a_resume(phases):
    first, second = (BestMetric(Best("val_f1", "max"), required=True) for _ in range(2))
    first.on_phase_begin("one", {"number": 1, "phases": phases})
    second.load_state_dict(first.state_dict())
    if phases == 2:
        second.on_validation_end(0, {"val_loss": 1.0})
    else:
        with pytest.raises(TrainingError, match="val_f1"):
            second.on_validation_end(0, {"val_loss": 1.0})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"monitor": "val_loss", "mode": "max"}, ["largest 'val_loss'"]),
        ({"mode": "max"}, ["largest 'val_loss'"]),
        ({"monitor": "val_loss", "mode": "min"}, []),
        ({"monitor": "val_thing", "mode": "min"}, []),
    ],
)
def test_a_mode_that_contradicts_the_metric_is_one_warning_at_the_start(settings, words, tmp_path, caplog):
    trainer(SCORES, tmp_path, epochs=1, **settings).train()
    found = [record.getMessage() for record in caplog.records if "mode is" in record.getMessage()]
    assert [word for word, text in zip(words, found, strict=True) if word in text] == words
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["kind"] == "warning"] == found


@pytest.mark.parametrize("of_run", [True, False])
def test_a_callback_warns_of_its_own_mode_only(of_run, caplog):
    one = trainer(SCORES, epochs=1, **({"mode": "max"} if of_run else {}))
    stopping = EarlyStopping() if of_run else EarlyStopping("val_loss", mode="max")
    one.callbacks.append(stopping)
    one.train()
    odd = [record.getMessage() for record in caplog.records if "mode is" in record.getMessage()]
    assert [text.startswith("EarlyStopping") for text in odd] == [not of_run]
