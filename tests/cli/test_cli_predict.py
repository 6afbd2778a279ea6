"""Predictions and evaluations of other files from the command line: prepared as in training, without its data."""

import csv
import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data_files import write_arrays, write_csv, write_images, write_lines

from etude import load_model
from etude.config import registry
from etude.data import DataLoaderFactory
from etude.experiment import build_data, evaluate_run, load_config
from etude.experiment.build import World

TABLE = {"name": "mlp", "hidden": [8]}
TEXT = {"name": "text_classifier", "d_model": 16, "n_layers": 1, "n_heads": 2}


@pytest.fixture
def train(etude, tmp_path, monkeypatch):
    """Train a small config in the current folder and return its run folder."""
    monkeypatch.chdir(tmp_path)

    def call(data, model, **sections):
        config = {
            "model": model,
            "data": data,
            "training": {"epochs": 2, "batch_size": 16, "device": "cpu"},
            **sections,
        }
        Path("c.yaml").write_text(yaml.safe_dump(config))
        outcome = etude("train", "c.yaml", "--run-dir", "run", "-q")
        assert outcome.code == 0, outcome.err
        return Path("run")

    return call


def reference(part):
    """Outputs of the trained model for a part of the training data, in order, by plain torch."""
    model = load_model("run")
    found = []
    for batch in DataLoaderFactory(batch_size=1000).create(part, training=False).in_order():
        with torch.no_grad():
            inputs = (batch["input_ids"], batch["attention_mask"]) if isinstance(batch, dict) else (batch.data,)
            found.append(model(*inputs))
    return torch.cat(found).double()


def split(name):
    return getattr(build_data(load_config("run/config.yaml"), World()).splits, name)


def rows(path="p.csv"):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_table_of_classes_without_its_target(train, etude):
    write_csv()
    lines = Path("d.csv").read_text().splitlines()
    train({"name": "csv", "path": "d.csv", "target": "y", "validation": 0.0, "test": 0.0}, TABLE)
    expected = reference(split("train")).softmax(1)
    Path("new.csv").write_text("\n".join(",".join(reversed(line.split(",")[:3])) for line in lines))
    Path("d.csv").unlink()
    outcome = etude("predict", "run", "--data", "new.csv", "--out", "p.csv")
    assert outcome.code == 0, outcome.err
    assert "200" in outcome.out
    found = rows()
    assert list(found[0]) == ["prediction", "p_no", "p_yes"]
    probabilities = torch.tensor([[float(row["p_no"]), float(row["p_yes"])] for row in found]).double()
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-5)
    assert [row["prediction"] for row in found] == [["no", "yes"][place] for place in probabilities.argmax(1)]
    assert etude("predict", "run", "--data", "new.csv", "--out", "p.npy").code == 0
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-4, atol=1e-5)
    assert etude("predict", "run", "--data", "new.csv", "--out", "p.jsonl", "--weights", "last").code == 0
    entries = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert len(entries) == 200
    assert entries[0].keys() == {"prediction", "probabilities"}


def test_a_table_of_numbers_in_its_own_units(train, etude):
    write_csv(classes=False)
    data = {"name": "csv", "path": "d.csv", "target": "y", "standardize_target": True, "validation": 0.0, "test": 0.0}
    train(data, TABLE, loss="mse")
    y = np.array([float(line.split(",")[3]) for line in Path("d.csv").read_text().splitlines()[1:]])
    expected = reference(split("train"))[:, 0].numpy() * y.std() + y.mean()
    for name in ("p.csv", "p.jsonl"):
        assert etude("predict", "run", "--data", "d.csv", "--out", name).code == 0
    np.testing.assert_allclose([float(row["prediction"]) for row in rows()], expected, rtol=1e-4, atol=1e-4)
    entries = [json.loads(line)["prediction"] for line in Path("p.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(entries, expected, rtol=1e-4, atol=1e-4)


def test_missing_values_and_unseen_categories_as_in_training(train, etude):
    Path("d.csv").write_text(
        "a,b,y\n" + "\n".join(f"{i % 7 if i % 5 else ''},{'uv'[i % 2]},{i % 3}" for i in range(60))
    )
    data = {"name": "csv", "path": "d.csv", "target": "y", "task": "classification", "missing": "indicator"}
    train({**data, "unseen": "zeros", "validation": 0.0, "test": 0.0}, TABLE)
    Path("new.csv").write_text("b,a\nw,\nu,3\n,1\n")
    assert etude("predict", "run", "--data", "new.csv", "--out", "p.npy").code == 0
    facts = split("train").data
    mean, std = 0.0, 1.0
    values = np.array([i % 7 for i in range(60) if i % 5], float)
    mean, std = values.mean(), values.std()
    inputs = [[0, 1, 0, 0], [(3 - mean) / std, 0, 1, 0], [(1 - mean) / std, 0, 0, 0]]
    assert facts.shape[1] == 4
    expected = load_model("run")(torch.tensor(inputs, dtype=torch.float32)).softmax(1).detach()
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-4, atol=1e-5)


def test_a_parquet_file_for_a_run_of_csv(train, etude):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow.csv")
    write_csv()
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE)
    parquet.write_table(table.read_csv("d.csv"), "d.parquet")
    assert etude("predict", "run", "--data", "d.csv", "--out", "a.npy").code == 0
    assert etude("predict", "run", "--data", "d.parquet", "--out", "b.npy").code == 0
    np.testing.assert_allclose(np.load("a.npy"), np.load("b.npy"), rtol=1e-4, atol=1e-6)


