"""The file format: a file written by hand from its description opens; wrong headers are refused in one line."""

import json
import struct
import zlib

import numpy as np
import pytest

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens


def section(name, kind, dtype, shape, offset, raw):
    return {
        "name": name,
        "kind": kind,
        "dtype": dtype,
        "shape": shape,
        "offset": offset,
        "bytes": len(raw),
        "crc32": zlib.crc32(raw),
    }


TOKENS = struct.pack("<5H", 7, 8, 9, 1, 2)
INDEX = struct.pack("<3Q", 0, 3, 5)
ROLES = struct.pack("<5b", 0, 0, 1, -1, 1)
SCORES = struct.pack("<2f", 0.5, -2.0)


def right_header():
    return {
        "meta": {"vocab_size": 10, "tokenizer": "made up"},
        "sections": [
            section("tokens", "tokens", "uint16", [5], 64, TOKENS),
            section("index", "index", "uint64", [3], 128, INDEX),
            section("roles", "stream", "int8", [5], 192, ROLES),
            section("score", "label", "float32", [2, 1], 256, SCORES),
        ],
    }


def write_by_hand(path, header, *, raw_header=None, version=1, magic=b"ETUDETOK", order="<", size=None, place=None):
    """Write a file with nothing but struct, json and zlib, as docs/design/0007-token-files.md says."""
    body = b"".join(part.ljust(64, b"\0") for part in (TOKENS, INDEX, ROLES, SCORES))
    text = json.dumps(header).encode() if raw_header is None else raw_header
    offset = 64 + len(body) if place is None else place
    preamble = struct.pack(f"{order}8sIIQQQ", magic, version, zlib.crc32(text), offset, len(text), 0)[:32]
    preamble += struct.pack(f"{order}Q", 64 + len(body) + len(text) if size is None else size) + bytes(20)
    preamble += struct.pack(f"{order}I", zlib.crc32(preamble))
    path.write_bytes(preamble + body + text)
    return path


def test_a_file_written_by_hand_opens(tmp_path):
    path = write_by_hand(tmp_path / "hand.bin", right_header())
    tokens = open_tokens(path)
    assert (tokens.format, len(tokens), tokens.num_tokens, tokens.vocab_size) == ("etude", 2, 5, 10)
    assert tokens.dtype == np.uint16
    assert tokens.meta["tokenizer"] == "made up"
    assert tokens.streams == ("roles",)
    assert tokens.read([0, 3], [3, 2]).tolist() == [7, 8, 9, 1, 2]
    assert tokens.rows([1, 2], 3, "roles").tolist() == [[0, 1, -1], [1, -1, 1]]
    assert tokens.label("score", np.arange(len(tokens))).tolist() == [[0.5], [-2.0]]
    assert tokens.label("score", [1]).tolist() == [[-2.0]]
    assert check_tokens(path).checksums


def test_the_header_may_lie_before_the_tokens(tmp_path):
    header = right_header()
    for entry in header["sections"]:
        entry["offset"] += 1024
    text = json.dumps(header).encode()
    body = b"".join(part.ljust(64, b"\0") for part in (TOKENS, INDEX, ROLES, SCORES))
    size = 64 + 1024 + len(body)
    preamble = struct.pack("<8sIIQQQ20x", b"ETUDETOK", 1, zlib.crc32(text), 64, len(text), size)
    preamble += struct.pack("<I", zlib.crc32(preamble))
    path = tmp_path / "hand.bin"
    path.write_bytes(preamble + text.ljust(1024) + body)
    assert open_tokens(path)[1].ids.tolist() == [1, 2]


def changed(**changes):
    """A header in which the section named by `of` (tokens by default) is changed."""
    header = right_header()
    of = changes.pop("of", "tokens")
    next(entry for entry in header["sections"] if entry["name"] == of).update(changes)
    return header


def without(name):
    header = right_header()
    header["sections"] = [entry for entry in header["sections"] if entry["name"] != name]
    return header


def with_extra(**entry):
    header = right_header()
    header["sections"].append(section("roles2", "stream", "int8", [5], 192, ROLES) | entry)
    return header


