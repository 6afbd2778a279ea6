"""`arrays`: .npz, .safetensors and folders of .npy; mapped where they can be, and never unpickled."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from etude.core import DataError
from etude.data import make_loader
from etude.data.catalog import arrays
from etude.data.catalog.arrays import load_arrays
from etude.data.catalog.rows import ArrayRows, Scaling


def save(folder, kind, name="d", **arrays):
    path = folder / (name if kind == "npy" else f"{name}.{kind}")
    if kind == "npy":
        path.mkdir()
        for key, array in arrays.items():
            np.save(path / f"{key}.npy", array)
    elif kind == "npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return str(path)


def everything(part):
    batch = part.gather(np.arange(len(part)), epoch=0, seed=0)
    return batch.data, batch.labels


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_all_files_give_the_same(tmp_path, kind):
    source = np.random.default_rng(0)
    x, y = source.normal(3, 2, (40, 5)).astype("f4"), source.integers(0, 3, 40)
    splits = load_arrays(save(tmp_path, kind, inputs=x, labels=y), validation=0.25, test=0.25)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [20, 10, 10]
    assert (splits.num_classes, splits.input_shape) == (3, (5,))
    mean, std = x[splits.train.rows].astype("f8").mean(0), x[splits.train.rows].astype("f8").std(0)
    for part in (splits.train, splits.validation, splits.test):
        data, labels = everything(part)
        np.testing.assert_allclose(data, (x[part.rows] - mean) / std, rtol=1e-4, atol=1e-5)
        assert labels.tolist() == y[part.rows].tolist()
        assert data.dtype == torch.float32
    assert kind == "npz" or str(tmp_path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("inputs", "standardize", "dtype"),
    [
        ("u1", False, "float32"),
        ("f8", False, "float32"),
        ("i4", False, "int64"),
        ("i4", True, "float32"),
        ("u1", True, "float32"),
    ],
)
def test_types_of_inputs(tmp_path, inputs, standardize, dtype):
    x = np.random.default_rng(0).integers(0, 200, (12, 2, 3, 3)).astype(inputs)
    path = save(tmp_path, "npz", x=x, y=np.arange(12) % 2)
    data, _ = everything(load_arrays(path, standardize=standardize, validation=0.0, test=0.0).train)
    assert str(data.dtype) == f"torch.{dtype}"
    wide = x.astype("f8")
    expected = wide / 255 if inputs == "u1" else wide
    if standardize:
        axes = (0, 2, 3)
        expected = (wide - wide.mean(axes, keepdims=True)) / wide.std(axes, keepdims=True)
    np.testing.assert_allclose(data, expected, rtol=1e-5, atol=1e-6)


def test_labels_of_numbers(tmp_path):
    x = np.ones((6, 2))
    one = load_arrays(save(tmp_path, "npz", "a", x=x, y=np.arange(6.0)), validation=0.0, test=0.0)
    two = load_arrays(save(tmp_path, "npz", "b", x=x, y=np.ones((6, 2), "f4")), validation=0.0, test=0.0)
    assert one.model_sizes() == {"input_shape": (2,), "in_features": 2, "out_features": 1}
    assert everything(one.train)[1].shape == (6, 1)
    assert two.model_sizes()["out_features"] == 2


def test_parts_in_files_of_their_own(tmp_path):
    train = save(tmp_path, "npz", "train", x=np.array([[0.0], [2.0]]), y=np.array([0, 1]))
    test = save(tmp_path, "npy", "test", x=np.array([[4.0]]), y=np.array([2]))
    splits = load_arrays(train, validation=0.0, test=test)
    assert everything(splits.test)[0].tolist() == [[3.0]]
    assert splits.num_classes == 3
    assert splits.validation is None


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    x, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    prints = [
        load_arrays(save(tmp_path, kind, f"d{i}", x=values, y=y), validation=0.0, test=0.0).facts["fingerprint"]
        for i, (kind, values) in enumerate([("npz", x), ("npy", x), ("npz", x + 1)])
    ]
    assert prints[0] == prints[1] != prints[2]


@given(st.integers(1, 4), st.integers(1, 30), st.floats(-1e6, 1e6))
def test_moments_in_blocks_are_those_of_the_whole(block, rows, offset):
    values = np.random.default_rng(rows).normal(offset, 3.0, (rows, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.data.catalog.rows._BLOCK_BYTES", block * 16)
        scaling = Scaling.of(values, np.arange(rows))
    np.testing.assert_allclose(scaling.mean, values.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(scaling.std, np.where(values.std(0) > 1e-9, values.std(0), 1.0), rtol=1e-5)


def test_large_arrays_are_looked_at_in_evenly_spaced_rows(tmp_path, monkeypatch):
    path = save(tmp_path, "npy", x=np.arange(1000.0)[:, None], y=np.arange(1000) % 2)
    whole = load_arrays(path, validation=0.0, test=0.0)
    monkeypatch.setattr("etude.data.catalog.rows.SAMPLE_BYTES", 8 * 100)
    some = load_arrays(path, validation=0.0, test=0.0)
    assert some.facts["mean"] == pytest.approx(whole.facts["mean"], rel=0.01)
    assert some.facts == load_arrays(path, validation=0.0, test=0.0).facts


def test_a_loader_shuffles_them(tmp_path):
    rows = ArrayRows(np.arange(10.0)[:, None], np.arange(10))
    batches = list(make_loader(rows, 4, seed=1).iterate(epoch=0))
    assert [len(batch.labels) for batch in batches] == [4, 4, 2]
    assert torch.equal(
        torch.cat([batch.data[:, 0] for batch in batches]).long(), torch.cat([b.labels for b in batches])
    )
    again = next(make_loader(rows, 4, seed=1, prefetch=2).iterate(epoch=0, position=4))
    assert torch.equal(again.labels, batches[1].labels)


x, y = np.ones((4, 2)), np.array([0, 1, 0, 1])
HOSTILE = {
    "no inputs": ("npz", {"a": x, "y": y}, {}, ["inputs", "there are: a, y"]),
    "unknown name": ("npz", {"x": x, "y": y}, {"inputs": "xx"}, ["'xx'", "'x'"]),
    "lengths": ("safetensors", {"x": x, "y": y[:3]}, {}, ["4 inputs", "3 labels"]),
    "objects": ("npz", {"x": np.array([{}, []], dtype=object), "y": y[:2]}, {}, ["'x'", "Python objects"]),
    "objects in npy": ("npy", {"x": np.array([{}, []], dtype=object), "y": y[:2]}, {}, ["'x'", "Python objects"]),
    "text": ("npz", {"x": np.array(["a", "b"]), "y": y[:2]}, {}, ["inputs", "type"]),
    "no samples": ("npz", {"x": x[:0], "y": y[:0]}, {}, ["no samples"]),
    "a single number": ("npz", {"x": np.array(1.0), "y": y}, {}, ["inputs", "no samples"]),
    "negative classes": ("npz", {"x": x, "y": y - 1}, {}, ["labels", "-1"]),
    "one class": ("npz", {"x": x, "y": y * 0}, {}, ["one class"]),
    "not finite": ("npz", {"x": x * np.array([[1], [1], [np.nan], [1]]), "y": y}, {}, ["sample 2"]),
    "label not finite": ("npz", {"x": x, "y": np.array([0.0, 1.0, np.inf, 0.0])}, {}, ["label 2"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(tmp_path, case):
    kind, arrays, options, facts = HOSTILE[case]
    with pytest.raises(DataError) as caught:
        load_arrays(save(tmp_path, kind, **arrays), validation=0.0, test=0.0, **options)
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "npy"])
@pytest.mark.parametrize("keep", [0, 5, 100])
def test_truncated_files(tmp_path, kind, keep):
    path = tmp_path / save(tmp_path, kind, x=x, y=y)
    file = path / "x.npy" if kind == "npy" else path
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match="cannot be read"):
        load_arrays(str(path))


@pytest.mark.parametrize(("name", "fact"), [("nothing.npz", "does not exist"), ("d.txt", "npz or .safetensors")])
def test_files_that_are_none(tmp_path, name, fact):
    (tmp_path / "d.txt").write_text("x")
    with pytest.raises(DataError, match=fact):
        load_arrays(str(tmp_path / name))


def test_an_archive_that_unpacks_to_far_more_than_it_holds_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((1000, 500)), y=np.arange(1000) % 2)
    load_arrays(str(path))
    monkeypatch.setattr(arrays, "MAX_BYTES", 2**20)
    with pytest.raises(DataError, match=r"'x'.* 4,000,128 bytes; .*savez") as caught:
        load_arrays(str(path))
    assert "\n" not in str(caught.value)
    np.savez(path, x=np.zeros((1000, 500)), y=np.arange(1000) % 2)
    load_arrays(str(path))


def test_a_shape_that_no_memory_holds_is_refused(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}"
    array = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n" + bytes(64)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", array)
        archive.writestr("y.npy", array)
    with pytest.raises(DataError, match="'x' cannot be read"):
        load_arrays(str(tmp_path / "d.npz"))
