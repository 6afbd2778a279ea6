"""The source files of a corpus: user inputs and files in folders; skipped files are counted by reason."""

import fnmatch
import glob
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from etude.core.errors import DataError

STDLIB = "stdlib"
"""The input that means the source of this interpreter's standard library."""

_ENDINGS = """
adoc asm bash bat c cc cfg clj cmake cpp cs css cu cuh cxx dart el erl ex exs f90 fish fs go gradle graphql groovy h hh
hpp hs html hxx ini java jl js jsx kt kts lean lisp lua m md mdx mjs ml mli mm nim nix org pas php pl pm proto ps1 py
pyi pyx r rb rs rst s sass scala scm scss sh sol sql svelte sv swift tcl tex text tf toml ts tsx txt v vb vhd vim vue
xml yaml yml zig zsh
"""
TEXT_KINDS = frozenset(f".{ending}" for ending in _ENDINGS.split())
"""Extensions of files that are included by default, besides .jsonl; each also with .gz."""

NAMED_TEXT = frozenset({"Makefile", "Dockerfile", "README", "LICENSE", "CMakeLists.txt"})
LEFT_OUT_FOLDERS = ("__pycache__", "node_modules", "site-packages", "dist-packages")
STDLIB_LEFT_OUT = ("test", "tests", "idle_test", "encodings", "pydoc_data")
"""Folders of the standard library that would make a small corpus worse: repetitive tests and long tables."""


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file."""

    path: str
    kind: str
    """text: the file is one document; json: every line is one."""
    packed: bool
    size: int
    modified_ns: int


@dataclass
class Found:
    """The files of a corpus, and how many others were skipped, by reason."""

    files: list[SourceFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def find_sources(
    inputs: Sequence[str | Path], *, include: Sequence[str] = (), exclude: Sequence[str] = (), out: Path | None = None
) -> Found:
    """Expand files, folders, globs and the word `stdlib` to files; each file once, in path order."""
    found, seen = Found(), set[str]()
    for name in inputs or [STDLIB]:
        for path, wanted in _files(str(name), include, exclude, out):
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            source = _source(path) if wanted else None
            if source is not None:
                found.files.append(source)
            else:
                found.skipped["unreadable" if wanted else "other kinds of file"] += 1
    found.files.sort()
    if not found.files:
        where = ", ".join(map(str, inputs)) or STDLIB
        why = "".join(f"; {count:,} {reason}" for reason, count in found.skipped.items())
        raise DataError(f"no text or code was found in {where}{why}; set the kinds of file with --include")
    return found


def absolute(inputs: Sequence[str]) -> list[str]:
    """Return inputs as absolute paths."""
    return [name if name == STDLIB else str(Path(name).expanduser().absolute()) for name in inputs]


def _source(path: Path) -> SourceFile | None:
    """Return a file as a source; None if it cannot be read twice, such as a pipe or a dangling link."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    name = path.name.lower()
    kind = "json" if name.removesuffix(".gz").endswith((".jsonl", ".ndjson")) else "text"
    return SourceFile(str(path), kind, name.endswith(".gz"), status.st_size, status.st_mtime_ns)


def _files(
    name: str, include: Sequence[str], exclude: Sequence[str], out: Path | None
) -> Iterator[tuple[Path, bool]]:
    """Yield the files of one input, and whether they are included."""
    path = Path(name).expanduser()
    if name == STDLIB and not path.exists():
        yield from _standard_library(include, exclude)
    elif path.is_dir():
        yield from _walk(path, include, exclude, out)
    elif path.exists():
        yield path, True
    elif glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 -- of absolute patterns too
        if not matches:
            raise DataError(f"nothing matches {name!r}; quote a pattern so that the shell does not expand it")
        for match in map(Path, matches):
            if not match.is_dir():
                yield match, True
    else:
        raise DataError(f"input {name!r} does not exist; pass a file, a folder, a pattern or the word {STDLIB}")


def _walk(
    root: Path, include: Sequence[str], exclude: Sequence[str], out: Path | None
) -> Iterator[tuple[Path, bool]]:
    def refuse(error: OSError) -> None:
        raise DataError(f"folder {error.filename} cannot be read ({error.strerror})")

    own = out.resolve() if out is not None else None
    for folder, names, files in os.walk(root, onerror=refuse):
        here, below = Path(folder), Path(folder).relative_to(root)
        names[:] = [
            name
            for name in names
            if not name.startswith(".")
            and not matches((below / name).as_posix(), (*LEFT_OUT_FOLDERS, *exclude))
            and not (here / name / "pyvenv.cfg").exists()
            and (here / name).resolve() != own
        ]
        for name in files:
            path = (below / name).as_posix()
            if not name.startswith(".") and not matches(path, exclude):
                yield here / name, matches(path, include) if include else is_text_name(name)


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path below the folder, one of its parent folders, or one of their names.

    >>> [matches("lib/tests/data.py", [pattern]) for pattern in ("*.py", "tests", "lib/tests", "lib/*", "data", "t")]
    [True, True, True, True, False, False]
    """
    whole = PurePosixPath(path)
    names = {*whole.parts, *(str(parent) for parent in (whole, *whole.parents))} if patterns else set()
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def is_text_name(name: str) -> bool:
    """Whether a file of this name is included by default.

    >>> [is_text_name(name) for name in ("a.py", "b.TXT.gz", "c.jsonl", "d.png", "Makefile")]
    [True, True, True, False, True]
    """
    ending = Path(name.lower().removesuffix(".gz")).suffix
    return ending in TEXT_KINDS or ending in (".jsonl", ".ndjson") or name in NAMED_TEXT


def _standard_library(include: Sequence[str], exclude: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise DataError(f"this Python has no standard library in {root}; pass a folder instead")
    for path, wanted in _walk(root, include or ("*.py",), (*STDLIB_LEFT_OUT, *exclude), None):
        if wanted:  # unreadable folders are ignored
            yield path, True
