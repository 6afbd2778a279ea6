"""Schedulers with timm's interface: told of epochs and updates, saved and resumed exactly."""

import abc

import pytest
import torch
from torch import nn

from etude import BasicTrainingLoop, Callback, DataLoader, Trainer, TrainingLoop
from etude.callbacks import LRSchedule
from etude.core import ConfigError


class Scheduler(abc.ABC):
    """As timm.scheduler.Scheduler: nothing is counted inside, and `step` acts only if time is in epochs."""

    def __init__(self, optimizer, param_group_field="lr", t_in_epochs=True):
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        self._initial_param_group_field = f"initial_{param_group_field}"
        for group in optimizer.param_groups:
            group.setdefault(self._initial_param_group_field, group[param_group_field])
        self.base_values = [group[self._initial_param_group_field] for group in optimizer.param_groups]
        self.metric, self.t_in_epochs, self.noise_range_t = None, t_in_epochs, None
        self.update_groups(self.base_values)

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        self.__dict__.update(state_dict)

    def step(self, epoch, metric=None):
        self.metric = metric
        if self.t_in_epochs:
            self.update_groups(self._get_lr(epoch))

    def step_update(self, num_updates, metric=None):
        self.metric = metric
        if not self.t_in_epochs:
            self.update_groups(self._get_lr(num_updates))

    def update_groups(self, values):
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            group[self.param_group_field] = value

    @abc.abstractmethod
    def _get_lr(self, t): ...


class WarmupHalving(Scheduler):
    def __init__(self, optimizer, warmup_t=2, **more):
        super().__init__(optimizer, **more)
        self.warmup_t = warmup_t
        self.update_groups(self._get_lr(0))

    def _get_lr(self, t):
        factor = (t + 1) / (self.warmup_t + 1) if t < self.warmup_t else 0.5 ** (t - self.warmup_t)
        return [value * factor for value in self.base_values]


class PlateauLRScheduler(Scheduler):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def _get_lr(self, t): ...


class Rates(Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_step_end(self, report):
        self.seen.append(report.lr)


def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def made(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, WarmupHalving(optimizer, **more)


def wanted(in_epochs):
    """The rates of 12 steps, 4 in an epoch, with timm's scheduler called as timm's training script does."""
    _, optimizer, scheduler = made(t_in_epochs=in_epochs)
    found = []
    for step in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(num_updates=step + 1)
        if (step + 1) % 4 == 0:
            scheduler.step((step + 1) // 4)
    return found


@pytest.mark.parametrize("in_epochs", [True, False])
@pytest.mark.parametrize("door", ["train", "fit", "train_epoch"])
def test_rates_of_timm_through_every_door(door, in_epochs):
    model, optimizer, scheduler = made(t_in_epochs=in_epochs)
    rates, config = Rates(), {"batch_size": 8, "epochs": 3}
    parts = {"callbacks": [rates], "config": config, "progress": False}
    if door == "train":
        Trainer(model, data(), optimizer=optimizer, scheduler=scheduler, **parts).train()
    elif door == "fit":
        BasicTrainingLoop(model, optimizer, scheduler, **parts).fit(data(), epochs=3)
    else:
        loop = TrainingLoop(callbacks=[rates])
        for epoch in range(3):
            loop.train_epoch(model, DataLoader(*data(), 8), optimizer, scheduler, epoch)
    assert rates.seen == pytest.approx(wanted(in_epochs))


@pytest.mark.parametrize("in_epochs", [True, False])
@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_resumed_run_has_the_bytes_of_one_that_never_stopped(tmp_path, in_epochs, stop_at):
    def run(max_steps, folder=None, path=None):
        model, optimizer, scheduler = made(t_in_epochs=in_epochs)
        config = {"batch_size": 8, "epochs": 3, "max_steps": max_steps}
        parts = {"optimizer": optimizer, "scheduler": scheduler, "config": config, "progress": False}
        trainer = Trainer(model, data(), output_dir=folder, **parts)
        if path is not None:
            trainer.load_checkpoint(path)
        trainer.train()
        return model

    straight = run(12)
    run(stop_at, folder=tmp_path / "run")
    again = run(12, path=tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


def test_one_with_a_state_that_it_does_not_save_is_refused():
    _, optimizer, _ = made()
    with pytest.raises(ConfigError, match="name the scheduler 'plateau'"):
        LRSchedule(PlateauLRScheduler(optimizer))


def test_a_scheduler_of_hugging_face_works():
    optimization = pytest.importorskip("transformers.optimization")
    model, optimizer, _ = made()
    for group in optimizer.param_groups:
        group.update(lr=0.5, initial_lr=0.5)
    scheduler = optimization.get_cosine_schedule_with_warmup(optimizer, 3, 12)
    rates = Rates()
    config = {"batch_size": 8, "epochs": 3}
    Trainer(model, data(), optimizer=optimizer, scheduler=scheduler, callbacks=[rates], config=config,
            progress=False).train()  # fmt: skip
    assert rates.seen == pytest.approx([0.5 * scheduler.lr_lambdas[0](step) for step in range(12)])
