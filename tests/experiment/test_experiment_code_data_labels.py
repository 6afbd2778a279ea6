"""Labels of the code experiment against readings by hand, by ast's own names, by tokenize and by ruff."""

import ast
import doctest
import importlib
import io
import json
import subprocess
import sys
import sysconfig
import textwrap
import tokenize
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.core import DataError

pytest.importorskip("tokenizers")
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "code_multitask"
if str(EXPERIMENT) not in sys.path:
    sys.path.append(str(EXPERIMENT))

from code_tasks import findings  # noqa: E402
from code_tasks.docstrings import explanation, other_docstrings  # noqa: E402
from code_tasks.encoding import decisive_bytes, prompted  # noqa: E402
from code_tasks.findings import Finding, groups_of, run_ruff  # noqa: E402
from code_tasks.functions import FunctionText, functions_of, parse  # noqa: E402
from code_tasks.labels import ALL_RULES, MEANING, QUALITY, SECURITY  # noqa: E402
from code_tasks.ontology import FULL, SIMPLE, label_bytes  # noqa: E402
from code_tasks.samples import multi_hot  # noqa: E402
from code_tasks.sources import is_test_file, read_text, split_of  # noqa: E402
from code_tasks.testing import CodeUnderTest, Known, doctest_text, imports_of  # noqa: E402

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


FINDINGS = {
    "asserts": ("def asserts(x):\n    assert x\n", set(), {"assert"}),
    "evaluates": ("def evaluates(x):\n    return eval(x)\n", set(), {"execution"}),
    "defaults": ("def defaults(x=[]):\n    x.append(1)\n", {"bugbear"}, set()),
    "badName": ("def badName(list):\n    print(list)\n", {"naming", "builtins"}, set()),
    "unused": ("def unused(x, y):\n    return x\n", {"unused_arguments"}, set()),
    "private": ("def private(other):\n    return other._secret\n", {"private_access"}, set()),
    "swallows": (
        "def swallows(f):\n    try:\n        f()\n    except Exception:\n        pass\n",
        {"simplify", "exceptions"},
        {"swallowed_error"},
    ),
    "loads": ("def loads(x):\n    import pickle\n    return pickle.loads(x)\n", {"pylint"}, {"unsafe_data"}),
    "draws": ("def draws():\n    import random\n    return random.random()\n", {"pylint"}, {"weak_random"}),
    "formats": ("def formats(x):\n    return '%s' % x\n", {"pyupgrade"}, set()),
    "clean": ("def clean(x):\n    return x + 1\n", set(), set()),
}


@pytest.fixture(scope="module")
def found():
    texts = [text for text, _, _ in FINDINGS.values()]
    return dict(zip(FINDINGS, run_ruff(texts, ALL_RULES), strict=True))


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_make_the_labels_that_the_code_deserves(name, found):
    _, quality, security = FINDINGS[name]
    assert {one for one, hot in zip(QUALITY, multi_hot(found[name], QUALITY), strict=True) if hot} == quality
    assert {one for one, hot in zip(SECURITY, multi_hot(found[name], SECURITY), strict=True) if hot} == security


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_are_those_of_ruff_called_by_hand(name, found):
    command = [
        findings.find_ruff(),
        "check",
        "--isolated",
        "--select",
        ",".join(ALL_RULES),
        "--output-format",
        "json",
    ]
    version = f"py3{min(sys.version_info[1], 13)}"
    command += ["--target-version", version, "--no-cache", "-"]
    text = subprocess.run(command, input=FINDINGS[name][0], capture_output=True, text=True, check=False).stdout
    by_hand = sorted((one["location"]["row"], one["code"]) for one in json.loads(text))
    assert by_hand == [(one.line, one.code) for one in found[name]]


def test_what_ruff_cannot_read_has_no_labels_and_noqa_does_not_count():
    broken, hushed = run_ruff(["def (:\n", "def f(x):\n    assert x  # noqa: S101\n"], ALL_RULES)
    assert broken is None
    assert hushed == [Finding(2, "S101")]
    assert set(multi_hot(None, SECURITY)) == {-100}


