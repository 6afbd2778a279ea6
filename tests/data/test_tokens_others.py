"""Token files of other tools: headerless ones, llm.c's and Megatron's, written here by their published layouts."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens

IDS = np.random.default_rng(5).integers(0, 300, 4000)


def write_megatron(prefix, documents, dtype, *, modes=False):
    """Megatron's layout: tokens in .bin; in .idx a head, lengths, byte offsets, and the sequences of documents.

    A document is a list of sequences, a sequence a list of ids.
    """
    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}
    sequences = [sequence for document in documents for sequence in document]
    with Path(f"{prefix}.bin").open("wb") as file:
        for sequence in sequences:
            file.write(np.array(sequence, dtype).tobytes())
    lengths = [len(sequence) for sequence in sequences]
    pointers, ends = [], [0]
    for number in range(len(lengths)):
        pointers.append(sum(lengths[:number]) * np.dtype(dtype).itemsize)
    for document in documents:
        ends.append(ends[-1] + len(document))
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", codes[dtype]))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(ends)))
        file.write(np.array(lengths, np.int32).tobytes() + np.array(pointers, np.int64).tobytes())
        file.write(np.array(ends, np.int64).tobytes())
        if modes:
            file.write(bytes(len(sequences)))


documents_strategy = st.lists(st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=4), min_size=1, max_size=6)


@given(
    documents=documents_strategy,
    dtype=st.sampled_from(["uint8", "int16", "int32", "int64", "uint16"]),
    modes=st.booleans(),
)
def test_megatron_documents_are_their_sequences(tmp_path_factory, documents, dtype, modes):
    prefix = tmp_path_factory.mktemp("megatron") / "corpus_text_document"
    write_megatron(prefix, documents, dtype, modes=modes)
    tokens = open_tokens(f"{prefix}.bin")
    expected = [[token for sequence in document for token in sequence] for document in documents]
    assert tokens.format == "megatron"
    assert tokens.dtype == dtype
    assert [sample.ids.tolist() for sample in tokens] == expected
    assert tokens.lengths().tolist() == [len(document) for document in expected]
    flat = [token for document in expected for token in document]
    assert tokens.num_tokens == len(flat)
    if flat:
        assert tokens.rows([0], len(flat))[0].tolist() == flat
    owners = [number for number, document in enumerate(expected) for _ in document]
    assert tokens.document_at(np.arange(len(flat))).tolist() == owners
    report = check_tokens(f"{prefix}.bin")
    assert (report.num_samples, report.num_tokens, report.checksums) == (len(expected), len(flat), False)


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "corpus"])
@pytest.mark.parametrize("format", ["auto", "megatron"])
def test_megatron_opens_by_either_file_or_the_prefix(tmp_path, name, format):
    write_megatron(tmp_path / "corpus", [[[1, 2], [3]], [[4]]], "int32")
    tokens = open_tokens(tmp_path / name, format=format)
    assert [sample.ids.tolist() for sample in tokens] == [[1, 2, 3], [4]]
    assert [sample.ids.tolist() for sample in pickle.loads(pickle.dumps(tokens))] == [[1, 2, 3], [4]]


def damage(path, offset, raw):
    contents = bytearray(path.read_bytes())
    contents[offset : offset + len(raw)] = raw
    path.write_bytes(contents)


# Three sequences, so: head 34 bytes, lengths at 34, pointers at 46, document indices at 70 (three of them).
@pytest.mark.parametrize(
    ("words", "offset", "raw"),
    [
        ("no index of", 0, b"XMIDIDX"),
        ("no index of", 9, struct.pack("<Q", 2)),
        ("no index of", 17, b"\x63"),
        ("no index of", 17, b"\x07"),
        ("sequences and", 18, struct.pack("<Q", 4)),
        ("sequences and", 18, struct.pack("<Q", 2**63)),
        ("sequences and", 26, struct.pack("<Q", 2**61)),
        ("all tokens of the .bin in order", 42, struct.pack("<i", 7)),
        ("all tokens of the .bin in order", 34, struct.pack("<i", 1)),
        ("all tokens of the .bin in order", 34, struct.pack("<i", -5)),
        ("all tokens of the .bin in order", 46, struct.pack("<q", 4)),
        ("all tokens of the .bin in order", 54, struct.pack("<q", 6)),
        ("all tokens of the .bin in order", 54, struct.pack("<q", 2**62)),
        ("do not contain all", 78, struct.pack("<q", 9)),
        ("do not contain all", 78, struct.pack("<q", -1)),
        ("do not contain all", 86, struct.pack("<q", 2)),
        ("do not contain all", 70, struct.pack("<q", 1)),
    ],
)
def test_a_damaged_megatron_index_is_found(tmp_path, words, offset, raw):
    write_megatron(tmp_path / "x", [[[1, 2], [3]], [[4]]], "int32")
    damage(tmp_path / "x.idx", offset, raw)
    with pytest.raises(DataError, match=words):
        check_tokens(tmp_path / "x.idx")
    try:  # reading gives an error or stays inside
        tokens = open_tokens(tmp_path / "x.idx")
        tokens.document_at(np.arange(4))
        assert all(set(sample.ids.tolist()) <= {1, 2, 3, 4} for sample in tokens)
    except DataError:
        pass


def test_megatron_files_that_are_cut_or_missing(tmp_path):
    write_megatron(tmp_path / "x", [[[1, 2], [3]], [[4]]], "int32")
    whole, index = (tmp_path / "x.bin").read_bytes(), (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.bin").write_bytes(whole[:-4])
    with pytest.raises(DataError, match=r"all tokens of the \.bin"):
        open_tokens(tmp_path / "x.bin")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x.bin: no such file"):
        open_tokens(tmp_path / "x.idx")
    (tmp_path / "x.bin").write_bytes(whole)
    for length in range(9, len(index)):
        (tmp_path / "x.idx").write_bytes(index[:length])
        with pytest.raises(DataError, match=r"cut|damaged"):
            open_tokens(tmp_path / "x.bin")


def test_a_token_file_with_some_index_beside_it_is_a_token_file(tmp_path):
    with TokenWriter(tmp_path / "x.bin") as writer:
        writer.add([5])
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\x00\x00")
    assert open_tokens(tmp_path / "x.bin").format == "etude"
    IDS.astype(np.uint16).tofile(tmp_path / "y.bin")
    (tmp_path / "y.idx").write_text("something else")
    assert open_tokens(tmp_path / "y.bin", dtype="uint16").format == "flat"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_headerless_files(tmp_path, dtype):
    ids = IDS % 200
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    tokens = open_tokens(tmp_path / "train.bin", dtype=dtype)
    assert (tokens.format, tokens.num_tokens, len(tokens), tokens.has_documents) == ("flat", 4000, 1, False)
    assert tokens.rows([7], 100)[0].tolist() == ids[7:107].tolist()
    assert tokens.document_at([0, 3999]).tolist() == [0, 0]
    assert check_tokens(tmp_path / "train.bin", dtype=dtype).largest_id == ids.max()


@pytest.mark.parametrize("begins", [False, True])
def test_documents_are_found_by_an_id(tmp_path, begins, monkeypatch):
    monkeypatch.setattr("etude.data.tokens.vectors.CHUNK_BYTES", 256)  # documents across chunks
    IDS.astype(np.uint16).tofile(tmp_path / "train.bin")
    option = {"dtype": "uint16", "document_start" if begins else "document_end": 17}
    tokens = open_tokens(tmp_path / "train.bin", **option)
    expected, current = [], []
    for token in IDS.tolist():
        if begins and token == 17 and current:
            expected.append(current)
            current = []
        current.append(token)
        if not begins and token == 17:
            expected.append(current)
            current = []
    expected += [current] if current else []
    assert len(tokens) == len(expected) > 5
    assert tokens.has_documents
    assert [sample.ids.tolist() for sample in tokens] == expected
    assert tokens.document_at(np.arange(4000)).tolist() == [i for i, part in enumerate(expected) for _ in part]
    assert len(pickle.loads(pickle.dumps(tokens))) == len(expected)
    assert check_tokens(tmp_path / "train.bin", **option).longest == max(map(len, expected))


def test_wrong_ids_of_document_ends(tmp_path):
    IDS.astype(np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="the id 5000 does not occur"):
        len(open_tokens(tmp_path / "train.bin", dtype="uint16", document_end=5000))
    for options in ({"document_end": -1}, {"document_end": "x"}, {"document_end": True}, {"document_start": 2**40}):
        with pytest.raises(DataError, match="token ids"):
            open_tokens(tmp_path / "train.bin", **options)
    with pytest.raises(DataError, match="exclude each other"):
        open_tokens(tmp_path / "train.bin", document_end=1, document_start=2)
    with TokenWriter(tmp_path / "own.bin") as writer:
        writer.add([1])
    with pytest.raises(DataError, match="remove document_end"):
        open_tokens(tmp_path / "own.bin", document_end=1)


@pytest.mark.parametrize("name", ["tokens.dat", "train.bin"])
def test_a_headerless_file_needs_a_dtype(tmp_path, name):
    IDS.astype(np.uint16).tofile(tmp_path / name)
    for options in ({}, {"format": "flat"}):
        with pytest.raises(DataError, match=rf"{name} .*dtype"):
            open_tokens(tmp_path / name, **options)
    assert open_tokens(tmp_path / name, dtype="uint16").num_tokens == 4000
    with pytest.raises(DataError, match="dtype of a headerless"):
        open_tokens(tmp_path / name, dtype="float32")


def test_a_token_file_is_never_taken_for_headerless(tmp_path):
    path = tmp_path / "x.bin"
    with TokenWriter(path) as writer:
        writer.add(range(100))
    raw = path.read_bytes()
    for contents in (
        b"ETUDEtok" + raw[8:],
        raw[:8] + b"\x09" + raw[9:],
        raw[: len(raw) // 2],
        b"\0\0" + raw,
        raw[64:],
    ):
        path.write_bytes(contents)
        with pytest.raises(DataError, match=r"x\.bin"):
            open_tokens(path)
    path.write_bytes(raw)
    with pytest.raises(DataError, match="remove format"):
        open_tokens(path, format="flat", dtype="uint16")


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_llmc_files(tmp_path, magic, version, dtype):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(IDS)
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(header.tobytes() + IDS.astype(dtype).tobytes())
    tokens = open_tokens(path)
    assert (tokens.format, tokens.num_tokens, tokens.dtype) == ("llm.c", 4000, np.dtype(dtype))
    assert tokens.rows([0], 4000)[0].tolist() == IDS.tolist()
    assert len(open_tokens(path, document_start=17)) > 5
    assert check_tokens(path).largest_id == IDS.max()
    raw = path.read_bytes()
    for words, contents in (
        ("is cut", raw[:-2]),
        ("is cut", raw[:100]),
        ("too long", raw + b"12"),
        ("version 99", raw[:4] + b"\x63" + raw[5:]),
    ):
        path.write_bytes(contents)
        with pytest.raises(DataError, match=words):
            open_tokens(path)


def test_negative_ids_are_found_by_the_check(tmp_path):
    np.array([3, -4, 5], np.int32).tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="token 1 is -4"):
        check_tokens(tmp_path / "x.bin", dtype="int32")
