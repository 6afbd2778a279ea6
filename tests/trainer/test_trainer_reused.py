"""Objects that are used in a second run: it is the run that begins with fresh ones, or says what is different."""

import copy
import logging
import signal

import pytest
import torch
from torch import nn

from etude import Callback, DataLoader, EarlyStopping, Trainer, TrainingLoop
from etude.callbacks import EMA, CSVLogger, GradientMonitor, ModelCheckpoint
from etude.core import ConfigError, RunFolderError
from etude.data import StreamLoader, Streams, TensorData
from etude.losses import ClassificationLoss, LanguageModelingLoss
from etude.metrics import F1, Precision
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.curriculum import Phase
from etude.optim import ScheduleFreeAdamW

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x @ torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
tokens = torch.randint(0, 9, (16, 7), generator=torch.Generator().manual_seed(0))
AS_INPUTS, AS_NEXT = (tokens, tokens), (tokens[:, :-1], tokens[:, 1:])
"""The same problem: labels that equal the inputs, and labels that are the next tokens."""


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))


def make_trainer(model, data=(x, y), val=(x, y), **settings):
    config = {"epochs": 2, "batch_size": 8, "device": "cpu", "learning_rate": 1e-2, **settings.pop("config", {})}
    return Trainer(model, data, val, config=config, progress=False, **settings)


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


