"""Reading token files: against plain numpy, in threads, other processes and little memory."""

import json
import pickle
import resource
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens, read_dataset

FORKING = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

IDS = np.random.default_rng(3).integers(0, 60_000, 5000)
LENGTHS = [0, 700, 1, 0, 0, 1299, 2999, 1, 0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reading") / "train.bin"
    with TokenWriter(path, streams={"types": "int32"}, sample_labels={"score": "float64"}) as writer:
        writer.add_many(IDS, LENGTHS, streams={"types": -IDS}, labels={"score": np.arange(9) / 2})
    return path


@pytest.fixture
def tokens(path):
    return open_tokens(path)


@given(data=st.data(), stream=st.sampled_from([None, "types"]))
def test_rows_and_spans_are_slices(path, data, stream):
    tokens = open_tokens(path)
    expected = IDS if stream is None else -IDS
    length = data.draw(st.integers(0, 5000))
    starts = data.draw(st.lists(st.integers(0, 5000 - length), max_size=8))
    rows = tokens.rows(np.array(starts, np.int64), length, stream)
    assert rows.shape == (len(starts), length)
    assert rows.dtype == ("uint16" if stream is None else "int32")
    assert all(np.array_equal(row, expected[start : start + length]) for row, start in zip(rows, starts, strict=True))
    lengths = [data.draw(st.integers(0, 5000 - start)) for start in starts]
    parts = [expected[start : start + size] for start, size in zip(starts, lengths, strict=True)]
    assert np.array_equal(tokens.read(starts, lengths, stream), np.concatenate([*parts, expected[:0]]))


def test_rows_without_tokens_may_begin_at_the_end(tokens):
    assert tokens.rows(np.array([0, 5000]), 0).shape == (2, 0)


def test_what_is_read_can_be_written_to(tokens):
    for array in (tokens.rows([0, 1], 10), tokens.read([0], [10]), tokens.lengths(), tokens[1].ids, tokens[1].labels):
        array += 1


def test_documents_and_positions(tokens):
    assert tokens.lengths().tolist() == LENGTHS
    assert tokens.lengths([5, 2, 5]).tolist() == [1299, 1, 1299]
    positions = np.arange(5000)
    expected = np.repeat(np.arange(9), LENGTHS)
    assert np.array_equal(tokens.document_at(positions), expected)
    assert np.array_equal(tokens.document_at(positions[::-7]), expected[::-7])
    assert tokens.document_at([]).shape == (0,)
    starts, lengths = tokens.spans([])
    assert len(starts) == len(lengths) == 0


def test_samples_have_next_tokens_as_labels(tokens):
    sample = tokens[5]
    assert np.array_equal(sample.ids, IDS[701:2000])
    assert np.array_equal(sample.labels, [*IDS[702:2000], -100])
    assert sample.mask.tolist() == [1] * 1299
    assert sample.ids.dtype == sample.labels.dtype == np.int64
    assert tokens[0].labels.shape == (0,)
    assert tokens[-2].ids.tolist() == [IDS[-1]]
    assert [len(sample.ids) for sample in tokens] == LENGTHS
    with pytest.raises(IndexError, match="9 samples"):
        tokens[9]


@pytest.mark.parametrize(
    ("streams", "labels", "expected"),
    [
        ({"labels": "int8"}, {}, [[5, 6], [7]]),
        ({"labels": "int8"}, {"label": "int8"}, [1, 2]),
        ({}, {"labels": "float32"}, [1, 2]),
        ({}, {"other": "float32"}, [[2, -100], [-100]]),
    ],
)
def test_labels_of_a_sample_are_its_own_else_its_stream(tmp_path, streams, labels, expected):
    with TokenWriter(tmp_path / "x.bin", streams=streams, sample_labels=labels) as writer:
        for ids, stream, label in (([1, 2], [5, 6], 1), ([3], [7], 2)):
            writer.add(ids, streams=dict.fromkeys(streams, stream), labels=dict.fromkeys(labels, label))
    assert [sample.labels.tolist() for sample in open_tokens(tmp_path / "x.bin")] == expected


def test_what_lies_outside_is_refused(tokens):
    for starts, length in (
        ([0], 5001),
        ([4999], 2),
        ([-1], 1),
        ([0, 5000], 1),
        ([2**62], 1),
        ([0], -1),
        ([-(2**63)], 5),
    ):
        with pytest.raises(DataError, match="are not within"):
            tokens.rows(starts, length)
    for starts, lengths in (([0], [5001]), ([-1], [1]), ([5], [-1]), ([2**62], [2**62]), ([1, 4999], [1, 2])):
        with pytest.raises(DataError, match="is not within"):
            tokens.read(starts, lengths)
    for index in (9, -1, 2**40):
        with pytest.raises(DataError, match=f"no sample {index:,}"):
            tokens.spans([0, index])
        with pytest.raises(DataError, match="no such sample"):
            tokens.label("score", [index])
    for position in (-1, 5000):
        with pytest.raises(DataError, match="5,000 tokens"):
            tokens.document_at([position])
    with pytest.raises(DataError, match=r"no stream 'roles' .*types"):
        tokens.rows([0], 1, "roles")
    with pytest.raises(DataError, match=r"no label 'x' .*score"):
        tokens.label("x", [0])
    with pytest.raises(DataError, match="2 starts and 1 lengths"):
        tokens.read([0, 1], [1])
    with pytest.raises(DataError, match="integers"):
        tokens.rows([0.5], 1)


def test_a_file_without_samples_opens(tmp_path):
    TokenWriter(tmp_path / "x.bin").close()
    tokens = open_tokens(tmp_path / "x.bin")
    assert (len(tokens), tokens.num_tokens, list(tokens)) == (0, 0, [])
    assert tokens.rows([], 4).shape == (0, 4)
    with pytest.raises(DataError):
        tokens.rows([0], 1)


def test_it_can_be_pickled(tokens, path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    relative = open_tokens(path.name)
    packed = pickle.dumps(relative)
    assert len(packed) < 1000
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(pickle.loads(packed).rows([3], 50), relative.rows([3], 50))
    copy = tmp_path / "copy.bin"
    copy.write_bytes(path.read_bytes())
    packed = pickle.dumps(open_tokens(copy))
    with TokenWriter(copy) as writer:
        writer.add([1])
    with pytest.raises(DataError, match="has changed"):
        pickle.loads(packed)


def test_threads_read_at_the_same_time(tokens):
    wrong = []

    def read(seed):
        source = np.random.default_rng(seed)
        for _ in range(200):
            starts, length = source.integers(0, 4000, 8), int(source.integers(1, 1000))
            if not np.array_equal(tokens.rows(starts, length), IDS[starts[:, None] + np.arange(length)]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_replaced_file_stays_readable(tmp_path):
    with TokenWriter(tmp_path / "x.bin") as writer:
        writer.add(range(100))
    tokens = open_tokens(tmp_path / "x.bin")
    with TokenWriter(tmp_path / "x.bin") as writer:
        writer.add([5])
    assert tokens.rows([0], 100)[0].tolist() == list(range(100))


def test_files_are_closed_when_dropped(path):
    before = len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0
    for _ in range(50):
        open_tokens(path).rows([0], 10)
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_opening_does_not_depend_on_the_size(tmp_path):
    """A sparse file of 1 TB, made by hand, opens and reads at once."""
    count = 2**39
    sections = [
        {"name": "tokens", "kind": "tokens", "dtype": "uint16", "shape": [count], "offset": 4096, "bytes": 2 * count},
        {"name": "index", "kind": "index", "dtype": "uint64", "shape": [3], "offset": 1024, "bytes": 24},
    ]
    text = json.dumps({"sections": [entry | {"crc32": 0} for entry in sections]}).encode()
    preamble = struct.pack("<8sIIQQQ20x", b"ETUDETOK", 1, zlib.crc32(text), 64, len(text), 4096 + 2 * count)
    with (tmp_path / "huge.bin").open("wb") as file:
        file.write(preamble + struct.pack("<I", zlib.crc32(preamble)) + text)
        file.seek(1024)
        file.write(struct.pack("<3Q", 0, 2**38, count))
        try:
            file.truncate(4096 + 2 * count)
        except OSError:
            pytest.skip("this file system cannot hold a sparse file of 1 TB")
        file.seek(4096 + 2 * (count - 2))
        file.write(struct.pack("<2H", 11, 12))
    tokens = open_tokens(tmp_path / "huge.bin")
    assert tokens.rows([0, count - 3], 3).tolist() == [[0, 0, 0], [0, 11, 12]]
    assert tokens.document_at([0, 2**38 - 1, 2**38, count - 1]).tolist() == [0, 0, 1, 1]


def stream(folder, **options):
    """Stream a data set; returns the tokens, the sum of first ids, the peak of memory, and how much it has grown."""
    process = psutil.Process()
    before = process.memory_info()
    peak = count = total = 0
    for number, sample in enumerate(read_dataset(folder, "train", **options)):
        count += len(sample.ids)
        total += int(sample.ids[0])
        if number % 100 == 0:
            peak = max(peak, process.memory_info().rss)
    peak = max(peak, process.memory_info().rss)
    return count, total, peak, peak - before.rss


def write_many(folder, num_tokens, *, flat=False):
    folder.mkdir()
    part = np.tile(np.arange(1000, dtype=np.uint16), 1000)
    if flat:
        with (folder / "train.bin").open("wb") as file:
            for _ in range(num_tokens // part.size):
                file.write(part.tobytes())
    else:
        with TokenWriter(folder / "train.bin") as writer:
            for _ in range(num_tokens // part.size):
                writer.add_many(part, np.full(100, 10_000))
    return folder


@FORKING
def test_streaming_keeps_little_in_memory(tmp_path, in_child):
    """40 MB of tokens: with documents and without."""
    documents = write_many(tmp_path / "documents", 20_000_000)
    flat = write_many(tmp_path / "flat", 20_000_000, flat=True)
    first_of_blocks = int((np.arange(0, 20_000_000, 1024) % 1000).sum())
    for folder, options, total in ((documents, {}, 0), (flat, {"dtype": "uint16"}, first_of_blocks)):
        code, result = in_child(partial(stream, folder, **options))
        assert code == 0
        assert result[:2] == (20_000_000, total)
        assert result[3] < 16 * 2**20


@FORKING
def test_checking_many_small_samples_keeps_little_in_memory(tmp_path, in_child):
    """A file whose index of 48 MB is most of it."""
    path = tmp_path / "x.bin"
    with TokenWriter(path, sample_labels={"label": "int32"}) as writer:
        for _ in range(6):
            writer.add_many(np.ones(10**6, np.uint8), np.ones(10**6, np.int64), labels={"label": np.arange(10**6)})

    def check():
        before = psutil.Process().memory_info().rss
        report = check_tokens(path)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
        return report.num_samples, peak - before

    code, (samples, grown) = in_child(check)
    assert (code, samples) == (0, 6_000_000)
    assert grown < 32 * 2**20


def test_a_checksum_goes_through_all_chunks(path, tmp_path, monkeypatch):
    monkeypatch.setattr("etude.data.tokens.vectors.CHUNK_BYTES", 256)
    assert check_tokens(path).num_tokens == 5000
    raw = bytearray(path.read_bytes())
    raw[64 + 9000] ^= 1
    (tmp_path / "x.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"its tokens do not match their checksum; create or copy it again"):
        check_tokens(tmp_path / "x.bin")


def test_the_report_of_a_check(path):
    report = check_tokens(path)
    assert (report.format, report.dtype, report.num_tokens, report.num_samples) == ("etude", "uint16", 5000, 9)
    assert (report.shortest, report.longest, report.mean_length) == (0, 2999, 5000 / 9)
    assert (report.largest_id, report.vocab_size) == (IDS.max(), None)
    assert (report.streams, report.sample_labels, report.checksums) == (("types",), ("score",), True)


def test_an_id_outside_the_vocabulary_is_found(tmp_path):
    with TokenWriter(tmp_path / "x.bin", meta={"vocab_size": 1000}) as writer:
        writer.add([1, 2, 999])
    raw = (tmp_path / "x.bin").read_bytes()
    text = raw[struct.unpack("<Q", raw[16:24])[0] :].replace(b'"vocab_size":1000', b'"vocab_size":500')
    offset = len(raw) - len(text) - 1
    first = struct.pack("<8sIIQQQ20x", b"ETUDETOK", 1, zlib.crc32(text), offset, len(text), offset + len(text))
    (tmp_path / "x.bin").write_bytes(first + struct.pack("<I", zlib.crc32(first)) + raw[64:offset] + text)
    with pytest.raises(DataError, match="token 2 is 999, outside a vocabulary of 500"):
        check_tokens(tmp_path / "x.bin")


@pytest.mark.slow
def test_200_million_tokens_in_300_megabytes(tmp_path):
    """In a process of its own, with torch in it."""
    folder = write_many(tmp_path / "data", 200_000_000)
    program = f"""
        import sys, torch
        from pathlib import Path
        torch.set_num_threads(1)
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tokens_reading import stream
        print(*stream(Path({str(folder)!r})))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, _, peak, _ = map(int, done.stdout.split())
    assert count == 200_000_000
    assert peak < 300 * 10**6


def test_a_split_is_found_in_either_folder(tmp_path):
    (tmp_path / "tokenized").mkdir()
    for place, first in (("tokenized/train.bin", 1), ("test.bin", 2), ("train.bin", 3)):
        with TokenWriter(tmp_path / place) as writer:
            writer.add([first, 5])
    assert next(read_dataset(tmp_path, "train")).ids.tolist() == [1, 5]
    assert next(read_dataset(str(tmp_path / "tokenized") + "/", "train")).ids.tolist() == [1, 5]
    assert next(read_dataset(tmp_path, "test")).ids.tolist() == [2, 5]
    with pytest.raises(DataError, match="the splits there are: test, train"):
        read_dataset(tmp_path, "validation")
    with pytest.raises(DataError, match="etude tokenize"):
        read_dataset(tmp_path / "nothing", "validation")


def test_a_file_without_documents_is_streamed_in_blocks(tmp_path):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "train.bin")
    samples = list(read_dataset(tmp_path, "train", dtype="uint16", block_size=4))
    assert [sample.ids.tolist() for sample in samples] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [sample.labels.tolist() for sample in samples] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, -100]]
    assert [sample.mask.tolist() for sample in samples] == [[1] * 4, [1] * 4, [1] * 2]
    ended = list(read_dataset(tmp_path, "train", dtype="uint16", document_end=6))
    assert [sample.ids.tolist() for sample in ended] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    with pytest.raises(DataError, match="block_size"):
        next(read_dataset(tmp_path, "train", dtype="uint16", block_size=0))


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=40),
    repeats=st.sampled_from([1, 30, 100]),
    data=st.data(),
)
def test_documents_are_found_by_position(tmp_path_factory, lengths, repeats, data):
    lengths = np.array(lengths * repeats)
    path = tmp_path_factory.mktemp("search") / "train.bin"
    with TokenWriter(path) as writer:
        writer.add_many(np.zeros(lengths.sum(), np.int64), lengths)
    total = int(lengths.sum())
    positions = data.draw(st.lists(st.integers(0, max(total - 1, 0)), max_size=20 if total else 0))
    expected = np.repeat(np.arange(len(lengths)), lengths)[np.array(positions, np.int64)]
    found = open_tokens(path).document_at(np.array(positions, np.int64))
    assert np.array_equal(found, expected)
