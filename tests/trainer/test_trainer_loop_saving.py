"""A loop whose epochs somebody else counts writes the run folder of a Trainer, and goes on from it exactly."""

import json
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import Callback, DataLoader, TrainingLoop, TrainingMetrics
from etude.checkpoint import find_checkpoints
from etude.core import ConfigError, RunFolderError, TrainingError
from etude.monitor import FINISHED

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
STEPS = 5


class Parts:
    """A model with dropout, its optimizer and a scheduler."""

    def __init__(self, folder=None, scheduler=None, **options):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.loop = TrainingLoop(1, progress=False, output_dir=folder, **options)

    def train(self, epochs, start=None):
        for epoch in range(self.loop.clock.epoch if start is None else start, epochs):
            self.loop.train_epoch(self.model, DataLoader(X, Y, 8), self.optimizer, self.scheduler, epoch, (X, Y))
        return self

    def load(self, folder):
        self.loop.load_checkpoint(folder, self.model, self.optimizer, self.scheduler)
        return self

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


SCHEDULERS = {
    "none": None,
    "function": lambda optimizer: lambda step: 0.9**step,
    "torch": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_stopped_and_loaded_it_is_the_same_run(tmp_path, scheduler):
    straight = Parts(tmp_path / "straight", scheduler).train(3)
    Parts(tmp_path / "parts", scheduler).train(1)
    second = Parts(tmp_path / "parts", scheduler).load(tmp_path / "parts")
    assert (second.loop.clock.epoch, second.loop.clock.step) == (1, STEPS)
    second.train(3)
    assert all(map(torch.equal, straight.weights(), second.weights()))
    assert sorted(find_checkpoints(tmp_path / "parts" / "checkpoints"))[-1] == 3 * STEPS


def test_saving_changes_nothing(tmp_path):
    assert all(map(torch.equal, Parts(tmp_path).train(2).weights(), Parts().train(2).weights()))


@pytest.mark.parametrize("step", [1, 4, 7])
def test_interrupted_inside_an_epoch_it_goes_on_there(tmp_path, step):
    class Interrupt(Callback):
        seen = 0

        def on_step_end(self, report):
            self.seen += 1
            if self.seen == step:
                signal.raise_signal(signal.SIGINT)

    straight = Parts().train(2)
    with pytest.raises(KeyboardInterrupt):
        Parts(tmp_path, callbacks=[Interrupt()]).train(2)
    second = Parts(tmp_path).load(tmp_path)
    assert second.loop.clock.step == step
    second.train(2)
    assert all(map(torch.equal, straight.weights(), second.weights()))


def test_the_folder_is_that_of_a_run(tmp_path):
    parts = Parts(tmp_path)
    with parts.loop:
        parts.train(2)
        assert not (tmp_path / "result.json").exists()
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"config.yaml", "env.json", "metrics.jsonl", "events.jsonl", "result.json"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["epoch"], result["step"]) == (FINISHED, 2, 2 * STEPS)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if one["split"] == "train"] == list(range(1, 2 * STEPS + 1))
    assert sum(one["split"] == "val" for one in records) == 2


def test_one_folder_is_one_run(tmp_path):
    Parts(tmp_path).train(1)
    with pytest.raises(RunFolderError, match=str(tmp_path)):
        Parts(tmp_path).train(1)
    Parts(tmp_path, overwrite=True).train(1)
    one = Parts(tmp_path).load(tmp_path)
    one.model = nn.Linear(4, 2)
    one.optimizer = torch.optim.SGD(one.model.parameters(), 0.1)
    with pytest.raises(RunFolderError, match="step"):  # another model begins another run
        one.train(1, start=0)


def test_plain_functions_are_saved_if_they_say_what_they_train(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data, metrics = DataLoader(X, Y, 8), TrainingMetrics()
    loop = TrainingLoop(progress=False, output_dir=tmp_path)
    loop.run(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, data, 2, metrics)
    assert (tmp_path / "result.json").exists()
    again = nn.Linear(4, 2)
    TrainingLoop(progress=False).load_checkpoint(tmp_path, again, torch.optim.SGD(again.parameters(), 0.1))
    assert all(map(torch.equal, again.parameters(), model.parameters()))

    def hidden(x):
        return model(x)

    with pytest.raises(ConfigError, match="output_dir"):
        TrainingLoop(progress=False, output_dir=tmp_path / "other").run(
            hidden, F.cross_entropy, optimizer.step, optimizer.zero_grad, data, 1, metrics
        )
    with pytest.raises(ConfigError, match="output_dir"):
        TrainingLoop(progress=False, output_dir=tmp_path / "other").run_epoch_manual(X, Y, 8, F.cross_entropy, 0, 1)


def test_memory_that_runs_out_in_the_validation_of_an_epoch_has_the_remedies_of_validation():
    class Hungry(nn.Linear):
        def forward(self, x):
            if not self.training:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    model = Hungry(4, 2)
    with pytest.raises(TrainingError, match="in validation"):
        TrainingLoop(progress=False).train_epoch(
            model, DataLoader(X, Y, 8), torch.optim.SGD(model.parameters(), 0.1), val_dataloader=(X, Y)
        )


def test_a_used_folder_is_refused_with_what_this_loop_offers(tmp_path):
    Parts(tmp_path).train(1)
    with pytest.raises(RunFolderError, match=r"load_checkpoint\("):
        Parts(tmp_path).train(1)


def test_functions_whose_optimizer_is_unknown_cannot_be_saved(tmp_path):
    parts = Parts(tmp_path / "run")
    functions = parts.model, F.cross_entropy, lambda: parts.optimizer.step(), parts.optimizer.zero_grad
    with pytest.raises(ConfigError, match="output_dir saves model and optimizer"):
        parts.loop.run(*functions, [(X, Y)], 1, TrainingMetrics())