class Weights(Callback):
    """Remembers the weights with which each epoch begins."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def on_epoch_begin(self, epoch):
        self.seen.append(weights(self.model))


@pytest.fixture(autouse=True)
def _messages_are_captured(caplog):
    caplog.set_level(logging.WARNING, "etude")


# ------------------------------------------------------------------ callbacks


def test_a_callback_of_two_trainers_stops_the_one_that_trains():
    stopping = EarlyStopping(patience=0, min_delta=9.0)
    first, second = (make_trainer(make_model(), config={"epochs": 5}, callbacks=[stopping]) for _ in range(2))
    first.train()
    second.train()
    assert (first.state.clock.epoch, second.state.clock.epoch) == (2, 2)


def test_an_average_of_two_trainers_is_that_of_the_one_that_trains():
    average, models, alone = EMA(0.9), [make_model(0), make_model(1)], [make_model(0), make_model(1)]
    for trainer in [make_trainer(model, callbacks=[average]) for model in models]:
        trainer.train()
    for model in alone:
        make_trainer(model, callbacks=[EMA(0.9)]).train()
    assert all(torch.equal(weights(one), weights(other)) for one, other in zip(models, alone, strict=True))


@pytest.mark.parametrize("goes_on", [lambda one: one.train(4), lambda one: one.save_checkpoint()])
def test_a_run_does_not_go_on_with_what_a_callback_remembers_of_another(goes_on, tmp_path):
    stopping = EarlyStopping()
    first = make_trainer(make_model(), callbacks=[stopping], output_dir=tmp_path)
    first.train()
    make_trainer(make_model(), callbacks=[stopping]).train()
    with pytest.raises(ConfigError, match=r"EarlyStopping has been given to another run.*deepcopy"):
        goes_on(first)


def test_callbacks_that_have_been_used_can_be_copied(tmp_path):
    used = [
        EarlyStopping(patience=1),
        EMA(0.9),
        GradientMonitor(),
        CSVLogger("log.csv"),
        ModelCheckpoint(tmp_path / "best.safetensors"),
    ]
    make_trainer(make_model(), callbacks=used, output_dir=tmp_path / "one").train()
    models = make_model(1), make_model(1)
    make_trainer(models[0], callbacks=copy.deepcopy(used), output_dir=tmp_path / "two").train()
    make_trainer(models[1], callbacks=[EMA(0.9)]).train()
    assert torch.equal(*map(weights, models))


# ------------------------------------------------------------------ weights


def test_an_average_begins_with_the_weights_of_a_new_run():
    average, model, alone = EMA(0.9), make_model(), make_model()
    make_trainer(model, callbacks=[average]).train()
    model.load_state_dict(make_model().state_dict())
    make_trainer(model, callbacks=[average]).train()
    make_trainer(alone, callbacks=[EMA(0.9)]).train()
    assert torch.equal(weights(model), weights(alone))


@pytest.mark.parametrize("settings", [{"config": {"ema": 0.9}}, {"config": {"restore_best": True}}], ids=str)
def test_weights_that_were_loaded_between_two_trainings_are_trained(settings, caplog):
    model = make_model()
    trainer = make_trainer(model, (x, -x[:, :3]), (x, x[:, :3]), callbacks=[watch := Weights(model)], **settings)
    trainer.train()  # the validation data wants the opposite: the first epoch is the best
    last = weights(model)
    trainer.train(num_epochs=3)
    assert "have been changed" not in caplog.text
    assert not torch.equal(watch.seen[-1], last)
    model.load_state_dict(make_model(5).state_dict())
    trainer.train(num_epochs=4)
    assert torch.equal(watch.seen[-1], weights(make_model(5)))
    assert caplog.text.count("have been changed") == 1


def test_an_optimizer_with_two_sets_of_weights_says_that_they_were_changed(caplog):
    model = make_model()
    trainer = make_trainer(model, optimizer=ScheduleFreeAdamW(model.parameters(), lr=0.01))
    trainer.train()
    trainer.train(num_epochs=3)
    assert "have been changed" not in caplog.text
    with torch.no_grad():
        model[0].weight.zero_()
    trainer.train(num_epochs=4)
    assert "ScheduleFreeAdamW: the weights have been changed" in caplog.text


def test_a_loop_gives_no_model_the_weights_of_an_earlier_one():
    def train(loop, model):
        optimizer = ScheduleFreeAdamW(model.parameters(), lr=0.01)
        for epoch in range(2):
            loop.train_epoch(model, DataLoader(x, y, 8), optimizer, epoch=epoch)
        loop.finish()

    loop, model, alone = TrainingLoop(loss_strategy=nn.CrossEntropyLoss()), make_model(1), make_model(1)
    train(loop, make_model())
    train(loop, model)
    train(TrainingLoop(loss_strategy=nn.CrossEntropyLoss()), alone)
    assert torch.equal(weights(model), weights(alone))
    train(loop, nn.Linear(4, 3))


# ------------------------------------------------------------------ losses, tasks and metrics


@pytest.mark.parametrize(("first", "second"), [(AS_INPUTS, AS_NEXT), (AS_NEXT, AS_INPUTS)])
def test_a_loss_decides_again_in_a_second_run(first, second):
    loss, used, fresh = LanguageModelingLoss(), language_model(), language_model()
    make_trainer(language_model(), first, None, loss=loss).train()
    make_trainer(used, second, None, loss=loss).train()
    make_trainer(fresh, second, None, loss=LanguageModelingLoss()).train()
    assert torch.equal(weights(used), weights(fresh))


def test_a_loop_decides_again_for_another_model():
    loop = TrainingLoop(loss_strategy=LanguageModelingLoss())
    losses = []
    for one, data in ((loop, AS_NEXT), (loop, AS_INPUTS), (TrainingLoop(), AS_INPUTS)):
        model = language_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append(one.train_epoch(model, DataLoader(*data, 8, shuffle=False), optimizer).loss)
    assert losses[1] == losses[2]


def test_an_evaluation_does_not_decide_what_is_trained():
    trainer = make_trainer(language_model(), AS_INPUTS, None)
    trainer.evaluate(AS_NEXT)
    trainer.train()
    assert trainer.task.decisions()["shift"] is True


def heads():
    torch.manual_seed(0)
    return MultiTaskModel(nn.Linear(4, 6), {"a": LinearHead(3, in_features=6), "b": LinearHead(3, in_features=6)})


def two_tasks():
    return MultiTask({name: TaskSpec(name, ClassificationLoss(), stream=name) for name in "ab"})


def two_streams(*, training):
    parts = {"a": TensorData(x[:32], y[:32]), "b": TensorData(x[32:], y[32:])}
    return StreamLoader(Streams(parts), 8, training=training)


def test_tasks_and_streams_of_a_run_with_a_curriculum_are_all_trained_in_one_without():
    parts = two_streams(training=True), two_streams(training=False)
    task, model, alone = two_tasks(), heads(), heads()
    curriculum = [Phase("one", 1, ["a"], mixture={"a": 1.0}), Phase("two", 9, ["a", "b"])]
    make_trainer(heads(), *parts, task=task, curriculum=curriculum).train()
    numbers = make_trainer(model, *parts, task=task).train()
    fresh = two_streams(training=True), two_streams(training=False)
    expected = make_trainer(alone, *fresh, task=two_tasks()).train()
    assert numbers["val_loss"] == expected["val_loss"]
    assert torch.equal(weights(model), weights(alone))
    assert task.samples == {"a": 64, "b": 32}


def test_metrics_have_their_own_names_and_classes_again():
    metrics = F1(), Precision()
    make_trainer(make_model(), metrics=dict(zip("ab", metrics, strict=True))).train()
    binary = (x, (y > 0).long())
    assert {"val_f1", "val_precision"} <= make_trainer(
        nn.Linear(4, 2), binary, binary, metrics=metrics
    ).train().keys()


# ------------------------------------------------------------------ the process


class Process(Callback):
    """Remembers the settings of the process in the last step."""

    def on_step_end(self, report):
        self.found = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


def test_threads_and_determinism_are_those_of_the_trainer_that_trains():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    configs = [{"num_threads": before[0] + 1, "deterministic": True}, {}, {"num_threads": before[0] + 2}]
    watches = [Process() for _ in configs]
    trainers = [
        make_trainer(make_model(), config=config, callbacks=[watch])
        for config, watch in zip(configs, watches, strict=True)
    ]
    try:
        for epochs in (1, 2):
            for trainer in trainers:
                trainer.train(num_epochs=epochs)
            assert [one.found for one in watches] == [(before[0] + 1, True), before, (before[0] + 2, False)]
        torch.set_num_threads(before[0] + 3)  # the user's choice stays
        trainers[1].train(num_epochs=3)
        assert watches[1].found[0] == before[0] + 3
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


# ------------------------------------------------------------------ interruptions


class Interrupt(Callback):
    def on_step_end(self, report):
        if self.control.stop is False and not hasattr(self, "sent"):
            self.sent = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_adamw"])
def test_what_is_done_between_an_interruption_and_going_on_changes_nothing(optimizer):
    model, alone = make_model(), make_model()
    trainer = make_trainer(model, optimizer=optimizer, callbacks=[Interrupt()], config={"restore_best": True})
    assert trainer.train()["interrupted"]
    trainer.evaluate()
    trainer.predict(x)
    trainer.find_lr(steps=20)
    trainer.train()
    make_trainer(alone, optimizer=optimizer, config={"restore_best": True}).train()
    assert torch.equal(weights(model), weights(alone))


@pytest.mark.parametrize("change", ["unfrozen", "replaced"])
def test_parameters_that_came_after_the_optimizer_are_named(change, caplog):
    model = make_model()
    model[2].requires_grad_(False)
    trainer = make_trainer(model)
    trainer.train()
    assert not caplog.text
    if change == "unfrozen":
        model[2].requires_grad_(True)
    else:
        model[2] = nn.Linear(8, 3)
    trainer.train(num_epochs=3)
    assert "2.weight, 2.bias are not trained" in caplog.text


def test_parameters_that_the_user_kept_from_the_optimizer_are_named_once(caplog):
    model = make_model()
    trainer = make_trainer(model, optimizer=torch.optim.SGD(model[2].parameters(), 0.01))
    assert [message.partition(",")[0] for message in caplog.messages] == ["the optimizer does not have 0.weight"]
    trainer.train()
    assert len(caplog.messages) == 1


def test_a_run_whose_folder_was_overwritten_does_not_go_on_there(tmp_path):
    first = make_trainer(make_model(), output_dir=tmp_path)
    first.train()
    first.train(num_epochs=3)
    make_trainer(make_model(1), output_dir=tmp_path, overwrite=True).train()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError, match="another run has replaced"):
        first.train(num_epochs=4)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_is_loaded_after_the_best_weights_is_what_training_continues_from(tmp_path, caplog):
    opposite = (x, -x[:, :3]), (x, x[:, :3])  # the first epoch is the best
    config = {"restore_best": True, "epochs": 3}
    make_trainer(make_model(), *opposite, config=config, output_dir=tmp_path).train()
    models = make_model(), make_model(1)
    trainers = [make_trainer(model, *opposite, config=config) for model in models]
    trainers[0].train()
    assert trainers[0].output.judge.best.restored
    watches = []
    for trainer in trainers:
        trainer.load_checkpoint(tmp_path / "checkpoints" / "best")
        watches.append(watch := Weights(trainer.model))
        trainer.callbacks.append(watch)
        trainer.train()
    assert torch.equal(*(watch.seen[0] for watch in watches))
    assert "have been changed" not in caplog.text
