"""Damaged token files: whatever happens to their bytes, reading gives right data or a DataError, and checks find it."""

import contextlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens

IDS = np.arange(1, 201)
LENGTHS = [50, 0, 30, 120]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "whole.bin"
    with TokenWriter(
        path, streams={"types": "int16"}, sample_labels={"label": ("float32", 2)}, meta={"vocab_size": 201}
    ) as writer:
        writer.add_many(IDS, LENGTHS, streams={"types": -IDS}, labels={"label": np.arange(8).reshape(4, 2)})
    return path.read_bytes()


def read_everything(path):
    """All that can be read, as plain lists."""
    tokens = open_tokens(path)
    assert tokens.format == "etude"
    return [
        tokens.lengths().tolist(),
        tokens.rows([0, tokens.num_tokens - 5], 5).tolist(),
        tokens.read(*tokens.spans(np.arange(len(tokens)))).tolist(),
        tokens.document_at(np.arange(tokens.num_tokens)).tolist(),
        [[sample.ids.tolist(), sample.labels.tolist()] for sample in tokens],
        tokens.rows([0], tokens.num_tokens, "types").tolist(),
        tokens.label("label", np.arange(len(tokens))).tolist(),
        dict(tokens.meta),
    ]


def what_the_check_says(path):
    try:
        check_tokens(path)
    except DataError as error:
        return str(error)
    return None


edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 10**6), st.integers(1, 200)),
        st.tuples(st.just("insert"), st.integers(0, 10**6), st.binary(min_size=1, max_size=80)),
        st.tuples(st.just("end"), st.integers(0, 10**6), st.none()),
        st.tuples(st.just("zero"), st.integers(0, 10**6), st.integers(1, 200)),
    ),
    min_size=1,
    max_size=3,
)


def edited(raw, changes):
    raw = bytearray(raw)
    for kind, where, what in changes:
        where %= max(len(raw), 1)
        if kind == "flip" and raw:
            raw[where] ^= what
        elif kind == "cut":
            del raw[where : where + what]
        elif kind == "insert":
            raw[where:where] = what
        elif kind == "end":
            del raw[where:]
        elif kind == "zero":
            raw[where : where + what] = bytes(len(raw[where : where + what]))
    return bytes(raw)


@given(changes=edits)
def test_any_damage_is_an_error_or_found_by_the_check(tmp_path_factory, whole, changes):
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    damaged = edited(whole, changes)
    path.write_bytes(whole)
    right = read_everything(path)
    path.write_bytes(damaged)
    with contextlib.suppress(DataError):
        read_everything(path)  # nothing else is raised
    if (problem := what_the_check_says(path)) is None:
        assert read_everything(path) == right  # only bytes between the sections differ
    else:
        assert "fuzzed.bin" in problem
        assert "\n" not in problem


def test_flipped_bytes_are_found(tmp_path, whole):
    path = tmp_path / "x.bin"
    path.write_bytes(whole)
    right = read_everything(path)
    missed = []
    for position in [*range(64), *range(64, len(whole), 3)]:
        path.write_bytes(edited(whole, [("flip", position, 1 << position % 8)]))
        try:
            check_tokens(path)
        except DataError:
            continue
        missed.append(position)
        assert read_everything(path) == right
    assert all(whole[position] == 0 for position in missed)  # padding


@given(data=st.data())
def test_any_header_with_a_right_checksum_is_safe(tmp_path_factory, whole, data):
    """Somebody else's writer may get anything wrong and still sign it."""
    path = tmp_path_factory.getbasetemp() / "signed.bin"
    offset, size = struct.unpack("<QQ", whole[16:32])
    text = whole[offset : offset + size]
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["number", "word", "byte"]))
        if kind == "byte":
            text = edited(text, data.draw(edits))
            continue
        pattern = b"0123456789" if kind == "number" else b'"abcdefghijklmnopqrstuvwxyz0123456789'
        spots = [i for i, byte in enumerate(text) if byte in pattern and text[i - 1] not in pattern]
        if not spots:
            break
        start = data.draw(st.sampled_from(spots))
        stop = start
        while stop < len(text) and text[stop] in pattern:
            stop += 1
        values = [b"0", b"1", b"-1", b"64", b"200", b"400", b"9223372036854775808", b"1e9", b"2.5", b"null", b"NaN"]
        values += [b"[]", b"{}", b"true", b'"uint16"', b'"uint32"', b'"tokens"', b'"index"', b'"label"', b"9" * 400]
        text = text[:start] + data.draw(st.sampled_from(values)) + text[stop:]
    preamble = struct.pack("<8sIIQQQ20x", b"ETUDETOK", 1, zlib.crc32(text), offset, len(text), offset + len(text))
    path.write_bytes(preamble + struct.pack("<I", zlib.crc32(preamble)) + whole[64:offset] + text)
    with contextlib.suppress(DataError, KeyError):  # a section with another name is not found by its old one
        read_everything(path)
    with contextlib.suppress(DataError):
        check_tokens(path)


@given(changes=edits)
def test_damaged_megatron_indices_are_safe(tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp()
    lengths, ends = np.array([3, 0, 4, 3], np.int32), np.array([0, 2, 2, 4], np.int64)
    np.arange(10, dtype=np.int32).tofile(folder / "m.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 4, 4)
    raw = head + lengths.tobytes() + np.array([0, 12, 12, 28]).tobytes() + ends.tobytes()
    (folder / "m.idx").write_bytes(edited(raw, changes))
    with contextlib.suppress(DataError):
        tokens = open_tokens(folder / "m.idx")
        for sample in tokens:
            assert set(sample.ids.tolist()) <= set(range(10)) or tokens.dtype != np.int32
        tokens.document_at(np.arange(tokens.num_tokens))
    with contextlib.suppress(DataError):
        check_tokens(folder / "m.idx")


@given(raw=st.binary(max_size=300))
def test_any_bytes_are_opened_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    for prefix in (b"", b"ETUDETOK", b"ETUDETOK\x01\0\0\0", struct.pack("<i", 20240520)):
        path.write_bytes(prefix + raw)
        with contextlib.suppress(DataError):
            tokens = open_tokens(path, dtype="uint8")
            assert tokens.format == "flat"
            assert tokens.read([0], [tokens.num_tokens]).tobytes() == prefix + raw
