"""The functions of a file: their text, the text without docstring, and the docstring."""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
_INDENT = re.compile(r"[ \t\f]*")
_METHOD_INDENT = "    "
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclass(frozen=True)
class FunctionText:
    """A function or method that does not lie in another function."""

    name: str
    owner: str
    """The class it is a method of, "" if it is none."""
    first_line: int
    last_line: int
    """Lines of the file, from 1, decorators included."""
    text: str
    """Lines as they stand in the file, moved to the left; a method has the line `class Name:` above it."""
    body: str
    """The same without the docstring."""
    docstring: str
    calls: tuple[tuple[str, str], ...] = ()
    """If asked for, what it calls: names, and the names of the modules or objects they are attributes of."""

    @property
    def qualified_name(self) -> str:
        """The name with that of the class."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def lines_above(self) -> int:
        """How many lines of `text` are not lines of the file."""
        return int(bool(self.owner))


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a file, None if it is not Python; nothing is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of the code that is read
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def functions_of(tree: ast.Module, text: str, *, with_calls: bool = False) -> Iterator[FunctionText]:
    """Yield the functions and methods of a file, in order; those inside a function are part of it."""
    lines = text.split("\n")
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, owner = stack.pop()
        if isinstance(node, Function):
            yield _function_text(node, owner, lines, with_calls)
        else:
            inner = node.name if isinstance(node, ast.ClassDef) else owner
            stack += [(child, inner) for child in reversed(statements_in(node))]


def statements_in(node: ast.AST) -> list[ast.AST]:
    """Return the statements right below a module or statement, handlers and cases too; much quicker than `ast.walk`."""
    return [child for name in _BLOCKS for child in getattr(node, name, ())]


def docstring_node(node: ast.AST) -> ast.Constant | None:
    """Return the docstring of a module, class or function."""
    body = node.body if isinstance(node, ast.Module | ast.ClassDef | Function) else []
    if body and isinstance(body[0], ast.Expr) and isinstance(value := body[0].value, ast.Constant):
        return value if isinstance(value.value, str) else None
    return None


def _function_text(function: Function, owner: str, lines: list[str], with_calls: bool) -> FunctionText:
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    last = function.end_lineno or function.lineno
    own = lines[first - 1 : last]
    docstring = docstring_node(function)
    without = _without(docstring, function, own, first) if docstring is not None else own
    return FunctionText(
        function.name,
        owner,
        first,
        last,
        _moved(own, owner),
        _moved(without, owner),
        str(docstring.value) if docstring is not None else "",
        called(function) if with_calls else (),
    )


def _moved(lines: list[str], owner: str) -> str:
    """Lines moved to the left margin, or below a line that names the class."""
    indent = _INDENT.match(lines[0])[0]  # matches nothing at least
    margin = _METHOD_INDENT if owner else ""
    moved = [
        margin + line.removeprefix(indent) if line.startswith(indent) and line.strip() else line for line in lines
    ]
    return "\n".join([f"class {owner}:", *moved] if owner else moved) + "\n"


def _without(docstring: ast.Constant, function: Function, lines: list[str], first: int) -> list[str]:
    """The lines of a function without its docstring; what is left of its lines goes too if it is blank."""
    start, stop = docstring.lineno - first, (docstring.end_lineno or docstring.lineno) - first
    before = lines[start].encode()[: docstring.col_offset].decode()
    behind = lines[stop].encode()[docstring.end_col_offset :].decode()
    if len(function.body) == 1:
        return [*lines[:start], before + "..." + behind, *lines[stop + 1 :]]
    behind = re.sub(r"^\s*;\s*", "", behind)
    rest = before + behind if behind.strip() or before.strip() else None
    return [*lines[:start], *([rest] if rest is not None else []), *lines[stop + 1 :]]


def called(function: Function) -> tuple[tuple[str, str], ...]:
    """Return the names that are called in a function, each once, with what they are attributes of ("?": anything)."""
    found: dict[tuple[str, str], None] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            found[node.func.id, ""] = None
        elif isinstance(node.func, ast.Attribute):
            found[node.func.attr, _dotted(node.func.value)] = None
    return tuple(found)


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else "?"
