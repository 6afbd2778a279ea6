"""Remote token files: the same data as local ones, fetched by blocks, kept, and never mixed with another version."""

import asyncio
import errno
import http.server
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from etude.core.errors import DataError
from etude.data import TokenWriter, check_tokens, open_tokens, read_dataset
from etude.data.tokens import places

IDS = np.random.default_rng(0).integers(0, 50_000, 40_000)
BLOCK = 4096
FORKING = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Recorded(MemoryFileSystem):
    """A memory file system that remembers what was asked of it, and fails on request."""

    protocol = "recorded"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    requests: ClassVar = []
    failures: ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("recorded://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        found = super().cat_file(path, start, end)
        if end == places._HEAD_BYTES:  # the version is asked for
            return found
        type(self).requests.append((start, end))
        problem = self.failures.pop(0) if self.failures else None
        if isinstance(problem, Exception):
            raise problem
        return found[:problem]


@pytest.fixture(autouse=True)
def recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(places, "RETRY_DELAY_S", 0.0)
    fsspec.register_implementation("recorded", Recorded, clobber=True)
    Recorded.store.clear()
    Recorded.requests.clear()
    Recorded.failures.clear()


def token_bytes(folder, ids=IDS):
    with TokenWriter(folder / "local.bin", meta={"vocab_size": 50_000}) as writer:
        writer.add_many(ids, np.full(len(ids) // 100, 100))
    return (folder / "local.bin").read_bytes()


def put(raw, name="data/train.bin"):
    Recorded().pipe_file(f"/{name}", raw)
    Recorded.requests.clear()
    return f"recorded://{name}"


@pytest.fixture
def url(tmp_path):
    return put(token_bytes(tmp_path))


def test_remote_files_read_like_local_ones(url):
    tokens = open_tokens(url)
    starts = np.random.default_rng(1).integers(0, 39_000, 20)
    assert np.array_equal(tokens.rows(starts, 700), IDS[starts[:, None] + np.arange(700)])
    assert np.array_equal(tokens.read([5, 30_000], [10, 9_000]), np.r_[IDS[5:15], IDS[30_000:39_000]])
    assert tokens.document_at([0, 150, 39_999]).tolist() == [0, 1, 399]
    assert np.array_equal(np.concatenate([sample.ids for sample in tokens]), IDS)
    assert check_tokens(url).checksums
    assert np.array_equal(next(read_dataset("recorded://data", "train")).ids, IDS[:100])
    with pytest.raises(DataError, match="are not within"):
        tokens.rows([40_000], 1)


def test_only_what_is_needed_is_fetched_and_only_once(url):
    tokens = open_tokens(url)
    Recorded.requests.clear()
    tokens.rows([20_000], 10)
    (request,) = Recorded.requests
    assert request[1] - request[0] == BLOCK
    tokens.rows([20_001, 20_000], 10)
    pickle.loads(pickle.dumps(tokens)).rows([20_000], 10)
    open_tokens(url).rows([20_000], 10)
    assert len(Recorded.requests) == 1


def test_neighbouring_blocks_come_in_one_request(url):
    tokens = open_tokens(url)
    Recorded.requests.clear()
    tokens.rows([10_000, 25_000], 4 * BLOCK // 2)
    assert [(end - start) // BLOCK for start, end in Recorded.requests] == [5, 5]


class Together(AsyncFileSystem):
    """Answers a request only when another one is there too: requests have to be sent together."""

    protocol = "together"
    raw = b""
    waiting = 0
    both = None

    async def _info(self, path, **kwargs):
        if path.endswith(".idx"):
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.raw), "type": "file", "ETag": "one"}

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        if type(self).both is not None:
            type(self).waiting += 1
            if self.waiting >= 2:
                self.both.set()
            await asyncio.wait_for(self.both.wait(), 20)
        return self.raw[start:end]


def test_different_requests_are_sent_together(tmp_path, monkeypatch):
    fsspec.register_implementation("together", Together, clobber=True)
    monkeypatch.setattr(Together, "raw", token_bytes(tmp_path))
    tokens = open_tokens("together://data/train.bin")
    monkeypatch.setattr(Together, "both", asyncio.Event())
    assert np.array_equal(tokens.rows([10_000, 30_000], 10), np.stack([IDS[10_000:10_010], IDS[30_000:30_010]]))
    assert Together.waiting == 2


def test_a_changed_file_is_not_mixed_with_the_old_one(url, tmp_path):
    old = open_tokens(url)
    assert old.rows([0], 5)[0].tolist() == IDS[:5].tolist()
    put(token_bytes(tmp_path, IDS[::-1]))
    assert open_tokens(url).rows([20_000], 5)[0].tolist() == IDS[::-1][20_000:20_005].tolist()
    assert old.rows([0], 5)[0].tolist() == IDS[:5].tolist()  # fetched before
    with pytest.raises(DataError, match="has changed while it was being read"):
        old.rows([20_000], 5)


def test_versions_are_distinguished_by_their_first_bytes_where_nothing_else_does(url, tmp_path, monkeypatch):
    def info(self, path, **kwargs):
        return {"name": path, "size": len(MemoryFileSystem.cat_file(self, path)), "type": "file"}

    monkeypatch.setattr(Recorded, "info", info)
    assert open_tokens(url).rows([20_000], 5)[0].tolist() == IDS[20_000:20_005].tolist()
    put(token_bytes(tmp_path, IDS[::-1]))
    assert open_tokens(url).rows([20_000], 5)[0].tolist() == IDS[::-1][20_000:20_005].tolist()


def test_failed_requests_are_tried_again(url, caplog):
    tokens = open_tokens(url)
    Recorded.failures += [OSError("connection lost"), TimeoutError(), 100]  # or only some bytes come
    assert tokens.rows([20_000], 5)[0].tolist() == IDS[20_000:20_005].tolist()
    assert "connection lost; trying again" in caplog.text
    Recorded.failures += [OSError("connection\nlost")] * 10
    with pytest.raises(
        DataError, match=r"recorded://.*connection lost, 4 times\); check the address and the connection"
    ):
        tokens.rows([30_000], 5)
    Recorded.failures.clear()
    assert tokens.rows([30_000], 5)[0].tolist() == IDS[30_000:30_005].tolist()


def test_a_server_that_does_not_answer_is_asked_again(url, monkeypatch):
    info, problems = Recorded.info, [TimeoutError("slow"), OSError("lost")]

    def answer(self, path, **kwargs):
        if problems:
            raise problems.pop()
        return info(self, path, **kwargs)

    monkeypatch.setattr(Recorded, "info", answer)
    assert open_tokens(url).num_tokens == 40_000
    problems += [OSError("lost")] * 20
    with pytest.raises(DataError, match=r"recorded://data/train\.\w+ cannot be read \(OSError: lost, 4 times\)"):
        open_tokens(url)


def test_missing_and_unknown_places(tmp_path):
    with pytest.raises(DataError, match=r"recorded://data/none.bin: no such file"):
        open_tokens("recorded://data/none.bin")
    with pytest.raises(DataError, match="cannot be opened"):
        open_tokens("nonsense://data/none.bin")
    with pytest.raises(DataError, match="no split"):
        read_dataset("recorded://data", "train")
    Recorded().pipe_file("/data/some/file.bin", b"1")
    with pytest.raises(DataError, match="not a file"):
        open_tokens("recorded://data/some")
    put(b"", "empty.bin")
    with pytest.raises(DataError, match="empty"):
        open_tokens("recorded://empty.bin")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"pip install 'etude\[remote\]'"):
        open_tokens("s3://bucket/train.bin")


def test_a_file_address_is_a_path(tmp_path):
    token_bytes(tmp_path)
    tokens = open_tokens(f"file://{tmp_path}/local.bin")
    assert pickle.loads(pickle.dumps(tokens)).num_tokens == 40_000


def test_a_cache_that_cannot_be_written_is_named(url, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set ETUDE_CACHE_DIR"):
        open_tokens(url)


def test_a_deleted_copy_is_fetched_again(url, tmp_path):
    open_tokens(url).rows([0], 40_000)
    for path in (tmp_path / "cache").rglob("data"):
        path.unlink()
    assert np.array_equal(open_tokens(url).rows([0], 40_000)[0], IDS)


def test_megatron_pairs_are_found_remotely(tmp_path):
    tokens = np.arange(10, dtype=np.int32)
    head = b"MMIDIDX\0\0" + np.array([1], np.uint64).tobytes() + b"\4" + np.array([2, 3], np.uint64).tobytes()
    index = head + np.array([4, 6], np.int32).tobytes() + np.array([0, 16, 0, 1, 2]).tobytes()
    put(tokens.tobytes(), "m/x.bin")
    put(index, "m/x.idx")
    for name in ("x.bin", "x.idx", "x"):
        assert open_tokens(f"recorded://m/{name}").lengths().tolist() == [4, 6]


def reads_right(url, seed):
    tokens = open_tokens(url)
    starts = np.random.default_rng(seed).integers(0, 39_900, 300)
    return all(np.array_equal(tokens.rows([start], 100)[0], IDS[start : start + 100]) for start in starts)


@FORKING
def test_several_processes_fill_one_copy(url):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=lambda seed=seed: queue.put(reads_right(url, seed))) for seed in range(3)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [True] * 3
    for worker in workers:
        worker.join()
    assert np.array_equal(open_tokens(url).rows([0], 40_000)[0], IDS)


@FORKING
@pytest.mark.parametrize("at", range(1, 5))
def test_a_process_killed_while_it_fetches_leaves_nothing_wrong(url, in_child, at):
    def fetch_and_die():
        syncs, sync = [], os.fsync

        def die(descriptor):
            syncs.append(descriptor)
            if len(syncs) == at:  # of data, of the marks, of data …
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)

        os.fsync = die
        open_tokens(url).rows([20_000], 100)

    assert in_child(fetch_and_die) == (-9, None)
    assert np.array_equal(open_tokens(url).rows([0], 40_000)[0], IDS)


def test_a_full_disk_is_one_line(url, monkeypatch):
    def full(path, pieces):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places, "write_at", full)
    with pytest.raises(DataError, match=r"No space left on device\); set ETUDE_CACHE_DIR"):
        open_tokens(url)


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves one file with ranges and an entity tag."""

    def do_HEAD(self):
        self.answer(b"", 200, len(self.server.raw))

    def do_GET(self):
        raw, wanted = self.server.raw, self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            start, end = wanted.removeprefix("bytes=").split("-")
            raw = raw[int(start) : int(end) + 1]
        self.answer(raw, 206 if wanted else 200, len(raw))

    def answer(self, raw, code, length):
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments):
        pass


def test_over_http(tmp_path):
    pytest.importorskip("aiohttp")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    server.raw = token_bytes(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tokens = open_tokens(f"http://127.0.0.1:{server.server_port}/train.bin")
        assert np.array_equal(tokens.rows([0], 40_000)[0], IDS)
    finally:
        server.shutdown()
        server.server_close()
