"""Writing token files: what is written is read back, bytes are reproducible, nothing half-written is ever seen."""

import errno
import gc
import hashlib
import os
import resource
import signal

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, strategies as st

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens

FORKING = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

samples_strategy = st.lists(st.lists(st.integers(0, 999), max_size=20), max_size=12)


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@given(samples=samples_strategy, cut=st.integers(0, 12), dtype=st.sampled_from(["uint16", "uint32"]))
def test_samples_streams_and_labels_come_back(tmp_path_factory, samples, cut, dtype):
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    streams, labels = {"types": "int8"}, {"score": "float32", "box": ("int16", 3)}
    scores = [0.5 * i for i in range(len(samples))]
    boxes = [[i, -i, 7] for i in range(len(samples))]
    with TokenWriter(path, dtype=dtype, streams=streams, sample_labels=labels, meta={"vocab_size": 1000}) as writer:
        for i, sample in enumerate(samples[:cut]):
            writer.add(sample, streams={"types": [-i] * len(sample)}, labels={"score": scores[i], "box": boxes[i]})
        rest = samples[cut:]
        writer.add_many(
            [token for sample in rest for token in sample],
            [len(sample) for sample in rest],
            streams={"types": [-i for i, sample in enumerate(samples) if i >= cut for _ in sample]},
            labels={"score": scores[cut:], "box": np.array(boxes[cut:]).reshape(-1, 3)},
        )
    tokens = open_tokens(path)
    assert tokens.dtype == dtype
    assert tokens.num_tokens == sum(map(len, samples))
    assert tokens.lengths().tolist() == [len(sample) for sample in samples]
    starts, lengths = tokens.spans(np.arange(len(samples)))
    assert [tokens.read([s], [n]).tolist() for s, n in zip(starts, lengths, strict=True)] == samples
    assert [tokens.read([s], [n], "types").tolist() for s, n in zip(starts, lengths, strict=True)] == [
        [-i] * len(sample) for i, sample in enumerate(samples)
    ]
    assert tokens.label("score", np.arange(len(tokens))).tolist() == scores
    assert tokens.label("box", np.arange(len(tokens))).tolist() == boxes
    assert check_tokens(path).num_samples == len(samples)


def test_same_input_gives_same_bytes_however_it_is_added(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_000, 300_000)
    lengths = np.full(300, 1000)
    for name, pieces in (("a.bin", 1), ("b.bin", 10), ("c.bin", 300)):
        with TokenWriter(tmp_path / name, meta={"vocab_size": 50_257, "a": 1}) as writer:
            for part, sizes in zip(np.split(ids, pieces), np.split(lengths, pieces), strict=True):
                writer.add_many(part.astype(np.int32 if pieces == 10 else np.int64), sizes)
    contents = {(tmp_path / name).read_bytes() for name in ("a.bin", "b.bin", "c.bin")}
    assert len(contents) == 1


def test_the_bytes_of_version_1_never_change(tmp_path):
    with TokenWriter(
        tmp_path / "x.bin", streams={"roles": "uint8"}, sample_labels={"label": "int32"}, meta={"vocab_size": 100}
    ) as writer:
        writer.add([1, 2, 3], streams={"roles": [0, 1, 1]}, labels={"label": 5})
        writer.add([99], streams={"roles": [2]}, labels={"label": -5})
    raw = (tmp_path / "x.bin").read_bytes()
    assert raw[64:72] == b"\1\0\2\0\3\0\x63\0"
    assert hashlib.sha256(raw).hexdigest() == GOLDEN


GOLDEN = "699972a5d6b79bac7a56db1781562f18f189b9b5c4029658d4dfaf3786c88e21"


def test_tensors_and_ranges_are_taken(tmp_path):
    with TokenWriter(tmp_path / "x.bin") as writer:
        writer.add(torch.arange(5))
        writer.add(range(3))
        writer.add([])
    assert open_tokens(tmp_path / "x.bin").lengths().tolist() == [5, 3, 0]


def test_an_error_leaves_nothing_behind_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    with TokenWriter(path) as writer:
        writer.add([1, 2])
    before = path.read_bytes()

    writers = []

    def fail_halfway():
        with TokenWriter(path, streams={"a": "int8"}) as writer:
            writers.append(writer)  # it lives on, so that it is not its end that cleans up
            writer.add([3], streams={"a": [1]})
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert path.read_bytes() == before
    assert files_in(tmp_path) == ["x.bin"]


def test_a_writer_that_is_dropped_leaves_nothing_behind(tmp_path):
    writer = TokenWriter(tmp_path / "x.bin", sample_labels={"label": "int8"})
    writer.add([1], labels={"label": 1})
    assert len(files_in(tmp_path)) == 1
    del writer
    gc.collect()
    assert files_in(tmp_path) == []


def test_nothing_is_there_before_the_end(tmp_path):
    path = tmp_path / "new" / "folder" / "x.bin"
    with TokenWriter(path) as writer:
        writer.add([1, 2, 3])
        assert not path.exists()
    assert path.exists()
    writer.close()  # again: nothing happens
    with pytest.raises(DataError, match="already written"):
        writer.add([1])


