"""A moving average of the weights: torch's numbers, what is validated and saved, skipped updates, exact resuming."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from etude import Callback, ModelCheckpoint, Trainer
from etude.callbacks import EMA
from etude.checkpoint import read_checkpoint
from etude.core import CheckpointError, ConfigError
from etude.engine.capture import Capture
from etude.optim.averaging import WeightAverage
from stub_recorder import RunAgain

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
OTHER = torch.randn(16, 6, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Follow(Callback):
    """Averages with torch, and keeps the raw weights and the loss of torch's average at each validation."""

    def __init__(self, start=0, every=1, decay=0.9):
        super().__init__()
        self.start, self.every, self.decay, self.steps, self.losses, self.raw = start, every, decay, 0, [], []

    def on_train_begin(self, run):
        self.model = run.model
        self.theirs = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def on_step_end(self, report):
        if float(report.skipped):
            return
        self.steps += 1
        if self.steps <= self.start:
            self.theirs.module.load_state_dict(self.model.state_dict())
        elif self.steps % self.every == 0:
            if self.start:
                self.theirs.n_averaged.fill_(1)
            self.theirs.update_parameters(self.model)

    @torch.no_grad()
    def on_epoch_end(self, epoch, logs):
        self.raw.append({name: value.clone() for name, value in self.model.state_dict().items()})
        judged = copy.deepcopy(self.theirs.module).eval()
        judged.load_state_dict({**self.model.state_dict(), **dict(judged.named_parameters())})
        inputs, labels = (one.to(next(judged.parameters()).device) for one in OTHER)
        self.losses.append(float(nn.functional.cross_entropy(judged(inputs), labels)))
        self.val = [*getattr(self, "val", []), logs["val_loss"]]


def run(epochs, folder=None, *, ema=0.9, callbacks=(), data=DATA, resume=False, **settings):
    config = {"epochs": epochs, "batch_size": 4, "device": "cpu", "ema": ema, "learning_rate": 0.02, **settings}
    return Trainer(
        net(), data, OTHER, config=config, callbacks=callbacks, progress=False, output_dir=folder, resume=resume
    )


def average_of(trainer):
    return next(one for one in trainer.callbacks if isinstance(one, EMA))


@pytest.mark.parametrize(("start", "every"), [(0, 1), (5, 1), (0, 3), (6, 2)])
@pytest.mark.parametrize("bad", [False, True])
def test_average_is_that_of_torch_and_is_what_is_validated(start, every, bad):
    follow = Follow(start, every)
    data = DATA
    if bad:
        data = DATA[0].clone(), DATA[1]
        data[0][7] = float("nan")  # the update of its batch is skipped
    trainer = run(4, ema={"decay": 0.9, "start": start, "every": every}, callbacks=[follow], data=data)
    trainer.train()
    assert follow.steps == 24 - 4 * bad
    ours = average_of(trainer).weights()
    for name, value in follow.theirs.module.named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(trainer.model.get_parameter(name), ours[name])  # it stays in the model
        assert not torch.equal(follow.raw[-1][name], ours[name])
    assert follow.val == pytest.approx(follow.losses, rel=1e-5)


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("ema", [0.9, {"decay": 0.9, "start": 4, "every": 2}, {"decay": 0.9, "validate": False}])
def test_resumed_run_is_the_uninterrupted_one(ema, stop, tmp_path):
    whole = run(4, ema=ema)
    expected = whole.train()
    run(stop, tmp_path, ema=ema).train()
    resumed = run(4, tmp_path, ema=ema, resume=True)
    assert resumed.train()["val_loss"] == expected["val_loss"]
    for one, two in (
        (whole.model.state_dict(), resumed.model.state_dict()),
        (average_of(whole).state_dict()["weights"], average_of(resumed).state_dict()["weights"]),
    ):
        assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("validate", [True, False])
def test_model_of_a_checkpoint_is_the_one_that_was_validated(validate, tmp_path):
    follow, best = Follow(), ModelCheckpoint("best.safetensors", monitor="val_loss")
    ema = {"decay": 0.9, "validate": validate}
    trainer = run(1, tmp_path, ema=ema, callbacks=[follow, best])
    result = trainer.train()
    theirs = dict(follow.theirs.module.named_parameters())
    saved = read_checkpoint(tmp_path / "checkpoints" / "last").model_state
    for weights in (saved, load_file(best.best_path), trainer.model.state_dict()):
        for name in theirs:
            torch.testing.assert_close(weights[name], theirs[name] if validate else follow.raw[0][name])
    assert trainer.evaluate()["loss"] == result["val_loss"]
    loaded = run(1, ema=ema)
    loaded.load_checkpoint(tmp_path)
    assert loaded.evaluate()["loss"] == result["val_loss"]


def test_training_goes_on_from_the_raw_weights():
    twice, once = run(2), run(2)
    twice.train(num_epochs=1)
    twice.train(num_epochs=2)
    once.train()
    for name, value in once.model.state_dict().items():
        assert torch.equal(value, twice.model.state_dict()[name])


def test_recorded_steps_are_the_usual_ones():
    usual, recorded = run(4), run(4)
    capture = recorded.step.capture = Capture(recorded.step, RunAgain(recorded.step))
    usual.train(), recorded.train()
    assert capture.recorder.replayed > 5
    for name, value in usual.model.state_dict().items():
        torch.testing.assert_close(value, recorded.model.state_dict()[name])
    assert int(average_of(usual).average.count) == int(average_of(recorded).average.count) == 24


