"""Tensors that do not fit: the layer or the loss with its shapes, in one line, through every door."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import Trainer, TrainingLoop, ValidationLoop, training_step
from etude.core import DataError, EtudeError
from etude.engine.explain import explain_misfit

X, Y = torch.randn(16, 6), torch.randint(0, 3, (16,))
IMAGES = torch.randn(16, 1, 28, 28)


class Own(nn.Module):
    """A model whose forward is given as a function."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.inner = nn.Linear(6, 3)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def trainer(model, data=(X, Y), **options) -> Trainer:
    config = {"epochs": 1, "batch_size": 8, "device": "cpu", **options.pop("config", {})}
    return Trainer(model, data, config=config, progress=False, **options)


def deep(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), layer))


@pytest.mark.parametrize(
    ("layer", "data", "words"),
    [
        (nn.Linear(3, 8), X, ["Linear(in_features=3, out_features=8", "(8, 6) float32"]),
        (nn.Conv2d(1, 8, 3), X, ["Conv2d(1, 8", "(8, 6) float32"]),
        (nn.Conv2d(3, 8, 3), IMAGES, ["Conv2d(3, 8", "(8, 1, 28, 28) float32"]),
        (nn.BatchNorm1d(5), X, ["BatchNorm1d(5", "(8, 6) float32"]),
        (nn.LayerNorm(5), X, ["LayerNorm((5,)", "(8, 6) float32"]),
        (nn.Linear(6, 3), X.double(), ["Linear(in_features=6", "float64", "convert the data"]),
        (nn.Linear(6, 3), X.long(), ["Linear(in_features=6", "int64", "convert the data"]),
        (nn.LSTM(3, 4), torch.randn(16, 6, 5), ["LSTM(3, 4)", "(8, 6, 5) float32"]),
        (nn.MultiheadAttention(8, 2), X, ["MultiheadAttention"]),
        (nn.Embedding(5, 3), X, ["Embedding(5, 3)", "float32", "convert the data"]),
    ],
)
def test_layer_and_shape_are_named(layer, data, words):
    model = deep(layer) if not isinstance(layer, nn.MultiheadAttention) else deep(Attention(layer))
    with pytest.raises(DataError) as caught:
        trainer(model, (data, Y)).train()
    text = str(caught.value)
    assert "layer '1.1" in text
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert caught.value.__cause__ is not None  # torch's own error, with its traceback


class Attention(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x)[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ self.weight,
        lambda _self, x: x.view(len(x), 1, 28, 28),
        lambda self, x: torch.cat([x, self.weight]),
        lambda self, x: self.inner(x) + self.weight,
    ],
    ids=["product", "view", "cat", "sum"],
)
def test_own_code_is_named_with_its_line(forward):
    with pytest.raises(DataError) as caught:
        trainer(Own(forward)).train()
    assert "Own(weight (5, 3))" in str(caught.value)
    assert "(8, 6) float32" in str(caught.value)
    line = forward.__code__.co_firstlineno
    assert f"(test_engine_misfit.py:{line})" in str(caught.value)


def fail(error: Exception):
    raise error


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (lambda _self, _x: {}["missing"], KeyError),
        (lambda self, x: self.missing(x), AttributeError),
        (lambda _self, _x: fail(ValueError("a check of my own")), ValueError),
        (lambda _self, _x: fail(RuntimeError("a check of my own")), RuntimeError),
        (lambda self, _x: self.inner(), TypeError),
        (lambda _self, x: x.no_such_method(), AttributeError),
    ],
    ids=["key", "attribute", "value", "runtime", "argument", "method"],
)
@pytest.mark.parametrize("validation", [None, (X, Y)], ids=["train", "validation"])
def test_mistakes_in_own_code_stay_as_they_are(forward, kind, validation):
    with pytest.raises(kind) as caught:
        trainer(Own(forward), val_loader=validation).train()
    assert not isinstance(caught.value, EtudeError)
    assert any(entry.path.name == "test_engine_misfit.py" for entry in caught.traceback[2:])


