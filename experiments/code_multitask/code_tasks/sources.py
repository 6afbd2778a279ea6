"""The files that the data is made of: found, read as Python reads them, separated from tests, and split by content."""

import hashlib
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from sysconfig import get_path

from etude.core.errors import DataError
from etude.corpus.sources import find_sources

SPLITS = ("train", "validation", "test")
STDLIB = "stdlib"
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
STDLIB_LEFT_OUT = ("encodings", "pydoc_data", "turtledemo", "lib2to3/tests/data", "*-linux-gnu", "*-darwin")
"""Of the standard library: long tables, generated text, and the files on which a parser is tested."""
MAX_BYTES = 1 << 20
"""Larger files are generated or data; the standard library has none."""


@dataclass(frozen=True)
class SourceFile:
    """A Python file as text with plain line ends, and where it belongs."""

    module: str
    """Its dotted name below the folder it was found in."""
    text: str
    digest: bytes
    split: str
    is_test: bool


def read_files(
    inputs: Sequence[str], *, out: Path | None = None, validation: float = 0.1, test: float = 0.1
) -> tuple[list[SourceFile], Counter[str]]:
    """Return the Python files of files and folders in the order of their digests, and what was passed over, and why.

    Which split a file is in depends on its content alone; files with the same content are taken once. The word
    `stdlib` is the standard library of the Python that runs this. Raises DataError if there is no Python file.
    """
    found: dict[bytes, SourceFile] = {}
    skipped: Counter[str] = Counter()
    for module, path, is_test in sorted(set(_python_files(inputs, out))):
        text, reason = read_text(path)
        if reason:
            skipped[reason] += 1
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in found:
            skipped["the same as another file"] += 1
            continue
        found[digest] = SourceFile(module, text, digest, split_of(digest, validation, test), is_test)
    if not found:
        why = "".join(f"; {count:,} {reason}" for reason, count in skipped.items())
        raise DataError(f"no Python code was found in {', '.join(inputs)}{why}; name a folder with .py files")
    return [found[digest] for digest in sorted(found)], skipped


def read_text(path: Path) -> tuple[str, str]:
    """Return the text of a Python file, decoded as its first lines say and with plain line ends, or why there is none.

    Only characters are read here, nothing is parsed and nothing is run.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            return "", f"larger than {MAX_BYTES >> 20} MiB"
        raw = path.read_bytes()
    except OSError:
        return "", "unreadable"
    if b"\0" in raw:
        return "", "with null bytes"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding, newline=None).read()
        text.encode()  # refuses lone surrogates
    except (SyntaxError, UnicodeError, LookupError):
        return "", "in an unknown encoding"
    text = text.removeprefix("\ufeff")
    if not text.strip():
        return "", "empty"
    return text if text.endswith("\n") else text + "\n", ""


def split_of(digest: bytes, validation: float, test: float) -> str:
    """Return the split of a digest: the lowest ones are for the test, the highest for validation.

    >>> [split_of(bytes([first] * 8), validation=0.25, test=0.25) for first in (0, 63, 64, 191, 192)]
    ['test', 'test', 'train', 'train', 'validation']
    """
    place = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if place < test else "validation" if place >= 1 - validation else "train"


def is_test_file(path: str) -> bool:
    """Whether a path below its folder names a file of tests.

    >>> [is_test_file(path) for path in ("json/decoder.py", "test/test_json.py", "pkg/test_a.py", "pkg/a_test.py")]
    [False, True, True, True]
    """
    whole = PurePosixPath(path)
    stem = whole.stem
    return (
        bool(TEST_FOLDERS.intersection(whole.parts[:-1]))
        or stem.startswith("test_")
        or stem.endswith("_test")
        or stem == "conftest"
    )


def module_name(path: str) -> str:
    """Return the dotted name of a file.

    >>> module_name("json/decoder.py"), module_name("json/__init__.py")
    ('json.decoder', 'json')
    """
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _python_files(inputs: Sequence[str], out: Path | None) -> Iterator[tuple[str, Path, bool]]:
    for name in inputs:
        root, exclude = Path(name).expanduser(), tuple[str, ...]()
        if name == STDLIB and not root.exists():
            root, exclude = Path(get_path("stdlib")), STDLIB_LEFT_OUT
        try:
            sources = find_sources([root], include=("*.py",), exclude=exclude, out=out).files
        except DataError:
            if root.is_dir():
                continue  # a folder without code; reported if all of them are
            raise DataError(f"input {name!r} does not exist; pass a file, a folder or the word {STDLIB}") from None
        for source in sources:
            path = Path(source.path)
            below = path.relative_to(root).as_posix() if root.is_dir() else path.name
            yield module_name(below), path, is_test_file(below)
