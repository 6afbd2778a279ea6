"""Copying source code: a class or function with everything of its own modules that it uses, and its imports.

Own modules are those of etude and those of the user that are not installed; the names of others are imported.
"""

import ast
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from etude.core import ConfigError
from etude.eject.module import Module, defined

_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


class Sources:
    """Pieces of source code in the order in which they must be defined, and the imports that they need."""

    def __init__(self) -> None:
        self.imports: set[tuple[str, str, str]] = set()
        """Module, name in it ("" for the module itself), and the name it gets."""
        self.pieces: dict[str, str] = {}
        """Source by name."""
        self._homes: dict[str, str] = {}
        """Module of every piece: a name may come from only one."""
        self._modules: dict[str, Module] = {}

    def add(self, value: Any) -> str:
        """Add a class or function, and return its name."""
        value = inspect.unwrap(value)
        if "<locals>" in value.__qualname__:
            raise ConfigError(f"{value.__qualname__} is defined inside a function; move it to the top of its file")
        self._add_name(self._module(value.__module__), value.__name__)
        return str(value.__name__)

    def add_closure(self, function: FunctionType, name: str) -> None:
        """Add a function or lambda made by another function, under a new name; its free variables become locals."""
        module = self._module(function.__module__)
        node = module.function_at(function.__code__)
        values = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        lines = [f"{key} = {self._literal(cell.cell_contents, name)}" for key, cell in values.items()]
        maker = module.scope(function.__qualname__.partition(".<locals>")[0])
        words = _first_line(node) or _first_line(maker) or "Return the factor of the learning rate."
        body = [node.body] if isinstance(node, ast.Lambda) else node.body[_first_line(node) != "" :]
        self._add_needs(module, node, set(values))
        first, last = module.offset(body[0].lineno, 0), module.end(body[-1])
        if isinstance(node, ast.Lambda):
            lines.append(f"return {module.edited(module.start(node.body), last, [])}")
        else:
            lines += inspect.cleandoc("\n" + module.edited(first, last, [])).splitlines()
        parameter = node.args.args[0].arg
        head = [f"def {name}({parameter}: int) -> float:", f'    """{words}"""']
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

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module.of(name)
        return self._modules[name]

    def _add_name(self, module: Module, name: str) -> None:
        """Add what a name of a module means: an import, or its definition and the definitions that it needs."""
        node = module.names[name]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._add_import(module, node, name)
            return
        name = defined(node)[0]  # of several names of one statement
        if self._homes.setdefault(name, module.name) != module.name:
            raise ConfigError(f"'{name}' is defined in {module.name} and in {self._homes[name]}; rename one of them")
        if name not in self.pieces:
            self.pieces[name] = ""  # a name may need itself
            edits = module.edits_of(node)
            self._add_needs(module, node, set())
            del self.pieces[name]  # after what it needs
            self.pieces[name] = module.edited(module.begin(node), module.end(node), edits)

    def _add_import(self, module: Module, node: ast.Import | ast.ImportFrom, name: str) -> None:
        one = next(one for one in node.names if (one.asname or one.name.partition(".")[0]) == name)
        if isinstance(node, ast.Import):
            if _is_own(one.name):
                raise ConfigError(f"`import {one.name}` of your own module; write `from {one.name} import …` instead")
            self.imports.add((one.name, "", one.asname or ""))
            return
        home: Any = sys.modules[module.name]
        value = getattr(home, name)
        source = resolve_name("." * node.level + (node.module or ""), home.__package__)
        is_definition = isinstance(value, (type, FunctionType))
        if isinstance(value, ModuleType) or not _is_own(value.__module__ if is_definition else source):
            self.imports.add((source, one.name, one.asname or ""))
        elif one.asname not in (None, one.name):
            raise ConfigError(f"'{one.name}' is imported from {source} under another name, '{name}'; keep its own")
        elif is_definition:
            self.add(value)
        else:
            self._add_name(self._module(source), one.name)

    def _add_needs(self, module: Module, node: ast.AST, known: set[str]) -> None:
        for used in module.uses(node):
            if used in module.names and used not in known and module.replaced_error(used) is None:
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

    def check_names(self, taken: Iterable[str]) -> None:
        """Raise ConfigError if a name has two meanings, or one of those that are `taken`."""
        imported = [(alias or name or module, (module, name)) for module, name, alias in self.imports]
        names = [*imported, *((name, (self._homes.get(name, ""), name)) for name in self.pieces)]
        meanings = dict[str, Any]((name, ("", name)) for name in taken)
        for name, meaning in names:
            if meanings.setdefault(name, meaning) != meaning:
                raise ConfigError(f"the name '{name}' would have two meanings; rename it in your file")


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
        # Constants, classes, then the rest, as ruff and isort sort the names of an import.
        names = sorted(
            {one[1:] for one in imports if one[0] == module and one[1]},
            key=lambda one: (not (one[0].isupper() and len(one[0]) > 1), not one[0][:1].isupper(), one[0]),
        )
        listed = ", ".join(f"{name} as {alias}" if alias else name for name, alias in names)
        sections[_is_standard(module)].append(f"from {module} import {listed}")
    return "\n\n".join("\n".join(lines) for lines in sections.values() if lines)


def _first_line(node: ast.AST | None) -> str:
    words = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
    return (words or "").partition("\n")[0]


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_own(module: str) -> bool:
    """Whether the source of a module is copied: etude, and files of the user that are not installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    is_installed = file is None or any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
    return module.partition(".")[0] == "etude" or not is_installed
