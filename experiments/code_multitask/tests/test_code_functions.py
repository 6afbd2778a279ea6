"""Functions, docstrings and tests that are cut out of files, and files that hold no code."""

import ast
import sysconfig
import textwrap
from pathlib import Path

import pytest
from code_tasks.docstrings import explanation, other_docstrings
from code_tasks.functions import FunctionText, functions_of, parse
from code_tasks.ontology import label_bytes
from code_tasks.sources import is_test_file, read_text, split_of
from code_tasks.testing import CodeUnderTest, Known, doctest_text, imports_of
from hypothesis import given, strategies as st


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
    simple, _ = label_bytes(text, parse(text))
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
def test_files_that_hold_no_code_are_distinguished(tmp_path, raw, reason):
    (tmp_path / "a.py").write_bytes(raw)
    assert read_text(tmp_path / "a.py") == ("", reason)


@pytest.mark.parametrize("text", ["def (:\n", "x = (1\n", "  indented = 1\n", "x = 1" + "(" * 3000 + "\n"])
def test_what_is_not_python_is_not_parsed(text):
    assert parse(text) is None


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
