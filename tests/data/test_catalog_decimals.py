"""Numbers in bulk against Python's float."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.data.catalog.decimals import PADDING, DecimalParser


def parse(texts):
    buffer = b" " * PADDING + ",".join(texts).encode()
    ends = PADDING + np.cumsum([len(text.encode()) + 1 for text in texts]) - 1
    starts = ends - [len(text.encode()) for text in texts]
    decimals = np.array([len(text.rpartition(".")[2]) if "." in text else len(text.encode()) for text in texts])
    buffer += b" " * (-len(buffer) % 8)
    return DecimalParser().parse(np.frombuffer(buffer, np.uint64), starts, ends, decimals)


@given(st.lists(st.from_regex(r"-?[0-9]{1,22}", fullmatch=True), min_size=1), st.data())
def test_a_number_is_the_nearest_float(texts, data):
    places = [data.draw(st.integers(0, len(text.lstrip("-")))) for text in texts]
    texts = [
        text[: len(text) - place] + "." + text[len(text) - place :] if place else text
        for text, place in zip(texts, places, strict=True)
    ]
    values, bad = parse(texts)
    assert not (bad & [len(text.strip("-")) <= 16 for text in texts]).any()
    assert values[~bad].tolist() == [float(text) for text, wrong in zip(texts, bad, strict=True) if not wrong]


@given(st.lists(st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-3), min_size=1))
def test_numbers_as_python_writes_them(numbers):
    values, bad = parse([repr(number) for number in numbers])
    assert not bad.any()
    assert values.tolist() == numbers


@given(st.lists(st.from_regex(r"-?[0-9]{1,17}(\.[0-9]{1,17})?[eE][-+][0-9]{2}", fullmatch=True), min_size=1))
def test_exponents(texts):
    values, bad = parse(texts)
    assert values[~bad].tolist() == [float(text) for text, wrong in zip(texts, bad, strict=True) if not wrong]


@given(st.lists(st.integers(1, 10**9), min_size=1), st.integers(-14, 30))
def test_exponents_that_are_read_in_bulk(numbers, exponent):
    texts = [f"-{number / 1e8:.8f}e{exponent:+03d}" for number in numbers]
    values, bad = parse(texts)
    assert not bad.any()
    assert values.tolist() == [float(text) for text in texts]


@given(st.integers(2**53, 2**59), st.integers(0, 12))
def test_the_middle_between_two_floats_is_never_rounded_wrongly(whole, places):
    lower = whole / 10**places
    middle = (Fraction(lower) + Fraction(math.nextafter(lower, math.inf))) / 2 * 10**places
    texts = [str(int(middle) + step) for step in (-1, 0, 1)]
    texts = [f"{text[: len(text) - places]}.{text[len(text) - places :]}" for text in texts]
    values, bad = parse(texts)
    assert values[~bad].tolist() == [float(text) for text, wrong in zip(texts, bad, strict=True) if not wrong]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        ".",
        "-.",
        "1.2.3",
        "1-2",
        "--1",
        "1e5",
        "e-05",
        "1e-0x",
        "1e*05",
        "1e-5",
        "nan",
        "inf",
        "+1",
        " 1",
        "1 ",
        "1_0",
        "0x1",
        "9" * 25,
        "½",
    ],
)
def test_other_forms_are_left_to_others(text):
    values, bad = parse(["12.5", text, "7"])
    assert bad.tolist() == [False, True, False]
    assert values[[0, 2]].tolist() == [12.5, 7.0]
