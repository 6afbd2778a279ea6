"""Reading idx files: right values, and damaged files refused."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from etude.core.errors import DataError
from etude.data import read_idx
from etude.data.catalog.mnist import parse_idx

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def encode(array):
    header = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@settings(deadline=None)
@given(
    st.sampled_from(sorted(CODES)).flatmap(
        lambda code: arrays.arrays(code, arrays.array_shapes(max_dims=4, max_side=5, min_side=0))
    )
)
def test_what_was_written_is_read(array):
    read = parse_idx(encode(array), "test")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
    assert read.flags.writeable


@given(st.integers(0, 27))
def test_every_truncation_is_noticed(length):
    raw = encode(np.arange(12, dtype=np.uint8).reshape(3, 4))[:-1]
    with pytest.raises(DataError, match=r"truncated|not an idx file"):
        parse_idx(raw[:length], "digits")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "digits: not an idx file .*nothing"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "not an idx file .*89 50 4e 47"),
        (bytes([0, 0, 7, 1, 0, 0, 0, 1, 5]), "not an idx file"),
        (bytes([0, 0, 8, 0]), "not an idx file"),
        (bytes([0, 0, 8, 3, 0, 0]), "truncated: 6 bytes, but the header alone takes 16"),
        (encode(np.arange(5, dtype=np.uint8)) + b"x", r"too long: 14 bytes, but its header \(5,\) asks for 13"),
    ],
)
def test_foreign_files_are_refused_in_one_line(raw, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_idx(raw, "digits")
    assert "\n" not in str(caught.value)


def test_files_are_read_by_path(tmp_path):
    path = tmp_path / "values-idx1-ubyte"
    path.write_bytes(encode(np.array([3, 1], np.uint8)))
    assert read_idx(path).tolist() == [3, 1]
    with pytest.raises(DataError, match=r"absent: cannot be read \(No such file"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize("make", [bytes, bytearray, lambda raw: memoryview(bytearray(raw))])
@pytest.mark.parametrize(("kind", "dtype"), [(0x08, "u1"), (0x0B, ">i2"), (0x0D, ">f4")])
def test_an_array_can_be_written_whatever_it_was_read_from(make, kind, dtype):
    values = np.array([[1, 2, 3], [4, 5, 6]], dtype)
    raw = bytes([0, 0, kind, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + values.tobytes()
    found = parse_idx(make(raw), "example")
    assert found.dtype.isnative
    assert found.tolist() == values.tolist()
    found[:] = 0
    assert raw.endswith(values.tobytes())
