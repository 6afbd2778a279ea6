"""Labels of tokens against readings by hand, by ast's own names and by tokenize."""

import ast
import doctest
import importlib
import io
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
import pytest
from code_project import EXPERIMENT
from code_tasks.encoding import decisive_bytes, prompted
from code_tasks.functions import parse
from code_tasks.ontology import FULL, SIMPLE, label_bytes
from code_tasks.sources import read_text
from hypothesis import given, strategies as st

MODULES = sorted(path.stem for path in (EXPERIMENT / "code_tasks").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    assert doctest.testmod(importlib.import_module(f"code_tasks.{name}")).failed == 0


SNIPPET = '''\
"""Café: the module."""
import os.path as p, sys
from .a import (b as c)

@cache
@d.e(1)
class Größe(Base, pkg.Other, metaclass=Meta):
    """Doc."""
    x: "int" = 3  # note

    async def f(self, é, *args: list[str], k=None, **kw) -> bool:
        global g
        self.size = é.width + len(é, key=k)
        for i, (j, *r) in pairs(args):
            s = f"{i} and {j!r}" "tail"; q = "a" 'b'
        try:
            raise ValueError("bad")
        except (os.Error, OSError) as err:
            return [n for n in kw if n is not None]
        g = lambda y: (y, *args)
        match é:
            case [z, *rest] if z: pass
            case {1: Point(0, top=t), **more} | _: pass
'''

# (line, word, which of that word on the line, simple, full)
BY_HAND = [
    (1, '"""Café: the module."""', 0, "docstring", "docstring"),
    (2, "import", 0, "keyword", None),
    (2, "os", 0, "name", "import"),
    (2, "path", 0, "name", "import"),
    (2, "as", 0, "keyword", None),
    (2, "p,", 0, "name", "import"),
    (2, "sys", 0, "name", "import"),
    (3, ".", 0, "delimiter", None),
    (3, "c", 0, "name", "import"),
    (5, "@", 0, "delimiter", None),
    (5, "cache", 0, "name", "decorator"),
    (6, "d", 0, "name", "decorator"),
    (6, "e", 0, "name", "decorator"),
    (6, "1", 0, "number", "constant"),
    (7, "class", 0, "keyword", None),
    (7, "Größe", 0, "name", "class_name"),
    (7, "Base", 0, "name", "base_class"),
    (7, "pkg", 0, "name", "base_class"),
    (7, "Other", 0, "name", "base_class"),
    (7, "metaclass", 0, "name", "keyword_argument"),
    (7, "=", 0, "operator", None),
    (7, "Meta", 0, "name", "argument"),
    (8, '"""Doc."""', 0, "docstring", "docstring"),
    (9, "x", 0, "name", "definition"),
    (9, '"int"', 0, "string", "annotation"),
    (9, "3", 0, "number", "constant"),
    (9, "# note", 0, "comment", None),
    (11, "async", 0, "keyword", None),
    (11, "f(", 0, "name", "function_name"),
    (11, "self", 0, "name", "parameter"),
    (11, "é", 0, "name", "parameter"),
    (11, "args", 0, "name", "parameter"),
    (11, "list", 0, "name", "annotation"),
    (11, "[", 0, "delimiter", None),
    (11, "str", 0, "name", "annotation"),
    (11, "None", 0, "keyword", "constant"),
    (11, "kw", 0, "name", "parameter"),
    (11, "->", 0, "operator", None),
    (11, "bool", 0, "name", "annotation"),
    (12, "g", 1, "name", "use"),
    (13, "self", 0, "name", "use"),
    (13, "size", 0, "name", "attribute_definition"),
    (13, "é", 0, "name", "use"),
    (13, "width", 0, "name", "attribute"),
    (13, "len", 0, "name", "call"),
    (13, "é", 1, "name", "argument"),
    (13, "key", 0, "name", "keyword_argument"),
    (13, "k)", 0, "name", "argument"),
    (14, "i,", 0, "name", "loop_variable"),
    (14, "r)", 0, "name", "loop_variable"),
    (14, "pairs", 0, "name", "call"),
    (14, "args", 0, "name", "argument"),
    (15, "s", 0, "name", "definition"),
    (15, 'f"{i} and {j!r}"', 0, "string", "f_string"),
    (15, '"tail"', 0, "string", "f_string"),
    (15, '"a"', 0, "string", "string"),
    (15, "'b'", 0, "string", "string"),
    (17, "ValueError", 0, "name", "exception"),
    (17, '"bad"', 0, "string", "string"),
    (18, "os", 0, "name", "exception"),
    (18, "OSError", 0, "name", "exception"),
    (18, "err", 0, "name", "exception"),
    (19, "n", 1, "name", "use"),
    (19, "n", 2, "name", "loop_variable"),
    (19, "not", 0, "keyword", None),
    (20, "lambda", 0, "keyword", None),
    (20, "y", 0, "name", "parameter"),
    (20, "y", 1, "name", "use"),
    (21, "match", 0, "keyword", None),
    (22, "case", 0, "keyword", None),
    (22, "z", 0, "name", "definition"),
    (22, "rest", 0, "name", "definition"),
    (22, "z", 1, "name", "use"),
    (23, "Point", 0, "name", "use"),
    (23, "top", 0, "name", "keyword_argument"),
    (23, "t)", 0, "name", "definition"),
    (23, "more", 0, "name", "definition"),
    (23, "_", 0, "name", "definition"),
]


def labels_of(text):
    return label_bytes(text, parse(text))


@pytest.mark.parametrize(("line", "word", "which", "simple", "full"), BY_HAND)
def test_labels_are_those_given_by_hand(line, word, which, simple, full):
    lines = SNIPPET.split("\n")
    start = -1
    for _ in range(which + 1):
        start = lines[line - 1].index(word, start + 1)
    first = len("".join([*(f"{one}\n" for one in lines[: line - 1]), lines[line - 1][:start]]).encode())
    word = word if "#" in word or '"' in word or len(word) == 1 else word.rstrip(",()")
    by_simple, by_full = labels_of(SNIPPET)
    span = slice(first, first + len(word.encode()))
    assert SNIPPET.encode()[span].decode() == word
    assert set(by_simple[span]) == {SIMPLE.index(simple)}
    assert set(by_full[span]) == {FULL.index(full) if full else -100}


def test_white_space_between_tokens_has_no_label():
    simple, full = labels_of(SNIPPET)
    lines = [f"{line}\n" for line in SNIPPET.split("\n")]
    inside_a_token = np.zeros(len(simple), bool)
    for token in tokenize.generate_tokens(io.StringIO(SNIPPET).readline):
        if token.string.strip():
            before = "".join([*lines[: token.start[0] - 1], lines[token.start[0] - 1][: token.start[1]]])
            start = len(before.encode())
            inside_a_token[start : start + len(token.string.encode())] = True
    assert np.array_equal(simple >= 0, inside_a_token)
    assert not (full[~inside_a_token] >= 0).any()


def spans(labels, label, data):
    """The texts of stretches with one label."""
    marked = np.concatenate([[0], (labels == label).astype(int), [0]])
    edges = np.flatnonzero(np.diff(marked))
    return [data[start:stop].decode() for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("module", ["json/decoder", "dataclasses", "textwrap", "asyncio/tasks", "statistics", "enum"])
def test_names_in_real_files_are_those_that_ast_tells(module):
    text, _ = read_text(Path(sysconfig.get_path("stdlib"), f"{module}.py"))
    tree, data = ast.parse(text), text.encode()
    simple, full = labels_of(text)
    nodes = list(ast.walk(tree))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    expected = {
        "function_name": [node.name for node in nodes if isinstance(node, functions)],
        "class_name": [node.name for node in nodes if isinstance(node, ast.ClassDef)],
        "parameter": [node.arg for node in nodes if isinstance(node, ast.arg)],
        "attribute_definition": [
            node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ],
    }
    for name, words in expected.items():
        assert sorted(spans(full, FULL.index(name), data)) == sorted(words), name
    comments = [
        token.string
        for token in tokenize.tokenize(io.BytesIO(text.encode()).readline)
        if token.type == tokenize.COMMENT
    ]
    assert spans(simple, SIMPLE.index("comment"), data) == comments
    docstrings = [
        ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, functions | ast.ClassDef)
    ]
    docstrings = [one for one in (*docstrings, ast.get_docstring(tree, clean=False)) if one]
    found = [ast.literal_eval(one) for one in spans(simple, SIMPLE.index("docstring"), data)]
    assert sorted(found) == sorted(docstrings)
    assert set(np.unique(full[simple == SIMPLE.index("name")])) <= set(range(len(FULL))), "every name has a label"


@given(st.lists(st.sampled_from(["a", "_", "(", " ", "\n", "9", "é", '"', "self"]), min_size=1), st.data())
def test_the_decisive_byte_is_the_first_of_a_word_then_of_a_sign(parts, data):
    text = "".join(parts).encode()
    ends = sorted({*data.draw(st.lists(st.integers(1, len(text)))), len(text)})
    found = decisive_bytes(text, np.array(ends)).tolist()
    for start, stop, place in zip([0, *ends[:-1]], ends, found, strict=True):
        token = text[start:stop]
        words = [i for i, byte in enumerate(token) if byte >= 128 or chr(byte).isalnum() or chr(byte) == "_"]
        signs = [i for i, byte in enumerate(token) if not chr(byte).isspace() or byte >= 128]
        assert place == start + (words or signs or [0])[0]


@given(
    st.lists(st.integers(5, 99), max_size=30),
    st.lists(st.integers(5, 99), min_size=1, max_size=30),
    st.integers(16, 40),
)
def test_the_next_token_is_the_label_on_the_target_alone(prompt, target, length):
    one = prompted(np.array(prompt, int), 1, np.array(target), end=0, max_length=length)
    ids, labels = one.ids.tolist(), one.labels.tolist()
    place = ids.index(1)
    assert len(ids) == len(labels) <= length
    assert labels[:place] == [-100] * place
    assert labels[place:-1] == ids[place + 1 :]
    assert labels[-1] == -100
    assert ids[:place] == prompt[:place]
    assert [*target, 0][: len(ids) - place - 1] == ids[place + 1 :]
    whole = len(prompt) + len(target) + 2
    assert (len(ids) == whole) == (whole <= length), "nothing is cut that fits"
    assert len(ids) - place - 1 >= min(len(target) + 1, length // 2), "the target has half of the room"


def test_a_very_long_line_has_labels():
    text = "x = [" + ", ".join(f"'é{number}'" for number in range(20_000)) + "]\n"
    _simple, full = labels_of(text)
    assert int((full == FULL.index("string")).sum()) == sum(len(f"'é{number}'".encode()) for number in range(20_000))