def test_arrays(train, etude):
    write_arrays()
    train({"name": "arrays", "path": "d.npz", "validation": 0.0, "test": 0.0}, TABLE)
    expected = reference(split("train")).softmax(1)
    arrays = np.load("d.npz")
    np.save("only.npy", arrays["x"])
    np.savez("both.npz", x=arrays["x"])
    Path("d.npz").unlink()
    for name in ("only.npy", "both.npz"):
        assert etude("predict", "run", "--data", name, "--out", "p.csv").code == 0
        found = [[float(row[f"p_{name}"]) for name in range(3)] for row in rows()]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_texts(train, etude):
    write_lines()
    train({"name": "jsonl", "path": "d.jsonl", "max_length": 20, "validation": 0.0, "test": 0.0}, TEXT)
    expected = reference(split("train")).softmax(1)
    entries = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    Path("new.jsonl").write_text("\n".join(json.dumps({"text": one["text"]}) for one in entries))
    assert etude("predict", "run", "--data", "new.jsonl", "--out", "p.csv").code == 0
    found = [[float(row["p_bad"]), float(row["p_good"])] for row in rows()]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_images_are_named_by_their_files(train, etude):
    write_images()
    data = {"name": "image_folder", "path": "pictures", "augment": ["horizontal_flip"], "test": 0.0}
    train(data, {"name": "lenet5"}, training={"epochs": 12, "batch_size": 16, "device": "cpu"})
    Path("flat/deep").mkdir(parents=True)
    for place in range(3):
        shutil.copy(f"pictures/dark/{place}.png", f"flat/d{place}.png")
        shutil.copy(f"pictures/light/{place}.png", f"flat/deep/l{place}.png")
    assert etude("predict", "run", "--data", "flat", "--out", "p.csv").code == 0
    found = rows()
    names = ["d0.png", "d1.png", "d2.png", "deep/l0.png", "deep/l1.png", "deep/l2.png"]
    assert [row["file"] for row in found] == names
    assert [row["prediction"] for row in found] == ["dark"] * 3 + ["light"] * 3
    assert etude("predict", "run", "--data", "flat/d1.png", "--out", "p.csv").code == 0
    assert rows()[0]["prediction"] == "dark"
    outcome = etude("evaluate", "run", "--data", "pictures")
    assert outcome.code == 0, outcome.err
    assert "accuracy" in outcome.out


CASES = {
    "csv": (write_csv, TABLE, {"name": "csv", "path": "d.csv", "target": "y"}, "d.csv"),
    "numbers": (
        lambda: write_csv(classes=False),
        TABLE,
        {"name": "csv", "path": "d.csv", "target": "y", "standardize_target": True},
        "d.csv",
    ),
    "arrays": (write_arrays, TABLE, {"name": "arrays", "path": "d.npz"}, "d.npz"),
    "jsonl": (write_lines, TEXT, {"name": "jsonl", "path": "d.jsonl", "max_length": 20}, "d.jsonl"),
}


@pytest.mark.parametrize("case", CASES)
def test_evaluating_the_training_file_gives_the_numbers_of_its_split(train, etude, case):
    write, model, data, file = CASES[case]
    write()
    loss = {"loss": "mse"} if case == "numbers" else {}
    train({**data, "validation": 0.0, "test": 0.0}, model, **loss)
    expected = evaluate_run("run", split="train").metrics
    Path(file).rename(f"other{Path(file).suffix}")
    found = evaluate_run("run", data=f"other{Path(file).suffix}").metrics
    assert found == pytest.approx(expected, rel=1e-4)
    outcome = etude("evaluate", "run", "--data", f"other{Path(file).suffix}")
    assert outcome.code == 0, outcome.err
    assert f"{found['loss']:.6g}" in outcome.out