def test_tensor_weights_do_what_host_numbers_do():
    """The arithmetic for CUDA, on the CPU."""
    params = [torch.randn(5), torch.randn(3, 2)]
    host, device = (WeightAverage([one.clone() for one in params], 0.9, every=2) for _ in range(2))
    for step in range(7):
        skipped = torch.tensor(float(step == 3))
        for one in (host, device):
            torch._foreach_add_(one.params, 0.1 * (step + 1))
        host.update(skipped)
        device.count.add_(skipped == 0)
        weight = device.weight(skipped == 0)
        device.follow(weight)
        torch.testing.assert_close(host.average, device.average)


def test_an_average_that_begins_with_a_resume_is_a_copy_of_what_was_loaded(tmp_path):
    run(1, tmp_path, ema=None).train()
    resumed = run(2, tmp_path, resume=True)
    average_of(resumed).on_train_begin(resumed._info())
    assert all(torch.equal(one, resumed.model.get_parameter(n)) for n, one in average_of(resumed).weights().items())


@pytest.mark.parametrize("validate", [True, False])
def test_a_run_resumed_without_it_trains_on_with_the_raw_weights_and_says_so(validate, tmp_path, caplog):
    """It ends as a run that never had an average; before it trains, what was validated can still be evaluated."""
    validated = run(1, tmp_path, ema={"decay": 0.9, "validate": validate}).train()["val_loss"]
    resumed, straight = run(3, tmp_path, ema=None, resume=True), run(3, ema=None)
    assert [("ema" in record.message, "raw weights" in record.message) for record in caplog.records] == [(True, True)]
    assert resumed.evaluate()["loss"] == pytest.approx(validated, rel=1e-6)
    resumed.train(), straight.train()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize("validate", [True, False])
def test_a_run_resumed_with_another_validate_trains_on_with_the_raw_weights(validate, tmp_path):
    follow, ema = Follow(), {"decay": 0.9, "validate": validate}
    run(1, tmp_path, ema=ema, callbacks=[follow]).train()
    run(2, whole := tmp_path / "whole", ema=ema).train()
    resumed = run(2, tmp_path, ema={**ema, "validate": not validate}, resume=True)
    resumed.train()
    saved, expected = (read_checkpoint(one / "checkpoints" / "last") for one in (tmp_path, whole))
    average = expected.state["callbacks"]["EMA.0"]["weights"]
    for name, value in saved.state["callbacks"]["EMA.0"]["weights"].items():  # the weights that the model has not
        assert torch.equal(value, expected.model_state[name])
        assert torch.equal(saved.model_state[name], average[name])


def test_tied_weights_of_a_run_resumed_without_it(tmp_path):
    def tied(epochs, ema, folder=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        config = {"epochs": epochs, "batch_size": 4, "device": "cpu", "ema": ema, "learning_rate": 0.02}
        return Trainer(model, DATA, config=config, progress=False, output_dir=folder, resume=folder is not None)

    tied(1, 0.9, tmp_path).train()
    resumed, straight = tied(2, None, tmp_path), tied(2, None)
    resumed.train(), straight.train()
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_averages_of_other_parameters_are_refused(tmp_path):
    trainer = run(1, tmp_path)
    trainer.train()
    state = average_of(trainer).state_dict()
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        average_of(run(1)).load_state_dict({**state, "weights": {**state["weights"], "0.weight": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match="9"):
        average_of(run(1)).load_state_dict({**state, "weights": {**state["weights"], "9": torch.zeros(2)}})


@pytest.mark.parametrize("ema", [1.0, 0.0, {"decay": 0.9, "evry": 2}, {"every": 0}])
def test_mistakes_are_refused(ema):
    with pytest.raises(ConfigError, match="ema"):
        run(1, ema=ema)


def test_two_averages_would_exchange_each_others_weights():
    model = nn.Linear(6, 3)
    with pytest.raises(ConfigError, match="EMA"):
        Trainer(model, DATA, config={"ema": 0.9, "device": "cpu"}, callbacks=EMA(0.5), progress=False)
    second = EMA(0.5, validate=False)
    Trainer(model, DATA, config={"ema": 0.9, "device": "cpu"}, callbacks=second, progress=False)


def test_weights_without_a_shape_are_refused_and_those_without_an_average_train(tmp_path):
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=r"EMA: 0\.weight"):
        Trainer(lazy, DATA, config={"ema": 0.9, "device": "cpu"}, progress=False)
    lazy[2].requires_grad_(False)
    Trainer(lazy, DATA, config={"epochs": 1, "device": "cpu"}, progress=False, output_dir=tmp_path).train()


@pytest.mark.parametrize("in_memory", [False, True])
def test_best_weights_are_averages(in_memory, tmp_path):
    settings = {
        "restore_best": True,
        "learning_rate": 0.3,
        "batch_size": 8,
    }  # too large a rate: the last is not the best
    folder = None if in_memory else tmp_path
    trainer, whole = run(12, folder, **settings), run(14, tmp_path / "whole", **settings)
    trainer.train()
    best = trainer.output.judge.best.best
    assert best.step < trainer.state.clock.step
    assert trainer.evaluate()["loss"] == pytest.approx(best.value, rel=1e-6)
    trainer.train(num_epochs=14), whole.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
