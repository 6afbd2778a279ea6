"""Arrays and tables as data: the tensors that their numbers are, and words where they are none."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from etude import DataLoader, DataLoaderFactory
from etude.core import DataError
from etude.data import DataSplits, TensorData, as_loader
from etude.data.sources.arrays import as_tensor, is_column, is_pair


class Table:
    """Behaves as a frame or a series of pandas does, as far as it is asked: columns of different types."""

    def __init__(self, **columns):
        self.values_by_name = {name: np.asarray(values) for name, values in columns.items()}

    @property
    def columns(self):
        return list(self.values_by_name)

    def __getitem__(self, name):
        return self.values_by_name[name]

    def __len__(self):
        return len(next(iter(self.values_by_name.values())))

    def __iter__(self):
        return iter(self.columns)

    def __array__(self, dtype=None, copy=None):
        found = list(self.values_by_name.values())
        several = len({one.dtype.kind for one in found} - set("iuf")) and len({one.dtype.kind for one in found}) > 1
        return np.stack([one.astype(object) if several else one for one in found], axis=1)


DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool", ">f8", ">i4"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(
        dtype,
        arrays.array_shapes(min_dims=1, max_dims=3, max_side=4),
        elements=arrays.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False, allow_subnormal=False),
    )
)


@given(ARRAYS, st.sampled_from(["plain", "backwards", "read only", "transposed"]))
def test_the_numbers_of_an_array(array, way):
    if way == "backwards":
        array = array[::-1]
    elif way == "transposed":
        array = array.T
    elif way == "read only":
        array.flags.writeable = False
    tensor = as_tensor(array, "data")
    is_double = array.dtype.kind == "f" and array.itemsize == 8
    with np.errstate(over="ignore"):
        expected = array.astype(np.float32) if is_double else array
    assert not is_double or tensor.dtype is torch.float32
    assert np.array_equal(tensor.numpy(), expected)


@given(ARRAYS, st.sampled_from([torch.float64, torch.bfloat16]))
def test_floating_numbers_get_the_type_that_is_asked_for(array, dtype):
    assert as_tensor(array, "data", dtype).dtype is (dtype if array.dtype.kind == "f" else as_tensor(array, "").dtype)


def test_tensors_are_taken_as_they_are_and_arrays_are_not_copied():
    tensor = torch.zeros(3, dtype=torch.float64)
    assert as_tensor(tensor, "data").data_ptr() == tensor.data_ptr()
    array = np.zeros(3, np.float32)
    assert as_tensor(array, "data").data_ptr() == array.ctypes.data


def test_a_memory_mapped_file_stays_on_the_disk(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6.0))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert as_tensor(mapped, "data").dtype is torch.float64
    assert as_tensor(mapped, "data").data_ptr() == mapped.ctypes.data


X = np.random.default_rng(0).normal(size=(11, 3))
Y = np.arange(11) % 2
TABLE = Table(a=X[:, 0], b=X[:, 1], c=X[:, 2])
EXPECTED = torch.from_numpy(X).float(), torch.from_numpy(Y)


@pytest.mark.parametrize(
    ("data", "labels"),
    [(X, Y), (X.tolist(), Y.tolist()), (TABLE, Y), (TABLE, Y.tolist()), (torch.from_numpy(X).float(), Y.tolist())],
    ids=["arrays", "lists", "table", "table and list", "tensor and list"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: DataLoader(x, y, 4, shuffle=False),
        lambda x, y: DataLoader((x, y), batch_size=4, shuffle=False),
        lambda x, y: DataLoader(TensorData(x, y), batch_size=4, shuffle=False),
        lambda x, y: DataLoaderFactory(batch_size=4).create((x, y), training=False),
        lambda x, y: DataSplits(TensorData(x, y), num_classes=2).make_loader("train", 4, shuffle=False),
    ],
    ids=["apart", "pair", "TensorData", "factory", "splits"],
)
def test_every_door_takes_every_form(make, data, labels):
    batches = list(make(data, labels).iterate(0))
    assert torch.equal(torch.cat([batch.data for batch in batches]), EXPECTED[0])
    assert torch.equal(torch.cat([batch.labels for batch in batches]), EXPECTED[1])


def test_a_mapping_of_columns():
    batch = next(DataLoader({"x": X, "table": TABLE, "labels": Y.tolist()}, batch_size=4, shuffle=False).iterate(0))
    assert torch.equal(batch["x"], EXPECTED[0][:4])
    assert torch.equal(batch["table"], EXPECTED[0][:4])
    assert batch["labels"].dtype is torch.int64


def test_numbers_of_several_types_in_one_table():
    table = Table(price=[0.5, 1.5], sold=[True, False], count=[3, 4])
    assert as_tensor(table, "data").tolist() == [[0.5, 1.0, 3.0], [1.5, 0.0, 4.0]]
    whole = as_tensor(Table(sold=[True, False], count=[3, 4]), "data")
    assert (whole.dtype, whole.tolist()) == (torch.int64, [[1, 3], [0, 4]])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Table(price=[0.5, 1.5], town=["Ulm", "Bonn"]), "town"),
        (np.array(["a", "b"]), "<U1"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
        (np.array([1, None]), "object"),
        pytest.param(
            np.zeros(2, np.clongdouble),
            "complex256",
            marks=pytest.mark.skipif(np.dtype(np.clongdouble).itemsize != 32, reason="no such numbers here"),
        ),
        ([[1.0, 2.0], [3.0]], "rows of equal length"),
        (["a", "b"], "list"),
        (5, "int"),
        (np.array(5.0), "single number"),
    ],
    ids=["text in a table", "text", "dates", "objects", "long", "ragged", "words", "number", "scalar"],
)
def test_what_is_no_numbers_is_named(value, found):
    with pytest.raises(DataError, match=found) as caught:
        as_tensor(value, "labels")
    assert str(caught.value).startswith("labels")


@pytest.mark.parametrize(
    "source",
    [TABLE, X.tolist(), (TABLE, Y), (X.tolist(), Y.tolist())],
    ids=["table", "list", "table and labels", "lists"],
)
def test_data_is_not_taken_for_batches(source):
    with pytest.raises(DataError, match="cannot take batches"):
        as_loader(source)


def test_what_is_data_and_what_is_a_list_of_batches():
    assert is_pair((X, Y))
    assert is_pair((X.tolist(), Y.tolist()))
    assert not is_pair(([torch.zeros(2)], [torch.zeros(2)]))
    assert not is_column([(X, Y)])
    assert not is_column([np.zeros(2)])
    assert not is_column("words")


def test_a_list_without_labels_is_a_data_set():
    assert next(DataLoader([1, 2, 3], batch_size=2, shuffle=False).iterate(0)).tolist() == [1, 2]


def test_pandas_is_never_imported():
    before = "pandas" in sys.modules
    list(DataLoader(TABLE, Y, 4))
    assert ("pandas" in sys.modules) == before


def test_frames_and_series_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}, index=range(100, 111))
    batches = list(DataLoader(frame, pandas.Series(Y, index=frame.index), 4, shuffle=False).iterate(0))
    assert torch.equal(torch.cat([batch.data for batch in batches]), EXPECTED[0])
    assert torch.equal(torch.cat([batch.labels for batch in batches]), EXPECTED[1])
    with pytest.raises(DataError, match="town"):
        DataLoader(frame.assign(town="Ulm"))
