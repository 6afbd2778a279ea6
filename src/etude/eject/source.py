"""Copying source code: a class or function with everything of its own modules that it uses, and its imports.

Own modules are those of etude and those of the user that are not installed; the names of others are imported. What
belongs to the library is removed: registration, checks of arguments, bounds in annotations, its own errors.
"""

import ast
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from etude.core import ConfigError

ERRORS = {"ConfigError": "ValueError", "DataError": "ValueError", "TrainingError": "RuntimeError"}
"""Errors of the library, and what replaces them."""
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_Definition = ast.ClassDef | ast.FunctionDef
_Edit = tuple[int, int, str]
"""Begin and end of a piece of a module's source, and what replaces it."""


class Sources:
    """Pieces of source code in the order in which they must be defined, and the imports that they need."""

    def __init__(self) -> None:
        self.imports: set[tuple[str, str, str]] = set()
        """Module, name in it ("" for the module itself), and the name it gets."""
        self.pieces: dict[str, str] = {}
        """Source by name."""
        self._homes: dict[str, str] = {}
        """Module of every piece: a name may come from only one."""

    def add(self, value: Any) -> str:
        """Add a class or function, and return its name."""
        value = inspect.unwrap(value)
        self._add_name(_Module.of(value.__module__), value.__name__)
        return str(value.__name__)

    def add_closure(self, function: FunctionType, name: str) -> None:
        """Add a function or lambda made by another function, under a new name; its free variables become locals."""
        module = _Module.of(function.__module__)
        node = module.function_at(function.__code__)
        values = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        lines = [f"{key} = {self._literal(cell.cell_contents, name)}" for key, cell in values.items()]
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        self._add_needs(module, node, set(values))
        first, last = module.offset(body[0].lineno, 0), module.end(body[-1])
        if isinstance(node, ast.Lambda):
            lines.append(f"return {module.edited(module.start(node.body), last, [])}")
        else:
            lines += inspect.cleandoc("\n" + module.edited(first, last, [])).splitlines()
        parameter = node.args.args[0].arg
        maker = module.scope(function.__qualname__.partition(".<locals>")[0])
        words = (ast.get_docstring(maker) or "").partition("\n")[0] if maker is not None else ""
        head = [f"def {name}({parameter}: int) -> float:", f'    """{words or "Return the factor of the rate."}"""']
        self.pieces[name] = "\n".join([*head, *(f"    {line}" if line else "" for line in lines)])

    def text(self) -> str:
        """Return all pieces, two empty lines around each definition; private names become public."""
        text, spaced = "", True
        for source in self.pieces.values():
            is_definition = source.startswith(("class ", "def ", "@"))
            text += ("\n\n\n" if is_definition or spaced else "\n") + source
            spaced = is_definition
        private = {name: name.lstrip("_") for name in self.pieces if name.startswith("_")}
        for name, public in private.items():
            if public and public not in self.pieces:
                text = re.sub(rf"\b{name}\b", public, text)
        return text.strip("\n")

    # --- names

    def _add_name(self, module: "_Module", name: str) -> None:
        """Add what a name of a module means: an import, or its definition and the definitions that it needs."""
        node = module.names[name]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._add_import(module, node, name)
        elif self._homes.setdefault(name, module.name) != module.name:
            raise ConfigError(f"'{name}' is defined in {module.name} and in {self._homes[name]}; rename one of them")
        elif name not in self.pieces:
            self.pieces[name] = ""  # a name may need itself
            edits = module.edits_of(node)
            self._add_needs(module, node, set())
            del self.pieces[name]  # after what it needs
            self.pieces[name] = module.edited(module.start(node), module.end(node), edits)

    def _add_import(self, module: "_Module", node: ast.Import | ast.ImportFrom, name: str) -> None:
        one = next(one for one in node.names if (one.asname or one.name.partition(".")[0]) == name)
        if isinstance(node, ast.Import):
            self.imports.add((one.name, "", one.asname or ""))
            return
        value = getattr(sys.modules[module.name], name)
        is_definition = isinstance(value, (type, FunctionType))
        home = value.__module__ if is_definition else str(node.module)
        if isinstance(value, ModuleType) or not _is_own(home):
            self.imports.add((str(node.module), one.name, one.asname or ""))
        elif is_definition:
            self.add(value)
        else:
            self._add_name(_Module.of(str(node.module)), one.name)

    def _add_needs(self, module: "_Module", node: ast.AST, known: set[str]) -> None:
        for used in module.uses(node):
            if used in module.names and used not in known and used not in ERRORS:
                self._add_name(module, used)

    def _literal(self, value: Any, name: str) -> str:
        """Return an expression for the value of a free variable; functions are added."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._literal(one, name) for one in value)}]"
        if not isinstance(value, FunctionType):
            if value is None or isinstance(value, (bool, int, float, str)):
                return repr(value)
            raise ConfigError(f"a {type(value).__name__} cannot be written as a constant")
        if "<locals>" not in value.__qualname__:
            return self.add(value)
        first = name.rstrip("_0123456789")
        inner = next(f"{first}_{n}" for n in range(2, 1000) if f"{first}_{n}" not in self.pieces)
        self.pieces[inner] = ""
        self.add_closure(value, inner)
        return inner


def import_lines(imports: set[tuple[str, str, str]]) -> str:
    """Return import statements in the usual order: standard library first, then modules before names.

    >>> print(import_lines({("torch", "nn", ""), ("torch", "", ""), ("torch", "Tensor", ""), ("math", "", "")}))
    import math
    <BLANKLINE>
    import torch
    from torch import Tensor, nn
    """
    sections: dict[bool, list[str]] = {True: [], False: []}
    for name, _, alias in sorted(one for one in imports if not one[1]):
        sections[_is_standard(name)].append(f"import {name} as {alias}" if alias else f"import {name}")
    for module in sorted({one[0] for one in imports if one[1]}):
        names = sorted({one[1:] for one in imports if one[0] == module and one[1]}, key=_member_order)
        listed = ", ".join(f"{name} as {alias}" if alias else name for name, alias in names)
        sections[_is_standard(module)].append(f"from {module} import {listed}")
    return "\n\n".join("\n".join(lines) for lines in sections.values() if lines)


def _member_order(one: tuple[str, str]) -> tuple[int, str]:
    """Constants, classes, then the rest, as ruff and isort sort the names of an import."""
    name = one[0]
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_own(module: str) -> bool:
    """Whether the source of a module is copied: etude, and files of the user that are not installed."""
    if module.partition(".")[0] == "etude":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


class _Module:
    """The source of a module: its top-level names, and which parts of a definition are kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = inspect.getsource(sys.modules[name])
        self.tree = ast.parse(self.text)
        self.names: dict[str, ast.stmt] = {}
        """The statement that defines each name."""
        for node in self.tree.body:
            for found in _defined(node):
                self.names[found] = node
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    @staticmethod
    @cache
    def of(name: str) -> "_Module":
        """Return a module that is already imported; raise ConfigError if its source cannot be read."""
        try:
            return _Module(name)
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

    def end(self, node: Any) -> int:
        """Return where a node ends."""
        return self.offset(node.end_lineno, node.end_col_offset)

    def edited(self, begin: int, end: int, edits: list[_Edit]) -> str:
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

    def uses(self, node: ast.AST) -> list[str]:
        """Return the names that the kept parts of a node use, in order."""
        names = [one.id for one in self._kept(node) if isinstance(one, ast.Name) and self._base(one) is None]
        return list(dict.fromkeys(names))

    def edits_of(self, node: ast.stmt) -> list[_Edit]:
        """Return the edits that remove what belongs to the library from a definition."""
        edits: list[_Edit] = []
        kept = set(map(id, self._kept(node)))
        for one in self._kept(node):
            if isinstance(one, ast.Name) and one.id in ERRORS and one.id in self.names:
                edits.append((self.start(one), self.end(one), ERRORS[one.id]))
            elif (base := self._base(one)) is not None:
                edits.append((self.start(one), self.end(one), ast.unparse(base)))
            elif isinstance(one, (ast.ClassDef, ast.FunctionDef)):
                edits += self._examples(one)
            if isinstance(one, ast.ClassDef):
                edits += [self._removed(method) for method in one.body if id(method) not in kept]
            if isinstance(one, ast.FunctionDef):
                edits += [self._removed(mark, mark=True) for mark in one.decorator_list if id(mark) not in kept]
        begin = self.start(node)
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

    def _removed(self, node: Any, *, mark: bool = False) -> _Edit:
        """Return the edit that removes whole lines: a method with the empty lines before it, or a decorator."""
        first = node.decorator_list[0] if not mark and getattr(node, "decorator_list", []) else node
        begin, end = self.offset(first.lineno, 0), min(self._lines[node.end_lineno], len(self.text))
        while not mark and self.text[begin - 2 : begin] == "\n\n":
            begin -= 1
        return begin, end, ""

    def _examples(self, node: _Definition) -> list[_Edit]:
        """Return the edit that removes examples from the end of a docstring."""
        words = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
        if not isinstance(words, ast.Constant) or not isinstance(words.value, str) or ">>>" not in words.value:
            return []
        text = self.text[self.start(words) : self.end(words)].partition(">>>")[0].rstrip()
        closing = '"""' if "\n" not in text else f'\n{" " * words.col_offset}"""'
        return [(self.start(words), self.end(words), text + closing)]


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines."""
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
