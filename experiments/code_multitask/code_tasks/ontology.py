"""What each byte of a file is: its syntactic role by `tokenize` (simple), what it stands for by `ast` (full)."""

import ast
import io
import keyword
import re
import token
import tokenize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from code_tasks.functions import docstring_node
from code_tasks.places import IDENTIFIER, Place

IGNORED = -100
SIMPLE = ("keyword", "name", "number", "string", "docstring", "comment", "operator", "delimiter")
FULL = (
    "function_name",
    "class_name",
    "base_class",
    "parameter",
    "annotation",
    "decorator",
    "import",
    "definition",
    "use",
    "attribute",
    "attribute_definition",
    "call",
    "argument",
    "keyword_argument",
    "loop_variable",
    "exception",
    "constant",
    "string",
    "docstring",
    "f_string",
)
Labels = NDArray[np.int8]

_SIMPLE = {name: number for number, name in enumerate(SIMPLE)}
_FULL = {name: number for number, name in enumerate(FULL)}
_WORDS = [_SIMPLE[name] for name in ("name", "number", "string", "docstring")]
_DELIMITERS = frozenset(["(", ")", "[", "]", "{", "}", ",", ":", ".", ";", "@", "..."])
_AS = re.compile(rb"\s+as\s+([A-Za-z0-9_\x80-\xff]+)")
_REST = re.compile(rb"\*\*\s*([A-Za-z0-9_\x80-\xff]+)")
_BEFORE = re.compile(rb"([A-Za-z0-9_\x80-\xff]+)\s*=[\s(]*\Z")
_CASE = re.compile(rb"\bcase\b")
_JOINED = tuple(vars(ast)[name] for name in ("JoinedStr", "TemplateStr") if name in vars(ast))
_ROLES = {token.NUMBER: _SIMPLE["number"], token.COMMENT: _SIMPLE["comment"], token.STRING: _SIMPLE["string"]}
_ROLES |= {vars(token)[name]: _SIMPLE["string"] for name in vars(token) if name.startswith(("FSTRING", "TSTRING"))}
_PASSED_DOWN = frozenset({"annotation", "base_class", "decorator", "exception", "loop_variable"})
"""Roles that hold for every name of an expression; `call` and `argument` hold for the outermost name alone."""
_CARRIERS = (ast.Tuple, ast.List, ast.Starred, ast.BinOp, ast.Subscript)


def label_bytes(text: str, tree: ast.Module) -> tuple[Labels, Labels]:
    """Return the simple and the full label of every byte of a file in UTF-8, -100 where there is none.

    White space between tokens has neither. Full labels are those of words: names, numbers, strings and the constants
    None, True and False. Raises SyntaxError or tokenize.TokenError if the file cannot be cut into tokens.
    """
    place = Place(text)
    painter = _Painter(place, tree)
    simple, full = _simple(place, painter), painter.full
    words = np.isin(simple, _WORDS) | ((simple == _SIMPLE["keyword"]) & (full == _FULL["constant"]))
    full[~words] = IGNORED
    return simple, full


def _simple(place: Place, painter: "_Painter") -> Labels:
    simple = np.full(len(place.data), IGNORED, np.int8)
    for kind, string, begin, end, _ in tokenize.generate_tokens(io.StringIO(place.text).readline):
        role = _role(kind, string)
        if role is not None:
            simple[place.of_characters(*begin) : place.of_characters(*end)] = role
    for start, stop in painter.f_strings:  # newer Pythons cut them into tokens
        inside = simple[start:stop]
        inside[(inside != IGNORED) & (inside != _SIMPLE["comment"])] = _SIMPLE["string"]
    for start, stop in painter.docstrings:
        inside = simple[start:stop]
        inside[inside == _SIMPLE["string"]] = _SIMPLE["docstring"]
    for start, stop in painter.soft_keywords:
        simple[start:stop] = _SIMPLE["keyword"]
    return simple