def test_every_rule_is_known_to_ruff_and_in_one_group():
    for groups in (QUALITY, SECURITY):
        for name, rules in groups.items():
            for rule in rules:
                assert groups_of(rule if rule[-1].isdigit() else f"{rule}100", groups) == [name]
    assert MEANING.keys() == {*QUALITY, *SECURITY}


def test_a_missing_ruff_is_told_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ruff", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"etude\[code\]"):
        run_ruff(["x = 1\n"], ALL_RULES)


def functions(text):
    return {one.qualified_name: one for one in functions_of(parse(text), text, with_calls=True)}


def test_functions_are_cut_out_with_their_class_and_without_docstring():
    text = textwrap.dedent('''
        if True:
            @wrap
            def outer(x):
                """Outer: does é."""
                def inner():
                    return 1
                return inner

        class Big:
            class Small:
                async def method(self): "One line."; return 2

                def empty(self):
                    """Only this.

                  not indented
                    """
    ''')
    found = functions(text)
    assert list(found) == ["outer", "Small.method", "Small.empty"]
    assert found["outer"].text.startswith('@wrap\ndef outer(x):\n    """Outer: does é."""\n    def inner')
    assert found["outer"].body == "@wrap\ndef outer(x):\n    def inner():\n        return 1\n    return inner\n"
    assert found["Small.method"].body == "class Small:\n    async def method(self): return 2\n"
    assert found["Small.empty"].body == "class Small:\n    def empty(self):\n        ...\n"
    for one in found.values():
        assert parse(one.text) is not None
        assert parse(one.body) is not None
        assert one.text.count("\n") == one.last_line - one.first_line + 1 + one.lines_above


def test_bodies_of_real_functions_parse_and_have_no_docstring():
    text, _ = read_text(Path(sysconfig.get_path("stdlib"), "statistics.py"))
    for one in functions_of(parse(text), text):
        tree = parse(one.body)
        node = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        assert ast.get_docstring(node) is None
        original = next(node for node in ast.walk(parse(one.text)) if isinstance(node, ast.FunctionDef))
        statements = original.body[1:] if one.docstring else original.body
        left = [ast.dump(statement) for statement in node.body]
        assert left == ([ast.dump(statement) for statement in statements] or [ast.dump(parse("...").body[0])])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a = 1\r\nb = 2\r\n", "a = 1\nb = 2\n"),
        (b"a = 1\rb = 2", "a = 1\nb = 2\n"),
        (b"\xef\xbb\xbfa = 1\n", "a = 1\n"),
        ("# -*- coding: latin-1 -*-\na = 'é'\n".encode("latin-1"), "# -*- coding: latin-1 -*-\na = 'é'\n"),
        (b"\x0c\na = 1\n", "\x0c\na = 1\n"),
        (b"if 1:\n\ta = 1\n", "if 1:\n\ta = 1\n"),
    ],
)
def test_files_are_read_as_python_reads_them(tmp_path, raw, text):
    (tmp_path / "a.py").write_bytes(raw)
    assert read_text(tmp_path / "a.py") == (text, "")
    assert ast.dump(ast.parse(raw)) == ast.dump(ast.parse(text))
    simple, _ = labels_of(text)
    assert len(simple) == len(text.encode())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"a = 1\0\n", "with null bytes"),
        (b"a = '\xff'\n", "in an unknown encoding"),
        (b"# coding: klingon\n", "in an unknown encoding"),
    ],
)
def test_files_that_hold_no_code_are_told_apart(tmp_path, raw, reason):
    (tmp_path / "a.py").write_bytes(raw)
    assert read_text(tmp_path / "a.py") == ("", reason)


@pytest.mark.parametrize("text", ["def (:\n", "x = (1\n", "  indented = 1\n", "x = 1" + "(" * 3000 + "\n"])
def test_what_is_not_python_is_not_parsed(text):
    assert parse(text) is None


def test_a_very_long_line_has_labels():
    text = "x = [" + ", ".join(f"'é{number}'" for number in range(20_000)) + "]\n"
    _simple, full = labels_of(text)
    assert int((full == FULL.index("string")).sum()) == sum(len(f"'é{number}'".encode()) for number in range(20_000))


