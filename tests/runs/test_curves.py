"""Curves in characters, at the edges: one point, all NaN, constant, huge ranges."""

import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from etude.monitor.series import Series
from etude.runs.curves import draw, legend

points = st.lists(st.tuples(st.floats(0, 1e9), st.floats()), max_size=40)


@example([(0.0, 0.0), (1.0, np.inf), (1.2e-38, 0.0)], 1, 1, False, "braille")  # a gap far beyond the points
@given(
    points, st.integers(1, 120), st.integers(1, 30), st.booleans(), st.sampled_from(["braille", "letters", "ascii"])
)
def test_any_curve_is_drawn_in_its_space(points, width, height, log, style):
    x, y = np.array([a for a, _ in points]), np.array([b for _, b in points])
    text = draw([Series("loss", x, np.where(np.isinf(y), np.nan, y))], width, height, log=log, style=style).plain
    shown = [value for value in y if math.isfinite(value) and (value > 0 or not log)]
    lines = text.splitlines()
    if not shown:
        assert lines[0].startswith("no values")
        return
    assert len(lines) == height + 1 + (len(shown) < len(y))
    assert max(map(len, lines[:height])) <= max(width, 16 + 14)
    marks = sum(one == "a" or 0x2800 < ord(one) < 0x2900 for line in lines[:height] for one in line)
    assert marks >= 1
    assert style != "ascii" or text.isascii()


def test_a_falling_line_falls():
    text = draw([Series("loss", np.arange(8.0), np.arange(8.0)[::-1])], 40, 8, style="ascii").plain
    places = [line.rindex("a") for line in text.splitlines()[:8]]
    assert places == sorted(places)
    assert len(set(places)) == 8


def test_a_constant_and_one_point_are_in_the_middle():
    for y in (np.full(5, 3.0), np.array([3.0])):
        rows = draw([Series("loss", np.arange(float(len(y))), y)], 40, 5, style="ascii").plain.splitlines()
        assert [("a" in row, row.startswith("3")) for row in rows[:5]] == [(False, False)] * 2 + [(True, True)] + [
            (False, False)
        ] * 2


def test_a_spike_among_many_points_is_drawn():
    y = np.zeros(100_000)
    y[70_000] = 5.0
    text = draw([Series("loss", np.arange(1e5), y)], 60, 6, style="ascii").plain.splitlines()
    assert text[0].startswith("5")
    assert text[0].count("a") == 1
    assert 0.65 < (text[0].index("a") - 3) / 57 < 0.75


def test_a_gap_is_not_joined():
    y = np.array([1.0, np.nan, 1.0])
    joined = draw([Series("loss", np.arange(3.0), np.ones(3))], 60, 3).plain.splitlines()[1]
    apart = draw([Series("loss", np.arange(3.0), y)], 60, 3).plain.splitlines()
    count = lambda line: sum(0x2800 < ord(one) < 0x2900 for one in line)
    assert (count(joined) > 20, count(apart[1])) == (True, 2)
    assert apart[-1] == "1 of 3 values are not finite and not shown"


def test_curves_have_colours_and_a_legend():
    curves = [Series("loss", np.arange(2.0), np.full(2, value)) for value in (1.0, 2.0)]
    styles = {str(span.style) for span in draw(curves, 40, 4).spans}
    assert {"cyan", "yellow"} <= styles
    assert legend(["one", "two\x1b[0m"], "letters").plain.split() == ["a", "one", "b", "two\ufffd[0m"]


@pytest.mark.parametrize(("low", "high"), [(-1.7e308, 1.7e308), (5e-324, 1.7e308), (1e-320, 2e-320)])
def test_huge_and_tiny_ranges(low, high):
    for log in (False, True):
        text = draw(
            [Series("loss", np.array([0.0, 1.0]), np.array([low, high]))], 50, 5, log=log, style="ascii"
        ).plain
        assert "nan" not in text
        assert f"{high:.4g}"[:3] in text