WRONG_HEADERS = [
    ("must be an object with a list of sections", []),
    ("must be an object with a list of sections", {"sections": {}}),
    ("must be an object with a list of sections", "text"),
    ("meta must be an object", right_header() | {"meta": [1]}),
    ("vocab_size", right_header() | {"meta": {"vocab_size": "10"}}),
    ("vocab_size", right_header() | {"meta": {"vocab_size": -1}}),
    ("a section has", {"sections": [5]}),
    ("'tokens'", without("tokens")),
    ("'index'", without("index")),
    ("none twice", with_extra(name="roles", offset=512)),
    ("none twice", with_extra(**section("tokens", "tokens", "uint16", [5], 64, TOKENS))),
    ("overlap", with_extra()),
    ("kind 'other'", changed(kind="other")),
    ("kind ['tokens']", changed(kind=["tokens"])),
    ("name 'words'", changed(name="words")),
    ("name 5", changed(of="roles", name=5)),
    ("has dtype 'float32'", changed(dtype="float32")),
    ("has dtype '|O'", changed(of="roles", dtype="|O")),
    ("has dtype 5", changed(dtype=5)),
    ("has dtype 'uint32'", changed(of="index", dtype="uint32")),
    ("integers", changed(shape=5)),
    ("has shape []", changed(shape=[])),
    ("has shape", changed(shape=[5, 1])),
    ("has shape", changed(of="score", shape=[2, 0], bytes=0)),
    ("integers", changed(shape=[-5])),
    ("integers", changed(shape=[True])),
    ("integers", changed(shape=[5.0])),
    ("integers", changed(shape=[None])),
    ("integers", changed(shape=[2**64])),
    ("integers", changed(offset=-64)),
    ("integers", changed(offset="64")),
    ("integers", changed(bytes=None)),
    ("integers", changed(crc32=1.5)),
    ("shape [6] does not take 10 bytes", changed(shape=[6])),
    ("does not take", changed(shape=[2**62])),
    ("beyond the file", changed(shape=[2**40], bytes=2**41)),
    ("beyond the file", changed(of="score", shape=[2, 2**40], bytes=2**43)),
    ("beyond the file", changed(offset=2**40)),
    ("not a multiple of 64", changed(offset=66)),
    ("'tokens' and 'preamble' overlap", changed(offset=0)),
    ("overlap", changed(offset=128)),
    ("section 'roles' has 4 entries, expected 5", changed(of="roles", shape=[4], bytes=4)),
    ("section 'score' has 1 entries, expected 2", changed(of="score", shape=[1, 2])),
    ("overlap", changed(of="score", offset=320 - 64 + 64)),
    ("section 'index' has 0 entries", changed(of="index", shape=[0], bytes=0)),
    ("its samples go from 0 to 3", changed(of="index", shape=[2], bytes=16) | {"sections": None}),
]


def fits(header):
    """Drop the label where a test changes the number of samples, so that only the index is wrong."""
    if isinstance(header, dict) and header.get("sections", 0) is None:
        header = changed(of="index", shape=[2], bytes=16)
        header["sections"] = header["sections"][:3]
    return header


@pytest.mark.parametrize(("words", "header"), WRONG_HEADERS)
def test_a_wrong_header_is_refused_in_one_line(tmp_path, words, header):
    path = write_by_hand(tmp_path / "wrong.bin", fits(header))
    with pytest.raises(DataError) as caught:
        open_tokens(path)
    message = str(caught.value)
    assert words in message
    assert "wrong.bin" in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b'{"sections": NaN}', b'{"sections": [' + b"9" * 5000 + b"]}", b"[" * 100_000, b"null"],
)
def test_a_header_that_is_not_json_is_refused(tmp_path, text):
    with pytest.raises(DataError, match="header"):
        open_tokens(write_by_hand(tmp_path / "wrong.bin", None, raw_header=text))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("has version 2 of the token format, this etude reads 1; update etude", {"version": 2}),
        ("damaged", {"order": ">"}),
        ("is cut: .* bytes, expected 1,000,000", {"size": 1_000_000}),
        ("longer than it was written", {"size": 100}),
        ("is outside the file", {"place": 2**63}),
        ("is outside the file", {"place": 0}),
    ],
)
def test_a_wrong_preamble_is_refused(tmp_path, words, options):
    with pytest.raises(DataError, match=words):
        open_tokens(write_by_hand(tmp_path / "wrong.bin", right_header(), **options))


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "x.bin"
    with TokenWriter(path) as writer:
        writer.add(range(50))
    raw = path.read_bytes()
    for length in [*range(80), *range(80, len(raw), 7)]:
        path.write_bytes(raw[:length])
        with pytest.raises(DataError, match=r"x\.bin .*(cut|truncated|empty|damaged|not a token file)"):
            open_tokens(path)


@pytest.mark.parametrize("index", [(0, 4, 3, 5), (0, 2**63 + 3, 3, 5), (0, 100, 3, 5), (0, 6, 6, 5)])
def test_a_wrong_index_never_reads_outside(tmp_path, index):
    header = right_header()
    raw = struct.pack("<4Q", *index)
    header["sections"] = [header["sections"][0], section("index", "index", "uint64", [4], 128, raw)]
    path = write_by_hand(tmp_path / "x.bin", header)
    contents = bytearray(path.read_bytes())
    contents[128:160] = raw
    path.write_bytes(contents)
    tokens = open_tokens(path)
    for call in (
        lambda: tokens.spans(np.arange(3)),
        tokens.lengths,
        lambda: tokens[1],
        lambda: list(tokens),
        lambda: check_tokens(path),
    ):
        with pytest.raises(DataError, match="damaged"):
            call()
    for position in range(5):  # a wrong sample is never named: either it holds the position, or that is an error
        try:
            sample = int(tokens.document_at([position])[0])
        except DataError:
            continue
        assert index[sample] <= position < index[sample + 1]


@pytest.mark.parametrize(
    "raw", [b"PK\x03\x04" + bytes(100), b"Once upon a time.\n" * 10, b"\x80\x04" + bytes(101), b""]
)
def test_files_of_other_kinds_are_refused(tmp_path, raw):
    (tmp_path / "x.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.bin (is not a token file|is empty)"):
        open_tokens(tmp_path / "x.bin")


def test_paths_that_are_no_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        open_tokens(tmp_path / "missing.bin")
    with pytest.raises(DataError, match="not a file"):
        open_tokens(tmp_path)
    for name in ("a\0b", "a" * 300):
        with pytest.raises(DataError, match="no such file"):
            open_tokens(name)
    with pytest.raises(DataError, match="format of a token file must be one of"):
        open_tokens(tmp_path, format="parquet")