@FORKING
def test_a_killed_writer_leaves_no_token_file(tmp_path, in_child):
    def write_and_die():
        writer = TokenWriter(tmp_path / "x.bin", streams={"a": "int8"})
        writer.add(range(50_000), streams={"a": [1] * 50_000})
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(write_and_die) == (-9, None)
    assert [name[:6] for name in files_in(tmp_path)] == [".x.bin"]
    with TokenWriter(tmp_path / "x.bin") as writer:
        writer.add([1])
    assert files_in(tmp_path) == ["x.bin"]  # what the dead one left is gone too


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    with TokenWriter(tmp_path / "x.bin") as first:
        first.add([1])
        with TokenWriter(tmp_path / "x.bin") as second:
            second.add([2])
        first.add([3])
    assert open_tokens(tmp_path / "x.bin").read([0], [2]).tolist() == [1, 3]
    assert files_in(tmp_path) == ["x.bin"]


@pytest.mark.parametrize(
    ("words", "ids", "options"),
    [
        ("must be 0 … 99 for a vocabulary of 100, found 100", [0, 100], {"meta": {"vocab_size": 100}}),
        ("must be 0 … 65535 to fit uint16, found 65536", [65536], {}),
        ("found -1", [3, -1], {}),
        ("found -1", [3, -1], {"dtype": "uint32"}),
        ("integers, found float64", [0.5], {}),
        ("integers, found bool", [True], {}),
        ("found shape", [[1, 2]], {}),
        ("found shape", 7, {}),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_not_written(tmp_path, words, ids, options):
    with TokenWriter(tmp_path / "x.bin", **options) as writer:
        writer.add([1])
        with pytest.raises(DataError, match=words):
            writer.add(ids)
        writer.add([2])
    assert open_tokens(tmp_path / "x.bin").read([0], [2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("add up to 3, but there are 2", {"lengths": [3]}),
        ("lengths must be 0 .* found -1", {"lengths": [3, -1]}),
        (r"declared streams \(a\), found none", {"streams": {}}),
        (r"declared labels \(b\), found b, c", {"labels": {"b": [1], "c": [1]}}),
        (r"'a' must have shape \(2,\)", {"streams": {"a": [1]}}),
        (r"'b' must have shape \(1,\)", {"labels": {"b": [1, 2]}}),
        ("'a' must be -128 … 127 to fit int8, found 200", {"streams": {"a": [1, 200]}}),
        ("'b' must be integers", {"labels": {"b": [0.5]}}),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, words, arguments):
    right = {"lengths": [2], "streams": {"a": [1, 2]}, "labels": {"b": [1]}}
    with TokenWriter(tmp_path / "x.bin", streams={"a": "int8"}, sample_labels={"b": "int8"}) as writer:
        with pytest.raises(DataError, match=words):
            writer.add_many([1, 2], **(right | arguments))
        writer.add_many([1, 2], **right)
    assert len(open_tokens(tmp_path / "x.bin")) == 1


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("dtype 'int32'; allowed are uint16 or uint32", {"dtype": "int32"}),
        ("does not fit uint16; use dtype='uint32'", {"meta": {"vocab_size": 70_000}}),
        ("vocab_size", {"meta": {"vocab_size": 0}}),
        ("plain JSON", {"meta": {"x": float("nan")}}),
        ("plain JSON", {"meta": {"x": object()}}),
        ("name", {"streams": {"a b": "int8"}}),
        ("name", {"streams": {"tokens": "int8"}}),
        ("dtype 'float32'", {"streams": {"a": "float32"}}),
        ("width 0", {"sample_labels": {"a": ("int8", 0)}}),
        ("both a stream and a label", {"streams": {"a": "int8"}, "sample_labels": {"a": "int8"}}),
    ],
)
def test_wrong_declarations_are_refused(tmp_path, words, options):
    with pytest.raises(DataError, match=words):
        TokenWriter(tmp_path / "x.bin", **options)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("when", ["add", "close"])
def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch, when):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = TokenWriter(tmp_path / "x.bin")
    writer.add([1, 2, 3])
    if when == "close":
        monkeypatch.setattr("os.fsync", full)
    else:
        monkeypatch.setattr("zlib.crc32", full)  # stands for the write, whose file object cannot be patched
    with pytest.raises(DataError, match=r"x.bin cannot be written: the disk is full after 3 tokens; free"):
        writer.add([1]) if when == "add" else writer.close()
    assert files_in(tmp_path) == []


@FORKING
def test_a_limit_of_the_file_size_is_met_in_words(tmp_path, in_child):
    def write_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20))
        try:
            with TokenWriter(tmp_path / "x.bin") as writer:
                for _ in range(100):
                    writer.add(range(60_000))
        except DataError as error:
            return str(error)

    assert "cannot be written: the disk is full after" in in_child(write_too_much)[1]
    assert files_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        TokenWriter(tmp_path / "file" / "x.bin")


@FORKING
def test_writing_takes_constant_memory(tmp_path, in_child):
    def write_much():
        part, lengths = np.arange(2**20) % 50_000, np.full(2**18, 4)
        with TokenWriter(tmp_path / "x.bin", streams={"a": "int32"}) as writer:
            for number in range(12):
                writer.add_many(part, lengths, streams={"a": part})
                if number == 2:
                    before = psutil.Process().memory_info().rss
            return psutil.Process().memory_info().rss - before

    code, grown = in_child(write_much)
    assert code == 0
    assert grown < 15 * 2**20  # the file has 96 MB
