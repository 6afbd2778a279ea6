"""Blocks: lowest, highest and last value of every bucket are those of a plain loop, at every length and zoom."""

import math

import numpy as np
from hypothesis import given, strategies as st

from etude.dashboard.blocks import Blocks

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(math.inf), st.just(math.nan))  # nan: no value, inf: not finite
PARTS = st.lists(st.lists(VALUES, min_size=1, max_size=40), min_size=1, max_size=6)


def filled(parts: list[list[float]], most: int) -> Blocks:
    blocks, start = Blocks(axes=1, most=most), 0
    for part in parts:
        blocks.add(np.arange(start, start + len(part), dtype=float)[None], ["loss"], np.array([part]))
        start += len(part)
    return blocks


def check_buckets(x, low, high, last, bad, values):
    """Every bucket covers the values after the bucket before it, up to and with its own place."""
    there = [(place, value) for place, value in enumerate(values) if not math.isnan(value)]
    assert (len(x) > 0) == bool(there)
    before = -1.0
    for index, place in enumerate(x):
        inside = [value for at, value in there if before < at <= place]
        finite = [value for value in inside if math.isfinite(value)]
        assert inside
        np.testing.assert_equal(low[index], min(finite) if finite else math.nan)
        np.testing.assert_equal(high[index], max(finite) if finite else math.nan)
        np.testing.assert_equal(last[index], inside[-1] if math.isfinite(inside[-1]) else math.nan)
        assert bad[index] == (len(finite) < len(inside))
        before = place
    assert not there or before >= there[-1][0]


@given(PARTS, st.sampled_from([2, 4, 8, 64]), st.integers(1, 20))
def test_no_spike_vanishes(parts, most, pixels):
    values = [value for part in parts for value in part]
    blocks = filled(parts, most)
    points = blocks.points("loss")
    assert blocks.total["loss"] == sum(not math.isnan(value) for value in values)
    assert len(points.x[0]) <= most + 1
    check_buckets(points.x[0], points.low, points.high, points.last, points.bad, values)
    seen = points.placed(points.x[0]).bucketed(pixels)
    assert len(seen.x) <= max(pixels, 1)
    check_buckets(seen.x, seen.low, seen.high, seen.last, seen.bad, values)


@given(st.lists(VALUES, min_size=1, max_size=60), st.integers(1, 4))
def test_merging_to_save_memory_keeps_everything_too(values, times):
    blocks = filled([values], 64)
    for _ in range(times):
        blocks.merge()
    points = blocks.points("loss")
    check_buckets(points.x[0], points.low, points.high, points.last, points.bad, values)


def test_short_runs_keep_every_record():
    values = [[3.0, 1.0, 2.0], [9.0]]
    points = filled(values, 8).points("loss")
    for kind in (points.low, points.high, points.last):
        assert kind.tolist() == [3.0, 1.0, 2.0, 9.0]


def test_names_come_later_and_are_missing_before():
    blocks = Blocks(axes=1, most=4)
    for step in range(12):
        names = ["loss"] if step < 8 else ["loss", "late"]
        blocks.add(np.array([[float(step)]]), names, np.array([[float(step)]] * len(names)))
    assert blocks.points("late").low.min() == 8
    assert blocks.points("late").high.max() == 11
    assert blocks.points("loss").low.min() == 0
    assert blocks.points("nothing").x.shape == (1, 0)


def test_memory_does_not_grow_with_the_run():
    blocks, sizes = Blocks(axes=5, most=256), []
    for _ in range(40):
        blocks.add(np.zeros((5, 1000)), ["a", "b"], np.ones((2, 1000)))
        sizes.append(blocks.num_bytes)
    assert max(sizes) < 256 * (5 + 2 * 3) * 8 * 2 + 1000 * 8 * 7


def test_a_range_keeps_one_point_on_either_side():
    points = filled([[float(value) for value in range(10)]], 64).points("loss")
    seen = points.placed(points.x[0]).between(3.5, 6.0)
    assert seen.x.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
