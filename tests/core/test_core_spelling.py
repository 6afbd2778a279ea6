"""What an error message says about a name that is not known."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import etude
from etude.core.spelling import did_you_mean, listed, nearest, shorten, suggest

NAMES = st.lists(st.text("abcdefgh_", min_size=4, max_size=12), min_size=1, max_size=12, unique=True)


@given(names=NAMES, data=st.data())
def test_a_name_with_one_letter_too_many_is_answered_with_a_name_that_is_there(names, data):
    name = data.draw(st.sampled_from(names))
    near = nearest(f"{name}z", names)
    assert near in names
    assert did_you_mean(f"{name}z", names) == f"; did you mean '{near}'?"


@given(names=NAMES)
def test_nothing_like_it_gives_all_names_and_no_question(names):
    assert suggest("0123456789", names) == f" (there are: {', '.join(names)})"


@pytest.mark.parametrize("word", ["ADAMW", "AdamW", "adamww"])
def test_the_case_of_letters_is_no_difference(word):
    assert nearest(word, ["sgd", "AdamW"]) == "AdamW"


def test_a_long_list_is_cut_only_where_the_nearest_name_answers():
    names = [f"name_{number:02}" for number in range(20)]
    assert suggest("name_077", names) == f"; did you mean 'name_07'? (there are: {', '.join(names[:8])}, …)"
    assert suggest("qqq", names) == f" (there are: {', '.join(names)})"


@given(text=st.text(max_size=200), length=st.integers(1, 100))
def test_a_shortened_text_is_never_longer_and_says_that_it_was_cut(text, length):
    short = shorten(text, length)
    assert len(short) <= length or short == text
    assert short == text if len(text) <= length else short == text[: length - 1] + "…"


def test_an_empty_list_is_none():
    assert listed([]) == "none"
    assert suggest("x", []) == " (there are: none)"


def test_no_other_module_looks_for_near_names_itself():
    root = Path(etude.__file__).parent
    own = [file for file in root.rglob("*.py") if re.search(r"\bdifflib\b", file.read_text(encoding="utf-8"))]
    assert [str(file.relative_to(root)) for file in own] == ["core/spelling.py"]
