"""Updates that are not finite are never silent: a warning per epoch, an error when nothing was learned."""

import json
import logging
import math

import pytest
import torch
from torch import nn

from etude import Trainer, TrainingLoop, TrainingMetrics
from etude.core import TrainingError
from etude.data import DataLoader
from etude.engine.callback import Callback


class Listen(Callback):
    """Keeps the warnings."""

    shows_notices = True

    def __init__(self):
        super().__init__()
        self.messages = []

    def on_notice(self, message, facts):
        if "event" not in facts:
            self.messages.append(message)


def data(bad_samples, count=40):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 4, generator=generator), torch.arange(count) % 3
    x[list(bad_samples)] = math.nan
    return x, y


def make(bad_samples=(), *, loss=None, val=None, callbacks=(), x=None, y=None, **config):
    torch.manual_seed(0)
    if x is None:
        x, y = data(bad_samples)
    settings = {"epochs": 2, "batch_size": 8, "log_interval": 2} | config
    listener, loader = Listen(), DataLoader(x, y, settings["batch_size"], shuffle=False)
    trainer = Trainer(
        nn.Linear(4, 3), loader, val, loss=loss, config=settings, callbacks=[listener, *callbacks], progress=False
    )
    return trainer, listener.messages


@pytest.mark.parametrize("bad_batches", [(0,), (2,), (4,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("log_interval", [1, 2, 100])
def test_one_warning_per_epoch_with_number_share_and_place(bad_batches, log_interval):
    trainer, messages = make([8 * batch + 1 for batch in bad_batches], log_interval=log_interval)
    trainer.train()
    assert len(messages) == 2
    for epoch, message in enumerate(messages):
        first = bad_batches[0]
        assert f"{len(bad_batches)} of 5 ({len(bad_batches) / 5:.0%})" in message
        assert f"epoch {epoch + 1} " in message
        assert f"step {5 * epoch + first + 1} with samples {8 * first} to {8 * first + 7}" in message
        assert "the loss was not finite" in message


def test_a_run_without_a_bad_update_is_silent():
    trainer, messages = make()
    trainer.train()
    assert messages == []


@pytest.mark.parametrize(
    "plan", [{"epochs": 1}, {"epochs": 3}, {"max_steps": 3}, {"epochs": 1, "grad_accum_steps": 5}]
)
def test_an_epoch_in_which_nothing_was_learned_is_an_error(plan):
    trainer, _ = make(range(0, 40, 4), **plan)
    before = trainer.model.weight.detach().clone()
    with pytest.raises(TrainingError, match="nothing was learned") as caught:
        trainer.train()
    assert "labels" not in str(caught.value)
    assert "intact" in str(caught.value)
    assert torch.equal(trainer.model.weight, before)


def test_a_loss_that_returns_nan_is_not_blamed_on_labels():
    trainer, _ = make(loss=lambda predictions, labels: predictions.sum() * math.nan)
    with pytest.raises(TrainingError, match="not finite") as caught:
        trainer.train()
    assert "labels" not in str(caught.value)


def test_a_loss_that_is_nan_with_finite_gradients_is_reported():
    def loss(predictions, labels):
        return nn.functional.cross_entropy(predictions, labels) + torch.tensor(math.nan)

    trainer, messages = make(loss=loss, epochs=1)
    result = trainer.train()
    assert math.isnan(result["loss"])
    (message,) = messages
    assert "5 of 5 (100%) steps" in message
    assert "labels" not in message


def test_masked_labels_are_still_distinguished_from_nan():
    x, _ = data(())
    trainer, messages = make(x=x, y=torch.full((40,), -100), epochs=1, loss=nn.CrossEntropyLoss(ignore_index=-100))
    trainer.train()
    (message,) = messages
    assert "labels" in message


def test_weights_that_are_not_finite_are_not_called_intact():
    trainer, _ = make(epochs=1)
    with torch.no_grad():
        trainer.model.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match="weights themselves are not finite"):
        trainer.train()


def test_validation_that_is_not_finite_is_reported():
    x, y = data(())
    trainer, messages = make(x=x, y=y, val=data(range(3)), epochs=2)
    result = trainer.train()
    assert math.isnan(result["val_loss"])
    assert [message for message in messages if "validation loss" in message] == messages
    assert len(messages) == 2


@pytest.mark.parametrize("epochs", [1, 30])
def test_a_loss_scale_may_find_its_size_over_epochs_but_not_for_the_whole_run(epochs):
    x, y = data(())
    settings = {"precision": "fp16", "loss_scale": 2.0**30, "batch_size": 40, "epochs": epochs}
    trainer, messages = make(x=x, y=y, **settings)
    if epochs == 1:
        with pytest.raises(TrainingError, match="nothing was learned"):
            trainer.train()
        return
    trainer.train()
    assert messages
    assert all("gradients were not finite" in message for message in messages)


def test_a_few_skips_of_a_loss_scale_are_no_warning():
    x, y = data((), count=400)
    trainer, messages = make(x=x, y=y, precision="fp16", loss_scale=2.0**24, epochs=1, batch_size=4)
    result = trainer.train()
    assert 0 < result["skipped"] < 10
    assert messages == []


def test_the_first_skipped_update_of_an_epoch_survives_a_resume(tmp_path):
    folder = tmp_path / "run"
    torch.manual_seed(0)
    x, y = data([9, 33])
    found = []
    for stop in (3, None):
        listener = Listen()
        trainer = Trainer(
            nn.Linear(4, 3),
            DataLoader(x, y, 8, shuffle=False),
            config={"epochs": 1, "max_steps": stop},
            callbacks=[listener],
            output_dir=folder,
            progress=False,
        )
        if stop is None:
            trainer.load_checkpoint(folder)
        trainer.train()
        found.append(listener.messages)
    (message,) = found[1]
    assert "2 of 5" in message
    assert "step 2 with samples 8 to 15" in message
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert any(message == event.get("message") for event in events)


def test_training_loops_remember_skipped_updates_over_epochs(caplog):
    """Seven bad batches at the end of an epoch and fourteen at the start of the next are 21 in a row."""
    x, y = data(range(24, 80), count=80)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(log_interval=2)
    with caplog.at_level(logging.WARNING, "etude"):
        loop.train_epoch(model, DataLoader(x, y, 8, shuffle=False), optimizer, epoch=0)
    assert "7 of 10 (70%)" in caplog.text
    x, y = data(range(112), count=120)
    with pytest.raises(TrainingError, match=r"last 2\d steps"):
        loop.train_epoch(model, DataLoader(x, y, 8, shuffle=False), optimizer, epoch=1)


def test_plain_functions_report_skipped_updates_too(caplog):
    x, y = data([1, 12])
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop, loader = TrainingLoop(), DataLoader(x, y, 8, shuffle=False)
    arguments = (model, nn.functional.cross_entropy, optimizer.step, optimizer.zero_grad, loader)
    with caplog.at_level(logging.WARNING, "etude"):
        loop.run(*arguments, 1, TrainingMetrics())
    assert "2 of 5 (40%)" in caplog.text
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match="nothing was learned"):
        loop.run(*arguments, 1, TrainingMetrics())
