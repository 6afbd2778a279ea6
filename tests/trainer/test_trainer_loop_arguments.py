"""What the loops, the accumulator and the loaders are given: names and arrays serve, mistakes are one line."""

import functools
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import (
    Accuracy,
    BasicTrainingLoop,
    DataLoader,
    DataLoaderFactory,
    EarlyStopping,
    EtudeError,
    GradientAccumulator,
    Trainer,
    TrainerConfig,
    TrainingLoop,
    TrainingMetrics,
    ValidationLoop,
    training_step,
)
from etude.core import ConfigError, DataError, TrainingError

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def train(settings=None, **call):
    trained = make_model()
    model = call.pop("model", trained)
    optimizer = call.pop("optimizer", None) or torch.optim.SGD(trained.parameters(), 0.1)
    loop = TrainingLoop(progress=False, **(settings or {}))
    return loop.train_epoch(model, call.pop("dataloader", DataLoader(x, y, 8)), optimizer, **call)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("log_interval", "3", "log_interval"),
        ("log_interval", 2.5, "log_interval"),
        ("loss_strategy", nn.CrossEntropyLoss, "loss"),
        ("loss_strategy", 3, "loss"),
        ("task", 3, "task"),
        ("gradient_accumulator", 4, "gradient_accumulator"),
        ("gradient_monitor", True, "callbacks"),
        ("callbacks", [3], "callbacks"),
        ("seed", "a", "seed"),
    ],
)
def test_settings_of_a_training_loop_are_refused_by_name(name, value, said):
    with pytest.raises(ConfigError, match=said):
        TrainingLoop(progress=False, **{name: value})


@pytest.mark.parametrize(
    "call",
    [
        {"scheduler": 3},
        {"scheduler": "cosine"},
        {"scheduler": torch.optim.lr_scheduler.StepLR},
        {"scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
        {"epoch": "1"},
        {"epoch": -1},
        {"epoch": 0.5},
        {"optimizer": "sgd"},
        {"optimizer": torch.optim.SGD},
        {"optimizer": torch.optim.LBFGS(make_model().parameters())},
        {"model": nn.Linear},
    ],
)
def test_arguments_of_an_epoch_are_refused_by_name(call):
    with pytest.raises(ConfigError, match=next(iter(call))):
        train(**call)


def test_a_list_of_optimizers_has_its_remedy():
    with pytest.raises(ConfigError, match=r"etude\.optim\.Optimizers"):
        train(optimizer=[torch.optim.SGD(make_model().parameters(), lr=0.1)])


def test_the_optimizer_of_another_model_is_refused():
    with pytest.raises(TrainingError, match="optimizer"):
        train(optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_a_partial_of_a_torch_scheduler_is_refused_by_the_trainer_too():
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    with pytest.raises(ConfigError, match="scheduler is the class StepLR"):
        Trainer(make_model(), (x, y), scheduler=scheduler, progress=False)


def test_loops_take_names_single_callbacks_and_numpy_arrays_as_the_trainer_does():
    arrays = (x.numpy().astype("float64"), y.numpy())
    stop = EarlyStopping(monitor="loss")
    trained = train({"loss_strategy": "cross_entropy", "callbacks": stop}, dataloader=arrays, val_dataloader=arrays)
    assert math.isfinite(trained.loss)
    assert math.isfinite(trained.parts["val_loss"])
    validate = ValidationLoop("cross_entropy", callbacks=EarlyStopping(), progress=False)
    assert math.isfinite(validate.validate_epoch(make_model(), arrays).loss)
    accuracy = Accuracy()
    logs = BasicTrainingLoop(make_model(), metrics=accuracy, progress=False).fit((x, y), epochs=1)
    assert accuracy.compute() == pytest.approx(logs["accuracy"])


@pytest.mark.parametrize("settings", [{"callbacks": [3]}, {"loss_strategy": nn.CrossEntropyLoss}, {"task": 3}])
def test_settings_of_a_validation_loop_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=next(iter(settings)).split("_")[0]):
        ValidationLoop(progress=False, **settings)


def test_a_validation_loop_refuses_what_is_no_model():
    with pytest.raises(ConfigError, match="model"):
        ValidationLoop(progress=False).validate_epoch(nn.Linear, (x, y))


@pytest.mark.parametrize("steps", ["4", 2.5, 0, True, {0: 1, 3: "2"}])
def test_accumulation_steps_are_whole_numbers(steps):
    with pytest.raises(ConfigError, match="accumulation_steps"):
        GradientAccumulator(None, steps)


@pytest.mark.parametrize("size", ["8", 2.5, 0])
def test_batch_sizes_are_whole_numbers(size):
    with pytest.raises(DataError, match="batch_size"):
        DataLoader(x, y, size)


def test_loaders_know_the_device_that_configs_call_auto():
    loader = DataLoaderFactory.from_config(TrainerConfig()).create((x, y))
    assert loader.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert sum(len(labels) for _, labels in loader) == len(x)
    with pytest.raises(ConfigError, match="'gpu'"):
        DataLoader(x, y, 8, device="gpu")


# ---------------------------------------------------------------------------------------------------- plain functions


def run(forward=None, loss=F.cross_entropy, data=None, epochs=1, **settings):
    model = forward or make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    metrics = TrainingMetrics()
    functions = (model, loss, optimizer.step, optimizer.zero_grad)
    TrainingLoop(progress=False, **settings).run(*functions, data or DataLoader(x, y, 8), epochs, metrics)
    return metrics


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        lambda output, labels: F.cross_entropy(output, labels).item(),
        lambda output, labels: (F.cross_entropy(output, labels), 1),
        lambda output, labels: {"loss": F.cross_entropy(output, labels)},
    ],
)
def test_a_function_that_returns_no_single_number_is_refused(loss):
    with pytest.raises(EtudeError, match="compute_loss returned"):
        run(loss=loss)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(EtudeError, match="compute_loss returned"):
        training_step(model, loss, optimizer.step, optimizer.zero_grad, x, y)