@given(st.binary(min_size=16, max_size=16), st.floats(0, 0.5), st.floats(0, 0.49), st.floats(0, 0.49))
def test_another_share_moves_files_between_two_splits_only(digest, validation, test, other):
    before, after = split_of(digest, validation, test), split_of(digest, validation, other)
    assert {before, after} in ({before}, {"train", "test"})


def under_test(code, tests, name="test_shapes", module="shapes", split="train", known_split="train"):
    known = [Known(module, known_split, one) for one in functions(code).values()]
    tree = parse(tests)
    (test,) = [one for one in functions_of(tree, tests, with_calls=True) if one.name.startswith("test")]
    found = CodeUnderTest(known).find(test, name, imports_of(tree), split)
    return found.function.qualified_name if found else None


CODE = "def area(x): ...\ndef helper(x): ...\nclass Box:\n    def __init__(self): ...\n    def volume(self): ...\n"


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ("import shapes\ndef test_a():\n    shapes.area(1)\n", "area"),
        ("from shapes import area as a\ndef test_a():\n    a(1)\n", "area"),
        ("import shapes as s\ndef test_a():\n    s.Box()\n", "Box.__init__"),
        ("import shapes\ndef test_volume():\n    b = shapes.Box()\n    b.volume()\n", "Box.volume"),
        ("import shapes\ndef test_area():\n    shapes.helper(1); shapes.area(2)\n", "area"),
        ("import shapes\ndef test_b():\n    shapes.Box.volume(1)\n", "Box.volume"),
        ("import other\ndef test_area():\n    area(1)\n", None),
        ("import shapes\ndef test_a():\n    print(1)\n", None),
        ("import shapes\nclass T:\n    def test_helper(self):\n        self.helper(1)\n", None),
    ],
)
def test_code_under_test_is_found_by_calls_and_imports(tests, expected):
    assert under_test(CODE, tests) == expected


def test_a_call_of_a_module_that_is_not_the_subject_is_a_helper():
    tests = "import shapes\ndef test_a():\n    shapes.area(1)\n"
    assert under_test(CODE, tests, name="test.test_colours") is None
    assert under_test(CODE, tests.replace("test_a", "test_area"), name="test.test_colours") == "area"


@pytest.mark.parametrize(
    ("split", "known_split", "shown"),
    [
        ("train", "train", True),
        ("train", "validation", False),
        ("train", "test", False),
        ("validation", "train", True),
        ("validation", "test", False),
        ("test", "test", True),
    ],
)
def test_code_of_held_out_files_is_never_shown_elsewhere(split, known_split, shown):
    tests = "import shapes\ndef test_area():\n    shapes.area(1)\n"
    assert (under_test(CODE, tests, split=split, known_split=known_split) is not None) == shown


def test_doctests_are_those_that_doctest_finds():
    text = "Text.\n\n    >>> x = [\n    ...   1]\n    >>> x\n    [1]\n\n    More.\n"
    assert doctest_text(text) == ">>> x = [\n...   1]\n>>> x\n[1]\n"
    assert doctest_text("no example") == doctest_text(">>>broken") == ""


def test_every_docstring_is_as_often_right_as_wrong():
    functions = [
        (module, FunctionText("f", "", 1, 2, "", "", f"Does the thing {module} {number}."))
        for module, count in (("a", 5), ("b", 1), ("c", 1), ("d", 2))
        for number in range(count)
    ]
    chosen = list(other_docstrings(functions))
    assert sorted(one for one, _ in chosen) == sorted(other for _, other in chosen) == list(range(9))
    same_module = [functions[one][0] == functions[other][0] for one, other in chosen]
    assert sum(same_module) == 7
    assert all(one != other for one, other in chosen)


@pytest.mark.parametrize(
    ("docstring", "first"),
    [
        ("Return a thing\n    of two lines.\n\n    Rest.", "Return a thing of two lines."),
        ("\n    Starts below the quotes.\n    ", "Starts below the quotes."),
        ("Short.", ""),
        ("--- === ---", ""),
    ],
)
def test_explanations_are_first_paragraphs(docstring, first):
    assert explanation(docstring) == first


def test_files_of_tests_are_known_by_name():
    assert is_test_file("pkg/tests/helper.py")
    assert not is_test_file("unittest/case.py")
    assert not is_test_file("contest.py")