def test_evaluating_another_token_file(train, etude, tmp_path):
    for name, seed in (("train", 0), ("other", 1)):
        tokens = np.random.default_rng(seed).integers(0, 20, 3000).astype(np.uint16)
        (tmp_path / "t").mkdir(exist_ok=True)
        tokens.tofile(tmp_path / "t" / f"{name}.bin")
    model = {"name": "transformer_lm", "d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 32}
    data = {"name": "tokens", "root": str(tmp_path / "t"), "length": 16, "vocab_size": 20, "dtype": "uint16"}
    train(data, model, training={"max_steps": 3, "batch_size": 16, "device": "cpu"})
    outcome = etude("evaluate", "run", "--data", tmp_path / "t" / "other.bin")
    assert outcome.code == 0, outcome.err
    assert "perplexity" in outcome.out


BAD = {
    "no such file": (["--data", "nowhere.csv", "--out", "p.csv"], "nowhere.csv"),
    "a column is missing": (["--data", "less.csv", "--out", "p.csv"], "'b'"),
    "an unseen category": (["--data", "blue.csv", "--out", "p.csv"], "'blue'"),
    "an unknown suffix": (["--data", "d.csv", "--out", "p.xlsx"], "p.xlsx"),
    "no such folder": (["--data", "d.csv", "--out", "nowhere/p.csv"], "nowhere"),
    "no such checkpoint": (["--data", "d.csv", "--out", "p.csv", "--weights", "77"], "77"),
}


def test_mistakes_are_one_line(train, etude):
    write_csv()
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE)
    Path("less.csv").write_text("a,color\n1,red\n")
    Path("blue.csv").write_text("a,b,color\n1,2,blue\n")
    before = sorted(path.name for path in Path().iterdir())
    for arguments, named in BAD.values():
        outcome = etude("predict", "run", *arguments)
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
        assert named in outcome.err
    outcome = etude("evaluate", "run", "--data", "blue.csv")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
    assert "'y'" in outcome.err
    assert sorted(path.name for path in Path().iterdir()) == before


def test_a_file_that_cannot_be_written_is_one_line(train, etude, monkeypatch):
    write_csv()
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    outcome = etude("predict", "run", "--data", "d.csv", "--out", "p.npy")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
    assert "p.npy" in outcome.err
    assert not list(Path().glob("*p.npy*"))


def test_data_that_cannot_be_prepared(run, etude, tmp_path):
    outcome = etude("predict", run, "--data", run, "--out", tmp_path / "p.csv")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "cli_points" in outcome.err


def test_facts_of_another_version_are_one_line(train, etude, monkeypatch):
    write_csv()
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE)
    component = registry.lookup("data", "csv")

    def older(path, facts, arguments, labelled):
        return component.prepare(path, {key: facts[key] for key in facts if key != "columns"}, arguments, labelled)

    monkeypatch.setitem(registry._COMPONENTS["data"], "csv", replace(component, prepare=older))
    outcome = etude("predict", "run", "--data", "d.csv", "--out", "p.csv")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
    assert "columns" in outcome.err


def test_the_data_is_not_replaced_by_its_predictions(train, etude):
    write_csv()
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE)
    before = Path("d.csv").read_bytes()
    outcome = etude("predict", "run", "--data", "d.csv", "--out", "./d.csv")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
    assert Path("d.csv").read_bytes() == before


@pytest.mark.parametrize("settings", [{"monitor": "val_f1"}, {"restore_best": True}])
def test_runs_judged_by_a_metric_of_validation(train, etude, settings):
    write_csv()
    training = {"epochs": 1, "batch_size": 16, "device": "cpu", **settings}
    train({"name": "csv", "path": "d.csv", "target": "y"}, TABLE, metrics=["f1"], training=training)
    outcome = etude("predict", "run", "--data", "d.csv", "--out", "p.csv")
    assert (outcome.code, outcome.err) == (0, "")
    outcome = etude("evaluate", "run", "--data", "d.csv")
    assert (outcome.code, outcome.err) == (0, "")
    assert "f1" in outcome.out


def test_a_nan_is_no_class_and_valid_json(train, etude):
    write_arrays()
    train({"name": "arrays", "path": "d.npz"}, TABLE)
    x = np.load("d.npz")["x"][:3].astype(np.float32)
    x[1, 2] = np.nan
    np.save("x.npy", x)
    for name in ("p.csv", "p.jsonl"):
        outcome = etude("predict", "run", "--data", "x.npy", "--out", name)
        assert outcome.code == 0
        assert len(outcome.err.splitlines()) == 1
        assert "NaN" in outcome.err
    assert [bool(row["prediction"]) for row in rows()] == [True, False, True]
    lines = [json.loads(line, parse_constant=pytest.fail) for line in Path("p.jsonl").read_text().splitlines()]
    assert lines[1] == {"prediction": None, "probabilities": dict.fromkeys("012")}