@pytest.mark.parametrize("batch", [{"data": x, "labels": y}, x, (x, x, y)], ids=["mapping", "tensor", "three"])
def test_plain_functions_refuse_batches_that_are_no_pairs(batch):
    with pytest.raises(DataError, match=r"\(data, labels\)"):
        run(data=[batch])


@pytest.mark.parametrize("epochs", [0, -2, "1", 1.0])
def test_run_refuses_numbers_of_epochs_that_are_none(epochs):
    with pytest.raises(ConfigError, match="num_epochs"):
        run(epochs=epochs)


@pytest.mark.parametrize("place", range(4))
def test_run_refuses_what_is_no_function(place):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    functions = [model, F.cross_entropy, optimizer.step, optimizer.zero_grad]
    functions[place] = optimizer
    names = ["model_forward", "compute_loss", "optimizer_step", "zero_gradients"]
    with pytest.raises(ConfigError, match=names[place]):
        TrainingLoop(progress=False).run(*functions, DataLoader(x, y, 8), 1, TrainingMetrics())


class Wrapped(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = make_model(), form

    def forward(self, data):
        return self.form(self.layer(data))


@pytest.mark.parametrize("form", [lambda out: {"logits": out}, lambda out: (out, None)], ids=["mapping", "tuple"])
def test_plain_functions_may_pass_on_any_output(form):
    def loss(output, labels):
        return F.cross_entropy(output["logits"] if isinstance(output, dict) else output[0], labels)

    assert run(Wrapped(form), loss).train_loss == pytest.approx(run().train_loss)


def test_accuracy_of_sequences_has_the_classes_last_and_leaves_out_ignored_labels():
    ids = torch.arange(24 * 5).reshape(24, 5) % 7
    labels = ids.clone()
    labels[:, ::2] = -100

    class Sure(nn.Embedding):
        def forward(self, ids):
            return F.one_hot(ids, 7) * 9.0 + 0 * super().forward(ids)

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert run(Sure(7, 7), loss, [(ids, labels)]).train_accuracy == 1.0


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize("validated", [[False, False], [False, True]])
def test_a_validation_loss_that_no_epoch_used_is_a_warning(validated, finishes, caplog):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(val_loss="cross_entropy", progress=False)
    data = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
    for epoch, has_data in enumerate(validated):
        loop.train_epoch(model, data, optimizer, epoch=epoch, val_dataloader=data if has_data else None)
        assert not caplog.records
    if finishes:
        loop.finish()
    del loop
    gc.collect()
    assert ["val_loss was never used" in one.message for one in caplog.records] == [True] * (not any(validated))


def test_one_of_several_processes_is_warned_once_that_it_trains_alone(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, loop = make_model(), TrainingLoop(progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loop.train_epoch(model, DataLoader(x, y, 8), optimizer, epoch=epoch)
    assert caplog.text.count("each of 2 processes") == 1
