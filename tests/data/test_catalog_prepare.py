"""Other files prepared as in training: files of other shapes and kinds are refused by what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from etude.config import lookup
from etude.core import DataError
from etude.data import make_loader
from etude.data.catalog.arrays import load_arrays
from etude.data.catalog.tabular import load_csv

OPTIONS = {"missing": "error", "unseen": "error", "standardize": True, "standardize_target": False}
NUMBERS = st.floats(-1e6, 1e6, width=32)


def prepare(name, path, facts, labelled=False, **arguments):
    facts = json.loads(json.dumps(facts))  # as a checkpoint keeps them
    return lookup("data", name).prepare(Path(path), facts, arguments, labelled)


@given(st.lists(st.tuples(NUMBERS, st.sampled_from("xyz"), st.sampled_from(["no", "yes"])), min_size=8, max_size=30))
def test_rows_of_the_training_file_are_the_same_again(tmp_path_factory, rows):
    rows = [(1.0, "x", "no"), (2.0, "y", "yes"), (3.0, "z", "no"), *rows]
    path = tmp_path_factory.mktemp("t") / "d.csv"
    path.write_text("a,c,y\n" + "\n".join(f"{a!r},{c},{y}" for a, c, y in rows))
    splits = load_csv(str(path), "y", columns=["a", "c"], validation=0.0, test=0.0)
    other = prepare("csv", path, splits.facts, labelled=True, **OPTIONS)
    torch.testing.assert_close(other.part.data, splits.train.data, rtol=1e-5, atol=1e-5)
    assert torch.equal(other.part.labels, splits.train.labels)
    assert prepare("csv", path, splits.facts, **OPTIONS).part.labels is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int32])
@pytest.mark.parametrize("standardize", [True, False])
def test_arrays_of_any_dtype(tmp_path, dtype, standardize):
    values = np.random.default_rng(0).integers(0, 200, (30, 2, 4, 4)).astype(dtype)
    np.savez(tmp_path / "d.npz", x=values, y=np.arange(30) % 3)
    splits = load_arrays(str(tmp_path / "d.npz"), standardize=standardize, validation=0.0, test=0.0)
    np.save(tmp_path / "x.npy", values)
    given = {"inputs": None, "labels": None, "standardize": standardize}
    other = prepare("arrays", tmp_path / "x.npy", splits.facts, **given)
    (found,) = make_loader(other.part, 30, shuffle=False)
    (expected,) = make_loader(splits.train, 30, shuffle=False)
    torch.testing.assert_close(found.data, expected.data)
    assert found.labels is None
    np.save(tmp_path / "x.npy", values[:, :1])
    with pytest.raises(DataError, match=r"\[1, 4, 4\].*\[2, 4, 4\]"):
        prepare("arrays", tmp_path / "x.npy", splits.facts, **given)
    np.savez(tmp_path / "e.npz", x=values, y=np.arange(30) % 4)
    with pytest.raises(DataError, match="3"):
        prepare("arrays", tmp_path / "e.npz", splits.facts, labelled=True, **given)


@pytest.mark.parametrize("shape", [(5, 28, 28), (5, 1, 28, 28)])
def test_digits(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.save(tmp_path / "x.npy", images)
    part = prepare("mnist", tmp_path / "x.npy", {}, normalize=True).part
    (batch,) = make_loader(part, 5, shuffle=False)
    expected = (images.reshape(5, 1, 28, 28) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(batch.data.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("images", [np.zeros((5, 28, 28), np.float32), np.zeros((5, 20, 20), np.uint8)])
def test_images_that_are_no_digits(tmp_path, images):
    np.save(tmp_path / "x.npy", images)
    with pytest.raises(DataError, match=r"28, 28"):
        prepare("mnist", tmp_path / "x.npy", {}, normalize=True)


def test_a_parquet_file_whose_column_is_of_another_kind(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.csv"
    path.write_text("a,y\n" + "\n".join(f"{i},{i % 2}" for i in range(30)))
    facts = load_csv(str(path), "y", columns=["a"], validation=0.0, test=0.0).facts
    parquet.write_table(pa.table({"a": ["one", "two"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="'a'"):
        prepare("parquet", tmp_path / "d.parquet", facts, **OPTIONS)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
def test_files_that_do_not_exist(tmp_path, name):
    with pytest.raises(DataError, match=name):
        prepare("mnist", tmp_path / name, {}, normalize=True)
