"""Numbers in bulk against Python's float."""

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


@given(st.lists(st.from_regex(r"-?[0-9]{1,15}", fullmatch=True), min_size=1), st.data())
def test_up_to_15_digits_are_the_nearest_float(texts, data):
    places = [data.draw(st.integers(0, len(text.lstrip("-")))) for text in texts]
    texts = [
        text[: len(text) - place] + "." + text[len(text) - place :] if place else text
        for text, place in zip(texts, places, strict=True)
    ]
    values, bad = parse(texts)
    assert not bad.any()
    assert values.tolist() == [float(text) for text in texts]


@given(st.lists(st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-3), min_size=1))
def test_numbers_as_python_writes_them(numbers):
    values, bad = parse([repr(number) for number in numbers])
    assert not bad.any()
    np.testing.assert_allclose(values, numbers, rtol=4e-16)


@pytest.mark.parametrize(
    "text",
    ["", "-", ".", "-.", "1.2.3", "1-2", "--1", "1e5", "nan", "inf", "+1", " 1", "1 ", "1_0", "0x1", "9" * 25, "½"],
)
def test_other_forms_are_left_to_others(text):
    values, bad = parse(["12.5", text, "7"])
    assert bad.tolist() == [False, True, False]
    assert values[[0, 2]].tolist() == [12.5, 7.0]
