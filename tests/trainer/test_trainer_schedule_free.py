"""Optimizers with `train()` and `eval()`: the averages are validated, saved and left; training is not changed."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from etude import Callback, DataLoader, Trainer, TrainingLoop, load_model
from etude.checkpoint import read_checkpoint
from etude.core import CheckpointError, ConfigError
from etude.optim import ScheduleFreeAdamW

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
OTHER = torch.randn(16, 6, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 3
OPTIMIZER = {"name": "schedule_free_adamw", "lr": 0.05, "weight_decay": 0.1}


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trainer(epochs, folder=None, *, optimizer=OPTIMIZER, callbacks=(), validation=OTHER, **settings):
    config = {"epochs": epochs, "batch_size": 4, "seed": 3, **settings}
    others = {"callbacks": callbacks, "output_dir": folder, "progress": False}
    return Trainer(Net(), DATA, validation, config=config, optimizer=optimizer, **others)


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@torch.no_grad()
def loss_of(model):
    return float(nn.functional.cross_entropy(model(OTHER[0]), OTHER[1]))


class Watch(Callback):
    """Keeps the weights after each step, and the losses of validation."""

    def __init__(self):
        super().__init__()
        self.trained, self.losses = [], []

    def on_train_begin(self, run):
        self.model = run.model

    def on_step_end(self, report):
        self.trained.append(weights(self.model))

    def on_validation_end(self, epoch, metrics):
        self.losses.append(metrics["val_loss"])


def package(params):
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, package])
def test_the_average_is_validated_saved_and_left_in_the_model(tmp_path, optimizer):
    watch = Watch()
    made = trainer(2, tmp_path / "run", callbacks=[watch], optimizer=optimizer)
    made.train()
    z = torch.cat([made.optimizer.state[param]["z"].flatten() for param in made.model.parameters()])
    left, trained = weights(made.model), watch.trained[-1]
    torch.testing.assert_close(0.1 * z + 0.9 * left, trained)
    assert not torch.equal(left, trained)
    assert watch.losses[-1] == pytest.approx(loss_of(made.model), rel=1e-5)
    assert made.evaluate()["loss"] == pytest.approx(loss_of(made.model), rel=1e-5)
    saved = load_file(tmp_path / "run/checkpoints/last/model.safetensors")
    assert all(torch.equal(saved[name], param) for name, param in made.model.named_parameters())
    raw = read_checkpoint(tmp_path / "run/checkpoints/last").state["callbacks"]["OptimizerWeights.0"]["weights"]
    assert torch.equal(torch.cat([raw[name].flatten() for name, _ in made.model.named_parameters()]), trained)
    assert torch.equal(weights(load_model(tmp_path / "run", import_class=True)), left)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, package])
def test_validating_and_saving_do_not_change_the_weights_of_training(tmp_path, optimizer):
    often, never = Watch(), Watch()
    trainer(
        2, tmp_path / "run", callbacks=[often], optimizer=optimizer, save_every_steps=2, validate_every_steps=1
    ).train()
    trainer(2, callbacks=[never], optimizer=optimizer, validation=None).train()
    assert len(often.losses) > 6
    assert all(torch.equal(one, other) for one, other in zip(often.trained, never.trained, strict=True))


@pytest.mark.parametrize("optimizer", [OPTIMIZER, package])
@pytest.mark.parametrize("stop", [1, 6, 9])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, optimizer, stop):
    straight = trainer(2, tmp_path / "straight", optimizer=optimizer)
    straight.train()
    trainer(2, tmp_path / "run", optimizer=optimizer, max_steps=stop).train()
    later = trainer(2, tmp_path / "run", optimizer=optimizer)
    later.load_checkpoint(tmp_path / "run")
    later.train()
    assert torch.equal(weights(later.model), weights(straight.model))


def test_training_continues_after_training():
    made, once = trainer(1), trainer(2)
    made.train()
    made.train(2)
    once.train()
    assert torch.equal(weights(made.model), weights(once.model))


def test_another_average_is_refused():
    with pytest.raises(ConfigError, match="EMA and ScheduleFreeAdamW"):
        trainer(1, ema=0.9)


def test_damaged_weights_are_refused(tmp_path):
    made = trainer(1, tmp_path / "run")
    made.train()
    checkpoint = read_checkpoint(tmp_path / "run/checkpoints/last")
    saved = checkpoint.state["callbacks"]["OptimizerWeights.0"]
    saved["weights"]["0.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"weights\.0\.weight"):
        trainer(1).state.restore(checkpoint)


def test_a_loop_over_epochs_validates_the_average_too():
    model, seen = Net(), []
    optimizer = ScheduleFreeAdamW(model, lr=0.05)

    class Look(Callback):
        def on_validation_end(self, epoch, metrics):
            seen.append(metrics["val_loss"])

    loop = TrainingLoop(callbacks=[Look()])
    for epoch in range(2):
        loaders = DataLoader(*DATA, 4, shuffle=False), DataLoader(*OTHER, 8, shuffle=False)
        loop.train_epoch(model, loaders[0], optimizer, epoch=epoch, val_dataloader=loaders[1])
    assert optimizer.param_groups[0]["train_mode"]
    loop.finish()
    assert not optimizer.param_groups[0]["train_mode"]
    assert seen[-1] == pytest.approx(loss_of(model), rel=1e-5)


# ------------------------------------------------------------------------------------------------ what is said


FALLS, TWICE, LONG = "authors advise against both", "both warm up", "does not reach lr"
RISE = {"name": "warmup", "warmup_steps": 3, "schedule": "constant"}


@pytest.mark.parametrize(
    ("scheduler", "warmup_steps", "words"),
    [
        (None, 3, []),
        (RISE, 0, []),
        ("cosine", 0, [FALLS]),
        ({"name": "plateau", "monitor": "loss"}, 0, [FALLS]),
        (RISE, 3, [TWICE]),
        ({"name": "warmup", "warmup_steps": 3, "schedule": "cosine"}, 3, [FALLS, TWICE]),
        (None, 1000, [LONG]),
    ],
)
def test_a_schedule_that_does_what_the_average_does_is_one_warning(scheduler, warmup_steps, words, caplog):
    optimizer = {**OPTIMIZER, "warmup_steps": warmup_steps}
    config = {"epochs": 1, "batch_size": 4}
    run = Trainer(Net(), DATA, config=config, optimizer=optimizer, scheduler=scheduler, progress=False)
    run.train()
    run.train(num_epochs=2)
    said = [one.getMessage() for one in caplog.records if "ScheduleFreeAdamW" in one.getMessage()]
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


def test_a_schedule_of_beta1_is_refused():
    """The averaged weights are computed from beta1, so they would be others after it has changed."""
    with pytest.raises(ConfigError, match="sets beta1"):
        Trainer(
            Net(),
            DATA,
            config={"epochs": 1},
            optimizer=OPTIMIZER,
            scheduler={"name": "by_setting", "beta1": {"name": "linear", "end": 0.5}},
            progress=False,
        )


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False), nn.LayerNorm(8)])
def test_statistics_of_batch_norm_are_those_of_other_weights(norm, caplog):
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))
    Trainer(model, DATA, config={"epochs": 1, "batch_size": 4}, optimizer=OPTIMIZER, progress=False).train()
    said = [one for one in caplog.records if "update_bn" in one.getMessage()]
    assert len(said) == int(isinstance(norm, nn.BatchNorm1d) and norm.track_running_stats)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, package])
@pytest.mark.parametrize("trained", [False, True])
def test_rates_are_tested_in_the_mode_of_training_without_a_trace(optimizer, trained):
    tested, plain = trainer(2, optimizer=optimizer), trainer(2, optimizer=optimizer)
    if trained:
        tested.train(1)
        plain.train(1)
    tested.find_lr(steps=20)
    assert torch.equal(weights(tested.model), weights(plain.model))
    tested.train(2)
    plain.train(2)
    assert torch.equal(weights(tested.model), weights(plain.model))


def test_a_size_of_batches_is_found_with_an_optimizer_that_begins_in_evaluation_mode():
    made = trainer(1, optimizer=package, batch_size="auto")
    assert made.config.batch_size == 16
    assert "loss" in made.train()


class Begun(Callback):
    """Keeps the weights before the first step."""

    def on_train_begin(self, run):
        self.model = run.model

    def on_epoch_begin(self, epoch):
        self.weights = weights(self.model)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, package])
def test_a_run_resumed_with_another_beta1_keeps_the_average(tmp_path, optimizer):
    """Those of training are computed again: the saved ones hold another share of the average."""
    first, begun = trainer(1, tmp_path, optimizer=optimizer), Begun()
    first.train()
    average = weights(first.model)
    z = torch.cat([first.optimizer.state[param]["z"].flatten() for param in first.model.parameters()])
    later = trainer(2, optimizer=optimizer, callbacks=[begun])
    later.optimizer.param_groups[0]["betas"] = (0.3, 0.999)
    later.load_checkpoint(tmp_path, keep_hyperparameters=True)
    later.train()
    torch.testing.assert_close(begun.weights, 0.3 * average + 0.7 * z)
