"""Tests and what they test: for a test the function it calls, found by names and imports; and doctests."""

import ast
import doctest
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from code_tasks.functions import FunctionText, statements_in

MIN_NAME = 3
"""Shorter names are in the names of too many tests by chance."""


@dataclass(frozen=True)
class Known:
    """A function that may be under test."""

    module: str
    split: str
    function: FunctionText


@dataclass(frozen=True)
class Imported:
    """What a name of a test file stands for: a module, or something of a module."""

    module: str
    name: str = ""


class CodeUnderTest:
    """Finds the function that a test is about.

    A test is about a function of the inputs that it calls and whose module its file imports, if the name of the
    function is in that of the test or the name of its module in that of the test's file: other calls are helpers. A
    method of an object whose class is not known needs both. Of several the one named in the test comes first, then the
    one whose module has more in common with the test's, then the one that is called first.
    """

    def __init__(self, known: Sequence[Known]) -> None:
        self._by_name: dict[str, list[Known]] = defaultdict(list)
        for one in known:
            self._by_name[one.function.name].append(one)
            if one.function.name == "__init__":
                self._by_name[one.function.owner].append(one)

    def find(self, test: FunctionText, module: str, imports: dict[str, Imported], split: str) -> Known | None:
        """Return the function under test, None if there is none that this split may show."""
        subjects = subjects_of(module)
        best: tuple[tuple[int, ...], Known] | None = None
        title = f"{test.owner}_{test.name}".lower()
        for order, (name, receiver) in enumerate(test.calls):
            named = len(name) >= MIN_NAME and name.strip("_").lower() in title
            for exact, known in self._candidates(name, receiver, imports):
                about = len(subjects.intersection(known.module.split(".")))
                if known.split not in (split, "train") or named + exact + (about > 0) < 2:
                    continue
                owned = known.function.owner.lower() in title
                rank = (-named, -about, -exact, -owned, order, len(known.module))
                if best is None or rank < best[0]:
                    best = rank, known
        return best[1] if best is not None else None

    def _candidates(self, name: str, receiver: str, imports: dict[str, Imported]) -> Iterator[tuple[bool, Known]]:
        if receiver == "self":
            return  # the test's own helpers
        head, _, rest = receiver.partition(".")
        if not receiver:
            origin = imports.get(name)
            if origin is not None and origin.name:
                yield from ((True, one) for one in self._in(origin.module, origin.name, ""))
        elif head in imports:
            origin = imports[head]
            path = ".".join(part for part in (origin.module, origin.name, rest) if part)
            yield from ((True, one) for one in self._in(path, name, ""))
            module, _, owner = path.rpartition(".")  # a method that is called by its class
            yield from ((True, one) for one in self._in(module, name, owner) if owner)
        else:
            modules = {origin.module for origin in imports.values()}
            for one in self._by_name.get(name, ()):
                if one.function.owner and any(is_within(one.module, module) for module in modules):
                    yield False, one

    def _in(self, module: str, name: str, owner: str) -> Iterator[Known]:
        for one in self._by_name.get(name, ()):
            right = one.function.owner == owner if one.function.name == name else True  # else a class by its __init__
            if right and is_within(one.module, module):
                yield one


def subjects_of(module: str) -> frozenset[str]:
    """Return the names that a file of tests says it is about.

    >>> sorted(subjects_of("test.test_asyncio.test_locks")), sorted(subjects_of("pkg.tests.parser_test"))
    (['asyncio', 'locks'], ['parser', 'pkg'])
    """
    names = (part.removeprefix("test_").removesuffix("_test") for part in module.split("."))
    return frozenset(names) - {"test", "tests", "idle_test", "src", "lib"}


def is_within(module: str, imported: str) -> bool:
    """Whether a module is what was imported or lies below it; folders above may come before its name.

    >>> is_within("json.decoder", "json"), is_within("src.pkg.a", "pkg.a"), is_within("jsonish", "json")
    (True, True, False)
    """
    return bool(imported) and f".{imported}." in f".{module}."


def imports_of(tree: ast.Module) -> dict[str, Imported]:
    """Return what the imported names of a file stand for; imports relative to its package are left out."""
    found: dict[str, Imported] = {}
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            for one in node.names:
                whole = one.name if one.asname else one.name.split(".")[0]
                found.setdefault(one.asname or whole, Imported(whole))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                found.setdefault(one.asname or one.name, Imported(node.module, one.name))
        else:
            stack += reversed(statements_in(node))
    return found


def doctest_text(docstring: str) -> str:
    """Return the examples of a docstring as they are written, without what is between them; "" if there are none.

    They are read, not run.

    >>> doctest_text('''Text.
    ...
    ... \\x3e>> 1 + 1
    ... 2
    ...
    ... More text.
    ... ''')
    '>>> 1 + 1\\n2\\n'
    """
    if ">>>" not in docstring:
        return ""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return ""
    parts = []
    for example in examples:
        first, *more = example.source.rstrip("\n").split("\n")
        parts += [f">>> {first}\n", *(f"... {line}".rstrip() + "\n" for line in more), example.want]
    return "".join(parts)