def _role(kind: int, string: str) -> int | None:
    if kind == token.NAME:
        return _SIMPLE["keyword" if keyword.iskeyword(string) else "name"]
    if kind == token.OP:
        return _SIMPLE["delimiter" if string in _DELIMITERS else "operator"]
    return _ROLES.get(kind)


class _Painter:
    """Walks a syntax tree from the outside in; what is inside paints over what is around it."""

    def __init__(self, place: Place, tree: ast.Module) -> None:
        self.place = place
        self.full: Labels = np.full(len(place.data), IGNORED, np.int8)
        self.docstrings: list[tuple[int, int]] = []
        self.f_strings: list[tuple[int, int]] = []
        self.soft_keywords: list[tuple[int, int]] = []
        """Where they are: what tokens alone do not tell."""
        self._stack: list[tuple[ast.AST, str | None]] = [(tree, None)]
        while self._stack:
            node, role = self._stack.pop()
            paint = getattr(self, f"_{type(node).__name__}", None)
            if isinstance(node, _JOINED):  # what is inside has exact places in newer Pythons only
                self.f_strings.append(place.span(node))
                self._set(*place.span(node), role if role == "annotation" else "f_string")
            elif paint is not None:
                paint(node, role)
            else:
                self._below(node, role if isinstance(node, _CARRIERS) and role in _PASSED_DOWN else None)

    def _set(self, start: int, stop: int, role: str) -> None:
        self.full[start:stop] = _FULL[role]

    def _push(self, node: ast.AST | None, role: str | None = None) -> None:
        if node is not None:
            self._stack.append((node, role))

    def _below(self, node: ast.AST, role: str | None = None) -> None:
        self._stack += [(child, role) for child in ast.iter_child_nodes(node)]

    def _named(self, node: Any, word: bytes, role: str) -> None:
        """Paint the name behind a word such as `def`."""
        start, stop = self.place.span(node)
        start = self.place.data.find(word, start, stop) + len(word)
        name = IDENTIFIER.search(self.place.data, start, stop)
        if name is not None:
            self._set(*name.span(), role)

    def _body(self, node: Any) -> None:
        docstring = docstring_node(node)
        for number, statement in enumerate(node.body):
            if number == 0 and docstring is not None:
                self.docstrings.append(self.place.span(docstring))
                self._push(docstring, "docstring")
            else:
                self._push(statement)

    def _Module(self, node: ast.Module, _: str | None) -> None:
        self._body(node)

    def _FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, _: str | None) -> None:
        self._body(node)
        self._named(node, b"def", "function_name")
        for decorator in node.decorator_list:
            self._push(decorator, "decorator")
        self._push(node.returns, "annotation")
        self._push(node.args)
        for parameter in getattr(node, "type_params", ()):
            self._push(parameter)

    _AsyncFunctionDef = _FunctionDef

    def _ClassDef(self, node: ast.ClassDef, _: str | None) -> None:
        self._body(node)
        self._named(node, b"class", "class_name")
        for decorator in node.decorator_list:
            self._push(decorator, "decorator")
        for base in node.bases:
            self._push(base, "base_class")
        for one in [*node.keywords, *getattr(node, "type_params", ())]:
            self._push(one)

    def _arg(self, node: ast.arg, _: str | None) -> None:
        self._set(*self.place.identifier(self.place.span(node)[0]), "parameter")
        self._push(node.annotation, "annotation")

    def _AnnAssign(self, node: ast.AnnAssign, _: str | None) -> None:
        self._push(node.target)
        self._push(node.annotation, "annotation")
        self._push(node.value)

    def _Import(self, node: ast.Import | ast.ImportFrom, _: str | None) -> None:
        self._set(*self.place.span(node), "import")

    _ImportFrom = _Import

    def _Global(self, node: ast.Global | ast.Nonlocal, _: str | None) -> None:
        self._set(*self.place.span(node), "use")

    _Nonlocal = _Global

    def _Name(self, node: ast.Name, role: str | None) -> None:
        if isinstance(node.ctx, ast.Store):
            role = "loop_variable" if role == "loop_variable" else "definition"
        self._set(*self.place.span(node), role or "use")

    def _Attribute(self, node: ast.Attribute, role: str | None) -> None:
        passed = role if role in _PASSED_DOWN and role != "loop_variable" else None
        self._push(node.value, passed)
        _, stop = self.place.span(node)
        name = node.attr.encode()
        if self.place.data[stop - len(name) : stop] == name:  # not so for names that Python normalizes
            stored = isinstance(node.ctx, ast.Store)
            kind = "attribute_definition" if stored else passed or ("call" if role == "call" else "attribute")
            self._set(stop - len(name), stop, kind)

    def _Call(self, node: ast.Call, role: str | None) -> None:
        self._push(node.func, role if role in ("decorator", "exception", "annotation", "base_class") else "call")
        for argument in node.args:
            self._push(argument.value if isinstance(argument, ast.Starred) else argument, "argument")
        for one in node.keywords:
            self._push(one)

    def _keyword(self, node: ast.keyword, _: str | None) -> None:
        if node.arg is not None:
            self._set(*self.place.identifier(self.place.span(node)[0]), "keyword_argument")
        self._push(node.value, "argument")

    def _For(self, node: Any, _: str | None) -> None:
        self._push(node.target, "loop_variable")
        for one in (node.iter, *node.body, *node.orelse):
            self._push(one)

    _AsyncFor = _For

    def _comprehension(self, node: ast.comprehension, _: str | None) -> None:
        self._push(node.target, "loop_variable")
        self._push(node.iter)
        for condition in node.ifs:
            self._push(condition)

    def _ExceptHandler(self, node: ast.ExceptHandler, _: str | None) -> None:
        self._push(node.type, "exception")
        if node.type is not None and node.name is not None:
            name = _AS.search(self.place.data, self.place.span(node.type)[1], self.place.span(node)[1])
            if name is not None:
                self._set(*name.span(1), "exception")
        for statement in node.body:
            self._push(statement)

    def _Raise(self, node: ast.Raise, _: str | None) -> None:
        self._push(node.exc, "exception")
        self._push(node.cause)

    def _Constant(self, node: ast.Constant, role: str | None) -> None:
        kind = "string" if isinstance(node.value, str | bytes) else "constant"
        self._set(*self.place.span(node), role if role in ("annotation", "docstring") else kind)

    def _Match(self, node: ast.Match, _: str | None) -> None:
        start = self.place.span(node)[0]
        self.soft_keywords.append((start, start + len("match")))
        start = self.place.span(node.subject)[1]
        for case in node.cases:
            words = list(_CASE.finditer(self.place.data, start, self.place.span(case.pattern)[0]))
            self.soft_keywords += [word.span() for word in words[-1:]]
            start = self.place.span(case.body[-1])[1]
        self._below(node)

    def _MatchAs(self, node: Any, _: str | None) -> None:
        self._below(node)
        start, stop = self.place.span(node)
        name = (node.name or "_").encode()
        if self.place.data[stop - len(name) : stop] == name:
            self._set(max(start, stop - len(name)), stop, "definition")

    _MatchStar = _MatchAs

    def _MatchMapping(self, node: ast.MatchMapping, _: str | None) -> None:
        self._below(node)
        names = list(_REST.finditer(self.place.data, *self.place.span(node))) if node.rest else []
        if names:
            self._set(*names[-1].span(1), "definition")

    def _MatchClass(self, node: ast.MatchClass, _: str | None) -> None:
        self._below(node)
        start = self.place.span(node)[0]
        for pattern in node.kwd_patterns:
            name = _BEFORE.search(self.place.data, start, self.place.span(pattern)[0])
            if name is not None:
                self._set(*name.span(1), "keyword_argument")
            start = self.place.span(pattern)[1]

    def _TypeVar(self, node: Any, _: str | None) -> None:
        self._set(*self.place.identifier(self.place.span(node)[0]), "definition")
        self._push(node.bound, "annotation")
