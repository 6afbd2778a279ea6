"""`etude new NAME --from DATA`: the config that it writes trains as it is."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import yaml
from data_files import write_arrays, write_csv, write_dataset, write_images, write_lines

CASES = {
    "csv": (write_csv, "d.csv", ["160 for train", "2 classes: no, yes", "color: 2 texts"]),
    "csv of numbers": (lambda: write_csv(classes=False), "d.csv", ["to predict: y, a number"]),
    "arrays": (write_arrays, "d.npz", ["(4,)", "3 classes"]),
    "jsonl": (write_lines, "d.jsonl", ["'text'", "bad, good"]),
    "images": (write_images, "pictures", ["16 x 16", "dark, light"]),
    "huggingface": (write_dataset, "saved", ["label", "no, yes"]),
}


def config_of(name):
    return yaml.safe_load(Path("experiments", name, "configs", "baseline.yaml").read_text())


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_trains(etude, case):
    make, path, words = CASES[case]
    make()
    made = etude("new", "mine", "--from", path)
    assert made.code == 0, made.err
    for word in words:
        assert word in made.out
    command = made.out.strip().splitlines()[-1].partition("train it with: ")[2].split()
    assert etude("config", "check", "mine/baseline").code == 0
    trained = etude(*command[1:], "training.max_steps=3", "training.device=cpu", "-q")
    assert trained.code == 0, trained.err
    assert "val_loss" in trained.out


def test_columns_are_chosen(etude):
    source = random.Random(0)
    lines = ["id,name,constant,grade,age,group,price,gap"]
    for i in range(200):
        gap = "" if i % 7 == 0 else f"{source.random():.2f}"
        lines.append(f"{i},person {i},5,{i % 3},{source.gauss(40, 9):.1f},{'ab'[i % 2]},{i * 1.5:.2f},{gap}")
    Path("people.csv").write_text("\n".join(lines))
    assert etude("new", "last", "--from", "people.csv").code == 2  # values of the target are missing
    assert etude("new", "price", "--from", "people.csv", "--target", "price").code == 0
    data = config_of("price")["data"]
    assert data["exclude"] == ["name", "constant", "id"]
    assert data["missing"] == "indicator"
    assert data["standardize_target"] is True
    assert config_of("price")["loss"] == "mse"
    assert etude("new", "grade", "--from", "people.csv", "--target", "grade").code == 0
    assert config_of("grade")["data"]["task"] == "classification"
    assert config_of("grade")["loss"] == "cross_entropy"


def test_a_usual_name_comes_before_the_last_column(etude):
    Path("d.csv").write_text("Class,a,b\n" + "".join(f"{'xy'[i % 2]},{i},{i * i}\n" for i in range(40)))
    assert etude("new", "mine", "--from", "d.csv").code == 0
    assert config_of("mine")["data"]["target"] == "Class"


def test_a_european_file(etude):
    Path("d.csv").write_text("a;b;y\n" + "".join(f"{i},5;{i},25;{'xy'[i % 2]}\n" for i in range(40)))
    assert etude("new", "mine", "--from", "d.csv").code == 0
    data = config_of("mine")["data"]
    assert (data["delimiter"], data["decimal"]) == (";", ",")


def test_the_index_that_pandas_writes_is_left_out(etude):
    Path("d.csv").write_text(",a,y\n" + "".join(f"{i},{i * 7 % 11},{'xy'[i % 2]}\n" for i in range(40)))
    assert etude("new", "mine", "--from", "d.csv").code == 0
    assert config_of("mine")["data"]["exclude"] == ["column_1"]


def test_other_keys_of_lines(etude):
    lines = [{"id": i, "short": "s", "words": f"a long text {i}", "class": i % 2} for i in range(40)]
    Path("d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert etude("new", "mine", "--from", "d.jsonl").code == 0
    assert config_of("mine")["data"] == {"name": "jsonl", "path": "d.jsonl", "text": "words", "label": "class"}


def test_images_in_arrays_get_a_convolutional_model(etude):
    np.savez(
        "d.npz",
        images=np.zeros((40, 1, 20, 20), np.uint8) + np.arange(40, dtype=np.uint8)[:, None, None, None],
        labels=np.arange(40) % 4,
    )
    assert etude("new", "mine", "--from", "d.npz").code == 0
    assert config_of("mine")["model"]["name"] == "lenet5"


def test_parquet(etude):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "a": [i * 0.5 for i in range(40)],
        "c": ["xy"[i % 2] for i in range(40)],
        "y": [i % 3 for i in range(40)],
    }
    parquet.write_table(pa.table(columns), "d.parquet")
    assert etude("new", "mine", "--from", "d.parquet").code == 0
    assert config_of("mine")["data"] == {
        "name": "parquet",
        "path": "d.parquet",
        "target": "y",
        "task": "classification",
    }
    assert etude("train", "mine/baseline", "training.max_steps=2", "training.device=cpu", "-q").code == 0


@pytest.mark.parametrize(
    ("path", "content", "facts"),
    [
        ("nothing.csv", None, ["nothing.csv", "does not exist"]),
        ("d.xyz", "x", ["d.xyz", ".csv"]),
        ("d.csv", "", ["d.csv", "empty"]),
        ("d.csv", "a,y\n1,2\n1\n", ["d.csv:3"]),
        ("d.jsonl", "x\n", ["d.jsonl", "JSON"]),
        ("d.npz", "x", ["d.npz", "cannot be read"]),
        ("empty", "folder", ["empty", "classes"]),
    ],
)
def test_what_is_no_data(etude, path, content, facts):
    if content == "folder":
        Path(path).mkdir()
    elif content is not None:
        Path(path).write_text(content)
    refused = etude("new", "mine", "--from", path)
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    for fact in facts:
        assert fact in refused.err
    assert not Path("experiments").exists()


def test_a_column_without_data_is_refused(etude):
    refused = etude("new", "mine", "--target", "y")
    assert refused.code == 2
    assert "--from" in refused.err
    assert not Path("experiments").exists()


def test_mistakes(etude):
    write_csv()
    assert "'z'" in etude("new", "mine", "--from", "d.csv", "--target", "z").err
    assert etude("new", "mine", "--from", "d.csv").code == 0
    assert "exists" in etude("new", "mine", "--from", "d.csv").err
    assert "my-own" in etude("new", "my-own", "--from", "d.csv").err
