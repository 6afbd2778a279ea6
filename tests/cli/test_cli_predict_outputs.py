"""Predictions from the command line of models with several outputs, of several tasks and of token data."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data_files import write_arrays
from torch import Tensor, nn

from etude import load_model, register
from etude.data import DataSplits, OtherData, TensorData, TokenWriter


@dataclass
class Pair:
    score: Tensor
    rest: tuple[Tensor, Tensor]
    note: str = "not a tensor"


FORMS = {
    "dict": lambda a, b: {"logits_of": a, "size": b, "loss": a.sum()},
    "tuple": lambda a, b: (a, b),
    "dataclass": lambda a, b: Pair(b, (a, a + 1)),
}
COLUMNS = {
    "dict": ["logits_of_0", "logits_of_1", "logits_of_2", "size"],
    "tuple": ["output_0_0", "output_0_1", "output_0_2", "output_1"],
    "dataclass": ["score", *(f"rest_{i}_{j}" for i in range(2) for j in range(3))],
}


@register("model", "several_outputs")
class SeveralOutputs(nn.Module):
    def __init__(self, form: str, wide: bool = False):
        super().__init__()
        self.form, self.wide = form, wide
        self.logits, self.size = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x, labels=None):
        x = x.flatten(1)
        logits = self.logits(x)
        if labels is not None:
            return nn.functional.cross_entropy(logits, labels), logits
        size = self.size(x)
        return FORMS[self.form](logits, size[:, :, None] if self.wide else size)


@pytest.fixture
def train(etude, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(model, data, **sections):
        config = {
            "model": model,
            "data": data,
            "training": {"epochs": 1, "batch_size": 16, "device": "cpu"},
            **sections,
        }
        Path("c.yaml").write_text(yaml.safe_dump(config))
        outcome = etude("train", "c.yaml", "--run-dir", "run", "-q")
        assert outcome.code == 0, outcome.err

    return call


ARRAYS = {"name": "arrays", "path": "d.npz", "inputs": "x", "labels": "y", "standardize": False}


def expected_of(inputs):
    with torch.no_grad():
        return load_model("run")(torch.from_numpy(inputs).float())


@pytest.mark.parametrize("form", FORMS)
def test_every_output_has_columns_of_its_own(train, etude, form):
    write_arrays()
    train({"name": "several_outputs", "form": form}, ARRAYS, loss="model")
    inputs = np.random.default_rng(1).normal(size=(21, 4))
    np.save("new.npy", inputs)
    outcome = etude("predict", "run", "--data", "new.npy", "--out", "p.csv")
    assert outcome.code == 0, outcome.err
    expected = expected_of(inputs)
    flat = {
        "dict": lambda: [expected["logits_of"], expected["size"]],
        "tuple": lambda: list(expected),
        "dataclass": lambda: [expected.score, *expected.rest],
    }[form]()
    with Path("p.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == COLUMNS[form]
    np.testing.assert_allclose(np.array(rows, dtype=float), torch.cat(flat, 1), rtol=1e-4, atol=1e-5)
    assert etude("predict", "run", "--data", "new.npy", "--out", "p.npz").code == 0
    for one, other in zip(np.load("p.npz").values(), flat, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert etude("predict", "run", "--data", "new.npy", "--out", "p.jsonl").code == 0
    last = json.loads(Path("p.jsonl").read_text().splitlines()[-1])
    np.testing.assert_allclose(next(iter(last.values())), flat[0][-1], rtol=1e-4, atol=1e-5)
    outcome = etude("predict", "run", "--data", "new.npy", "--out", "p.npy")
    assert outcome.code == 2
    assert ".npz" in outcome.err
    assert not Path("p.npy").exists()


def test_what_does_not_fit_into_a_table_is_refused(train, etude):
    write_arrays()
    train({"name": "several_outputs", "form": "dict", "wide": True}, ARRAYS, loss="model")
    np.save("new.npy", np.zeros((5, 4)))
    outcome = etude("predict", "run", "--data", "new.npy", "--out", "p.csv")
    assert (outcome.code, "size has the shape (5, 1, 1)" in outcome.err) == (2, True)
    assert etude("predict", "run", "--data", "new.npy", "--out", "p.jsonl").code == 0


def prepare_two(path, facts, arguments, labelled):
    return OtherData(TensorData({"inputs": torch.from_numpy(np.load(path)).float()}))


@register("data", "two_labels", prepare=prepare_two)
def two_labels() -> DataSplits:
    x = torch.rand(48, 4, generator=torch.Generator().manual_seed(0))
    return DataSplits(TensorData({"inputs": x, "kind": (x.sum(1) > 2).long(), "size": x[:, :2]}), input_shape=(4,))


TASKS = {
    "kind": {"labels": "kind", "head": {"name": "linear", "out_features": 2}, "loss": "cross_entropy"},
    "size": {"labels": "size", "head": {"name": "linear", "out_features": 2}, "loss": "mse"},
}


def test_several_tasks_have_columns_by_task(train, etude):
    train({"name": "mlp", "hidden": [8], "out_features": 6}, "two_labels", tasks=TASKS)
    inputs = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    np.save("new.npy", inputs)
    outcome = etude("predict", "run", "--data", "new.npy", "--out", "p.csv")
    assert outcome.code == 0, outcome.err
    with Path("p.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["kind_0", "kind_1", "size_0", "size_1"]
    with torch.no_grad():
        expected = load_model("run")({"inputs": torch.from_numpy(inputs)}, ["kind", "size"])
    expected = torch.cat([expected["kind"], expected["size"]], 1)
    np.testing.assert_allclose(np.array(rows, dtype=float), expected, rtol=1e-4, atol=1e-5)


LM = {"name": "causal_transformer_lm", "d_model": 16, "n_layers": 1, "n_heads": 2}


def write_tokens(path, lengths):
    source = np.random.default_rng(len(lengths))
    documents = [source.integers(1, 11, length) for length in lengths]
    with TokenWriter(path, meta={"vocab_size": 11}) as writer:
        for one in documents:
            writer.add(one)
    return documents


def test_token_mixtures_predict_a_token_file_in_order(train, etude):
    for name in ("a", "b"):
        Path(name).mkdir()
        write_tokens(f"{name}/train.bin", [9, 17, 33, 12])
    data = {"name": "token_mixture", "roots": {"a": "a", "b": "b"}, "weights": {"a": 1, "b": 2}}
    train(LM, data | {"read": "documents", "length": 40})
    documents = write_tokens("new.bin", [5, 20, 11])
    outcome = etude("predict", "run", "--data", "new.bin", "--out", "p.jsonl", "training.batch_size=2")
    assert outcome.code == 0, outcome.err
    found = [json.loads(line)["prediction"] for line in Path("p.jsonl").read_text().splitlines()]
    model = load_model("run")
    for logits, tokens in zip(found, documents, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(tokens)[None, :-1])[0]
        np.testing.assert_allclose(logits[: len(expected)], expected, rtol=1e-3, atol=1e-4)
    outcome = etude("predict", "run", "--data", "new.bin", "--out", "p.csv", "training.batch_size=2")
    assert outcome.code == 2
    assert ".jsonl" in outcome.err


def test_streams_say_why_a_file_is_refused(train, etude):
    write_arrays()
    train({"name": "mlp", "hidden": [8]}, {"name": "streams", "streams": {"a": ARRAYS, "b": ARRAYS}})
    outcome = etude("predict", "run", "--data", "d.npz", "--out", "p.csv")
    assert outcome.code == 2
    assert "a, b" in outcome.err
