"""Files taken apart: functions, tests, imports, and the labels of every byte. Syntax trees are let go of at once."""

import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from code_tasks.functions import FunctionText, functions_of, parse
from code_tasks.ontology import Labels, label_bytes
from code_tasks.sources import SPLITS, SourceFile
from code_tasks.testing import Imported, imports_of


@dataclass(frozen=True)
class Parsed:
    """A file that is Python."""

    file: SourceFile
    functions: list[FunctionText]
    imports: dict[str, Imported]
    """Of files of tests."""
    simple: Labels | None
    full: Labels | None
    """Of files of code: the labels of their bytes."""


def parse_files(files: Sequence[SourceFile], skipped: Counter[str]) -> list[Parsed]:
    """Parse files; those that are not Python are passed over and counted in `skipped`."""
    found = []
    for file in files:
        one = parse_file(file)
        if one is None:
            skipped["not Python that this version reads"] += 1
        else:
            found.append(one)
    return found


def parse_file(file: SourceFile) -> Parsed | None:
    """Parse one file; None if it is not Python."""
    tree = parse(file.text)
    if tree is None:
        return None
    functions = list(functions_of(tree, file.text, with_calls=file.is_test))
    if file.is_test:
        return Parsed(file, functions, imports_of(tree), None, None)
    try:
        simple, full = label_bytes(file.text, tree)
    except (SyntaxError, tokenize.TokenError):
        return None
    return Parsed(file, functions, {}, simple, full)


def without_leaks(parsed: Sequence[Parsed]) -> tuple[list[Parsed], int]:
    """Drop functions of held-out files that an earlier split has too, docstrings aside; return the rest, and how many.

    Splits are by file, but people copy functions from file to file.
    """
    seen: set[str] = set()
    kept: dict[bytes, Parsed] = {}
    dropped = 0
    for split in SPLITS:
        mine = [one for one in parsed if one.file.split == split]
        for one in mine:
            functions = [function for function in one.functions if function.body not in seen]
            dropped += len(one.functions) - len(functions)
            kept[one.file.digest] = replace(one, functions=functions)
        seen.update(function.body for one in mine for function in one.functions)
    return [kept[one.file.digest] for one in parsed], dropped
