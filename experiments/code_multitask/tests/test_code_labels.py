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

# For each line of the snippet its words from left to right, each with its simple label, a slash and its full one.
BY_HAND = {
    1: '"""Café: the module.""" docstring/docstring',
    2: "import keyword  os name/import  path name/import  as keyword  p name/import  sys name/import",
    3: ". delimiter  c name/import",
    5: "@ delimiter  cache name/decorator",
    6: "d name/decorator  e name/decorator  1 number/constant",
    7: (
        "class keyword  Größe name/class_name  Base name/base_class  pkg name/base_class"
        "  Other name/base_class  metaclass name/keyword_argument  = operator  Meta name/argument"
    ),
    8: '"""Doc.""" docstring/docstring',
    9: 'x name/definition  "int" string/annotation  3 number/constant  # note comment',
    11: (
        "async keyword  def keyword  f name/function_name  self name/parameter  é name/parameter"
        "  args name/parameter  list name/annotation  [ delimiter  str name/annotation  None keyword/constant"
        "  kw name/parameter  -> operator  bool name/annotation"
    ),
    12: "global keyword  g name/use",
    13: (
        "self name/use  size name/attribute_definition  é name/use  width name/attribute  len name/call"
        "  é name/argument  key name/keyword_argument  k name/argument"
    ),
    14: "i name/loop_variable  r name/loop_variable  pairs name/call  args name/argument",
    15: (
        's name/definition  f"{i} and {j!r}" string/f_string  "tail" string/f_string  "a" string/string'
        "  'b' string/string"
    ),
    17: 'ValueError name/exception  "bad" string/string',
    18: "os name/exception  OSError name/exception  err name/exception",
    19: "return keyword  n name/use  for keyword  n name/loop_variable  not keyword",
    20: "lambda keyword  y name/parameter  y name/use",
    21: "match keyword",
    22: "case keyword  z name/definition  rest name/definition  z name/use",
    23: "Point name/use  top name/keyword_argument  t name/definition  more name/definition  _ name/definition",
}


def labels_of(text):
    return label_bytes(text, parse(text))


@pytest.mark.parametrize("line", BY_HAND)
def test_labels_are_those_given_by_hand(line):
    lines = SNIPPET.splitlines(keepends=True)
    by_simple, by_full = labels_of(SNIPPET)
    stop = len("".join(lines[: line - 1]).encode())
    for word, labels in (entry.rsplit(" ", 1) for entry in BY_HAND[line].split("  ")):
        simple, _, full = labels.partition("/")
        start = SNIPPET.encode().index(word.encode(), stop)
        stop = start + len(word.encode())
        assert set(by_simple[start:stop]) == {SIMPLE.index(simple)}, word
        assert set(by_full[start:stop]) == {FULL.index(full) if full else -100}, word


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