@pytest.mark.parametrize(
    ("labels", "loss", "words"),
    [
        (Y + 5, lambda p, t: F.cross_entropy(p, t), ["(8, 3) float32", "(8,) int64 from"]),
        (Y.float(), lambda p, t: F.cross_entropy(p, t), ["(8, 3) float32", "(8,) float32"]),
        (torch.randn(16, 2), lambda p, t: ((p - t) ** 2).mean(), ["(8, 3) float32", "(8, 2) float32"]),
        (Y, nn.HingeEmbeddingLoss(), ["HingeEmbeddingLoss", "(8, 3) float32", "(8,) int64"]),
        (Y[:, None], nn.MultiMarginLoss(), ["MultiMarginLoss", "(8, 3) float32", "(8, 1) int64"]),
    ],
)
def test_loss_is_named_with_predictions_and_labels(labels, loss, words):
    with pytest.raises(DataError) as caught:
        trainer(nn.Linear(6, 3), (X, labels), loss=loss).train()
    assert all(word in str(caught.value) for word in ["loss", "predictions", "labels", *words]), caught.value


def loop_epoch(model):
    TrainingLoop().train_epoch(model, (X, Y), torch.optim.SGD(model.parameters(), 0.1))


DOORS = {
    "train": lambda model: trainer(model).train(),
    "evaluate": lambda model: trainer(model, None, val_loader=(X, Y)).evaluate(),
    "validation": lambda model: trainer(model, (torch.randn(16, 3), Y), val_loader=(X, Y)).train(),
    "late validation": lambda model: trainer(
        model, (torch.randn(16, 3), Y), val_loader=[(X[:8], Y[:8])], config={"sanity_val_batches": 0}
    ).train(),
    "train_epoch": loop_epoch,
    "validate_epoch": lambda model: ValidationLoop().validate_epoch(model, (X, Y)),
    "training_step": lambda model: training_step(model, F.cross_entropy, lambda: None, lambda: None, X, Y),
    "accumulation": lambda model: trainer(model, config={"grad_accum_steps": 2}).train(),
    "recomputed": lambda model: trainer(model, config={"activation_checkpointing": "*"}).train(),
}


@pytest.mark.parametrize("door", DOORS)
def test_through_every_door(door):
    with pytest.raises(DataError, match=r"Linear\(in_features=3.*\(\d+, 6\) float32"):
        DOORS[door](nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@dataclass
class Fields:
    x: torch.Tensor
    labels: torch.Tensor


class ByParts(nn.Linear):
    """Takes two parts of a batch."""

    def forward(self, x, more):
        return super().forward(x + more)


@pytest.mark.parametrize("model", [nn.Linear(6, 3), ByParts(6, 3)])
def test_a_model_that_expects_the_parts_of_an_object_learns_what_it_is_given(model):
    with pytest.raises(DataError, match="input Fields"):
        trainer(model, [Fields(X, Y)]).train()
    if isinstance(model, ByParts):
        with pytest.raises(DataError, match=r"forward\(\) missing .*'more'"):
            trainer(model, [(X, Y)]).train()


def test_error_outside_of_model_and_loss_is_left_alone():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert explain_misfit(caught.value) is None


def test_memory_and_single_samples_are_explained_elsewhere():
    def out_of_memory(_self, _x):
        raise torch.OutOfMemoryError("out of memory; expected to have more")

    with pytest.raises(EtudeError, match="remedies"):
        trainer(Own(out_of_memory)).train()
    with pytest.raises(EtudeError, match="drop_last"):
        trainer(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), config={"batch_size": 15}).train()


def test_a_lost_process_is_no_mismatch(monkeypatch):
    """Modules of torch communicate: the connection may be lost while they run."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    shapes = ValueError("expected 3 values")
    layer = nn.Linear(6, 3)
    for error, is_explained in ((shapes, True), (lost, False)):
        code = compile("def forward(self, x): raise error", nn.modules.linear.__file__, "exec")
        exec(code, names := {"error": error})
        monkeypatch.setattr(nn.Linear, "forward", names["forward"])
        with pytest.raises(type(error)) as caught:
            layer(X)
        assert (explain_misfit(caught.value) is not None) == is_explained


def test_a_failed_start_leaves_the_folder_free(tmp_path):
    with pytest.raises(DataError):
        trainer(nn.Linear(3, 3), output_dir=tmp_path).train()
    trainer(nn.Linear(6, 3), output_dir=tmp_path).train()
