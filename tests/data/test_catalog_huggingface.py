"""`huggingface`: what `save_to_disk` saves, against the same data as CSV and JSONL."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.core import ConfigError, DataError
from etude.data.catalog.huggingface import load_huggingface
from etude.data.catalog.tabular import load_csv
from etude.data.catalog.texts import load_jsonl
from etude.experiment.from_data import look_at


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    return found


@pytest.fixture
def save(datasets, tmp_path):
    def save(name="saved", **splits):
        made = {part: datasets.Dataset.from_dict(columns) for part, columns in splits.items()}
        whole = datasets.DatasetDict(made) if set(made) != {"train"} else made["train"]
        whole.save_to_disk(str(tmp_path / name))
        return str(tmp_path / name)

    return save


TEXTS = {"text": [f"text {i}" for i in range(40)], "label": [["no", "yes"][i % 2] for i in range(40)]}


def everything(part):
    return part.data.gather(np.arange(len(part)), epoch=0, seed=0)


def test_texts_are_those_of_jsonl(save, tmp_path):
    lines = [{"text": text, "label": label} for text, label in zip(*TEXTS.values(), strict=True)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ours = load_jsonl(str(tmp_path / "d.jsonl"), validation=0.2, test=0.1)
    theirs = load_huggingface(save(train=TEXTS), text="text", validation=0.2, test=0.1)
    assert ours.facts == theirs.facts
    assert torch.equal(everything(ours.train)["input_ids"], everything(theirs.train)["input_ids"])


def test_tables_are_those_of_csv(save, tmp_path):
    source = np.random.default_rng(0)
    columns = {
        "a": source.normal(size=40).round(5).tolist(),
        "c": [["x", "y"][i % 2] for i in range(40)],
        "label": [["no", "yes"][i % 2] for i in range(40)],
    }
    rows = zip(*columns.values(), strict=True)
    (tmp_path / "d.csv").write_text("a,c,label\n" + "\n".join(",".join(map(str, row)) for row in rows))
    ours = load_csv(str(tmp_path / "d.csv"), "label")
    theirs = load_huggingface(save(train=columns))
    assert ours.facts == theirs.facts
    assert torch.equal(ours.test.data, theirs.test.data)


def test_splits_and_names_of_classes(datasets, save):
    path = save(train=TEXTS, dev=TEXTS, test={key: values[:5] for key, values in TEXTS.items()})
    assert load_huggingface(path, text="text").facts["rows"] == {"train": 40, "validation": 40, "test": 5}
    assert load_huggingface(path, text="text", validation="test").facts["rows"]["validation"] == 5
    named = datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "label": [1, 0, 1]}).cast_column(
        "label", datasets.ClassLabel(names=["dog", "cat"])
    )
    named.save_to_disk(f"{path}-named")
    splits = load_huggingface(f"{path}-named", validation=0.0, test=0.0)
    assert splits.facts["classes"] == ["cat", "dog"]
    assert splits.train.labels.tolist() == [1 - 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"text": "txt"}, ["'txt'", "text"]),
        ({"text": "text", "target": "y"}, ["'y'"]),
        ({"text": "text", "validation": "valid"}, ["'valid'", "train"]),
        ({"target": "y"}, ["'y'"]),
        ({"columns": ["a"]}, ["'a'"]),
    ],
)
def test_what_is_not_there(save, options, facts):
    with pytest.raises(DataError) as caught:
        load_huggingface(save(train=TEXTS), **options)
    for fact in facts:
        assert fact in str(caught.value)


def test_settings_of_a_table_do_not_go_with_texts(save):
    with pytest.raises(ConfigError, match=r"columns.*text"):
        load_huggingface(save(train=TEXTS), text="text", columns=["text"])


def test_a_config_takes_few_values_for_categories_and_many_for_texts(save):
    finding = look_at(Path(save(train=TEXTS)))
    assert (finding.data["text"], finding.data["target"]) == ("text", "label")
    table = {
        "a": [i / 7 for i in range(40)],
        "c": [["x", "y"][i % 2] for i in range(40)],
        "y": [i % 3 for i in range(40)],
    }
    finding = look_at(Path(save("table", train=table)))
    assert "text" not in finding.data
    assert finding.splits.num_classes == 3
    assert finding.splits.facts["rows"]["train"] == 32


def test_a_name_without_a_network_is_one_line(datasets):
    with pytest.raises(DataError, match="save_to_disk") as caught:
        load_huggingface("nobody/nothing-at-all", text="text")
    assert "\n" not in str(caught.value)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"etude\[data\]"):
        load_huggingface("anything")
