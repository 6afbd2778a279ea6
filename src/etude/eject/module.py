"""The source of a module: its top-level names, and the parts of a definition that are copied.

What belongs to the library is left out: registration, checks of arguments, bounds in annotations, its own errors,
examples, and methods of a model that its forward pass does not use.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from etude.core import ConfigError

ERRORS = {"ConfigError": "ValueError", "DataError": "ValueError", "TrainingError": "RuntimeError"}
"""Errors of the library, and what replaces them."""
_Definition = ast.ClassDef | ast.FunctionDef
Edit = tuple[int, int, str]
"""Begin and end of a piece of a module's source, and what replaces it."""


class Module:
    """The source of a module: its top-level names, and which parts of a definition are kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = inspect.getsource(sys.modules[name])
        self.tree = ast.parse(self.text)
        self.names: dict[str, ast.stmt] = {}
        """The statement that defines each name."""
        for node in self.tree.body:
            for found in defined(node):
                self.names[found] = node
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    @staticmethod
    def of(name: str) -> "Module":
        """Return a module that is already imported; raise ConfigError if its source cannot be read."""
        try:
            return Module(name)
        except (OSError, TypeError, KeyError) as error:
            raise ConfigError(f"the source of {name} cannot be read ({error})") from error

    # --- places in the text

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a line and a column, which ast counts in bytes."""
        begin = self._lines[line - 1]
        text = self.text[begin : self._lines[line]]
        return begin + len(text.encode()[:column].decode())

    def start(self, node: Any) -> int:
        """Return where a node begins, its decorators excluded."""
        return self.offset(node.lineno, node.col_offset)

    def begin(self, node: ast.stmt) -> int:
        """Return where a statement begins, including its decorators that are kept."""
        marks = [mark for mark in getattr(node, "decorator_list", []) if not self._is_of_library(mark)]
        return self.offset(marks[0].lineno, 0) if marks else self.start(node)

    def end(self, node: Any) -> int:
        """Return where a node ends."""
        return self.offset(node.end_lineno, node.end_col_offset)

    def edited(self, begin: int, end: int, edits: list[Edit]) -> str:
        """Return a part of the text with edits; comments for tools are removed."""
        text, place = "", begin
        for first, last, new in sorted(edits):
            text, place = text + self.text[place:first] + new, last
        return re.sub(r"  # (type: ignore|noqa)\b.*", "", text + self.text[place:end]).rstrip()

    def function_at(self, code: Any) -> ast.FunctionDef | ast.Lambda:
        """Return the function or lambda that was compiled to `code`."""
        kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
        found = [n for n in ast.walk(self.tree) if isinstance(n, kind) and n.lineno == code.co_firstlineno]
        if len(found) != 1:
            raise ConfigError(f"{self.name}, line {code.co_firstlineno}: there are several functions in this line")
        return found[0]

    def scope(self, name: str) -> ast.FunctionDef | None:
        """Return a function of the module by name."""
        node = self.names.get(name)
        return node if isinstance(node, ast.FunctionDef) else None

    # --- what is kept

    def replaced_error(self, name: str) -> str | None:
        """Return the builtin error that replaces one of the library; None for other names."""
        made = self.names.get(name)
        is_ours = isinstance(made, ast.ImportFrom) and str(made.module).partition(".")[0] == "etude"
        return ERRORS.get(name) if is_ours else None

    def uses(self, node: ast.AST) -> list[str]:
        """Return the names that the kept parts of a node use, in order."""
        names = [one.id for one in self._kept(node) if isinstance(one, ast.Name) and self._base(one) is None]
        return list(dict.fromkeys(names))

    def edits_of(self, node: ast.stmt) -> list[Edit]:
        """Return the edits that remove what belongs to the library from a definition."""
        edits: list[Edit] = []
        kept = set(map(id, self._kept(node)))
        for one in self._kept(node):
            if isinstance(one, ast.Name) and (error := self.replaced_error(one.id)):
                edits.append((self.start(one), self.end(one), error))
            elif (base := self._base(one)) is not None:
                edits.append((self.start(one), self.end(one), ast.unparse(base)))
            elif isinstance(one, (ast.ClassDef, ast.FunctionDef)):
                edits += self._examples(one)
            if isinstance(one, ast.ClassDef):
                edits += [self._removed(method) for method in one.body if id(method) not in kept]
            if isinstance(one, (ast.ClassDef, ast.FunctionDef)):
                edits += [self._removed(mark, mark=True) for mark in one.decorator_list if id(mark) not in kept]
        begin = self.begin(node)
        return [edit for edit in edits if edit[0] >= begin]

    def _kept(self, node: ast.AST) -> Iterator[ast.AST]:
        """Walk over the parts of a node that are kept, outer ones first."""
        yield node
        if (base := self._base(node)) is not None:
            yield from self._kept(base)
            return
        dropped: list[ast.AST] = []
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            dropped += [mark for mark in node.decorator_list if self._is_of_library(mark)]
        if isinstance(node, ast.ClassDef) and self.name.startswith("etude."):
            dropped += _unreached(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and self._is_annotation(node):
            yield from self._kept(ast.parse(node.value, mode="eval").body)
        for child in ast.iter_child_nodes(node):
            if not any(child is one for one in dropped):
                yield from self._kept(child)

    def _base(self, node: ast.AST) -> ast.expr | None:
        """Return the type in `Annotated[type, bounds]`, or in a name for that; None for other nodes."""
        if isinstance(node, ast.Name):
            made = self.names.get(node.id)
            return self._base(made.value) if isinstance(made, ast.Assign) else None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return self._base(first) or first
        return None

    def _is_of_library(self, mark: ast.expr) -> bool:
        root: Any = mark.func if isinstance(mark, ast.Call) else mark
        while isinstance(root, ast.Attribute):
            root = root.value
        made = self.names.get(root.id) if isinstance(root, ast.Name) else None
        if isinstance(made, ast.ImportFrom):
            return str(made.module).partition(".")[0] == "etude"
        return isinstance(made, ast.Import) and any(one.name.partition(".")[0] == "etude" for one in made.names)

    def _is_annotation(self, node: ast.Constant) -> bool:
        return isinstance(node.value, str) and node.value.split(" ")[0].isidentifier() and node.value in self._quoted

    @property
    def _quoted(self) -> set[str]:
        """Annotations that are written as strings."""
        found = [
            n.annotation for n in ast.walk(self.tree) if isinstance(n, (ast.arg, ast.AnnAssign)) and n.annotation
        ]
        found += [n.returns for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and n.returns]
        return {one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)}

    def _removed(self, node: Any, *, mark: bool = False) -> Edit:
        """Return the edit that removes whole lines: a method with the empty lines before it, or a decorator."""
        first = node.decorator_list[0] if not mark and getattr(node, "decorator_list", []) else node
        begin, end = self.offset(first.lineno, 0), min(self._lines[node.end_lineno], len(self.text))
        while not mark and self.text[begin - 2 : begin] == "\n\n":
            begin -= 1
        return begin, end, ""

    def _examples(self, node: _Definition) -> list[Edit]:
        """Return the edit that removes examples from the end of a docstring."""
        words = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
        if not isinstance(words, ast.Constant) or not isinstance(words.value, str) or ">>>" not in words.value:
            return []
        text = self.text[self.start(words) : self.end(words)].partition(">>>")[0].rstrip()
        closing = '"""' if "\n" not in text else f'\n{" " * words.col_offset}"""'
        return [(self.start(words), self.end(words), text + closing)]


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines, also inside `if` and `try`."""
    if isinstance(node, (ast.If, ast.Try)):
        inside = [*node.body, *node.orelse, *(node.finalbody if isinstance(node, ast.Try) else [])]
        inside += [one for handler in getattr(node, "handlers", []) for one in handler.body]
        return list(dict.fromkeys(name for one in inside for name in defined(one)))
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [one.asname or one.name.partition(".")[0] for one in node.names]
    targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _unreached(node: ast.ClassDef) -> list[ast.AST]:
    """Return the methods of a model that neither its constructor nor `forward` uses."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    if "forward" not in methods:
        return []
    reached, found = set[str](), {"forward", *(name for name in methods if name.startswith("__"))}
    while found - reached:
        name = (found - reached).pop()
        reached.add(name)
        found |= {one.attr for one in ast.walk(methods[name]) if isinstance(one, ast.Attribute)} & methods.keys()
    return [one for name, one in methods.items() if name not in reached]
