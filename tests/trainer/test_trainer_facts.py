"""Facts that a loss, a task or a callback keeps in checkpoints; a checkpoint whose facts contradict is refused."""

import copy

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.checkpoint import read_checkpoint
from etude.core import CheckpointError
from etude.losses import ClassificationLoss, SupervisedTask

DATA = (torch.randn(8, 3), torch.arange(8) % 2)


class Facts:
    """Keeps one fact, and compares it."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def facts(self):
        return {"unit": self.unit}

    def check_facts(self, saved, place):
        if saved.get("unit", self.unit) != self.unit:
            raise CheckpointError(f"{place} is in {saved['unit']}")


class LossWithFacts(Facts, ClassificationLoss):
    pass


class TaskWithFacts(Facts, SupervisedTask):
    def __init__(self, unit):
        super().__init__(unit)
        SupervisedTask.__init__(self)


class CallbackWithFacts(Facts, Callback):
    pass


def trainer(folder=None, **given):
    return Trainer(nn.Linear(3, 2), DATA, config={"epochs": 1}, output_dir=folder, progress=False, **given)


def given(kind, unit):
    if kind == "callbacks":
        return {kind: [CallbackWithFacts(unit)]}
    return {kind: {"loss": LossWithFacts, "task": TaskWithFacts}[kind](unit)}


@pytest.mark.parametrize("kind", ["loss", "task", "callbacks"])
def test_checkpoints_keep_them_and_others_are_refused(tmp_path, kind):
    trainer(tmp_path / "run", meta={"who": "me"}, **given(kind, "metres")).train()
    meta = read_checkpoint(tmp_path / "run" / "checkpoints" / "last").meta
    assert (meta["who"], meta["unit"]) == ("me", "metres")
    for same in (given(kind, "metres"), {}):
        run = trainer(**same)
        run.load_checkpoint(tmp_path / "run")
        assert run.state.clock.step > 0
    other = trainer(**given(kind, "feet"))
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(CheckpointError, match="is in metres"):
        other.load_checkpoint(tmp_path / "run")
    assert other.state.clock.step == 0
    for name, value in other.model.state_dict().items():
        assert torch.equal(value, before[name])
