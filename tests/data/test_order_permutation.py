"""The keyed permutation: one-to-one, uniform, and equal to a plain rendering of the same arithmetic."""

import math
import time
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from etude.core.random import mix
from etude.data.order.permutation import BLOCK, MAX_SIZE, SORTED_LIMIT, KeyedPermutation

MASK = 2**64 - 1


def z_score(observed, expected, degrees):
    """How many standard deviations the chi-square statistic lies above its mean."""
    statistic = float(((np.asarray(observed) - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


class PlainNetwork:
    """The network of large sizes with Python's integers, one value at a time, and its inverse."""

    def __init__(self, size, key):
        self.size, self.key = size, key
        self.rows = math.isqrt(size - 1) + 1
        self.columns = -(-size // self.rows)
        self.half, self.scramble = (16, 0x85EBCA6B) if size < 2**32 else (32, 0xBF58476D1CE4E5B9)

    def move(self, number, fixed):
        half, mask = self.half, 2 ** (2 * self.half) - 1
        word = (fixed * ((mix(self.key, number, 0) & mask) | 1) + (mix(self.key, number, 1) & mask)) & mask
        word = ((word ^ (word >> half)) * self.scramble) & mask
        extent = self.rows if number % 2 == 0 else self.columns
        return ((word >> half) * extent) >> half

    def forward(self, value):
        left, right = divmod(value, self.columns)
        for number in range(4):
            if number % 2 == 0:
                left = (left + self.move(number, right)) % self.rows
            else:
                right = (right + self.move(number, left)) % self.columns
        value = left * self.columns + right
        return value if value < self.size else self.forward(value)

    def backward(self, value):
        left, right = divmod(value, self.columns)
        for number in reversed(range(4)):
            if number % 2 == 0:
                left = (left - self.move(number, right)) % self.rows
            else:
                right = (right - self.move(number, left)) % self.columns
        value = left * self.columns + right
        return value if value < self.size else self.backward(value)


def plain_sorted(size, key):
    def word(i):
        x = (i * 0x9E3779B97F4A7C15 + mix(key)) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    return sorted(range(size), key=word)


keys = st.integers(0, 2**63 - 1)
large_sizes = st.one_of(
    st.integers(SORTED_LIMIT + 1, 10**6),
    st.integers(10**6, MAX_SIZE),
    st.sampled_from([SORTED_LIMIT + 1, 10**9, 10**15, MAX_SIZE - 1, MAX_SIZE, 2**40, 2**31 * (2**31 - 1)]),
)


@settings(deadline=None)
@given(size=st.integers(0, 3000), key=keys)
def test_small_sizes_are_one_to_one(size, key):
    assert sorted(KeyedPermutation(size, key).indices(0, size).tolist()) == list(range(size))


@settings(max_examples=10, deadline=None)
@given(size=st.integers(SORTED_LIMIT - 2, SORTED_LIMIT + 40_000), key=keys)
def test_sizes_around_and_above_the_limit_are_one_to_one(size, key):
    assert np.array_equal(np.sort(KeyedPermutation(size, key).indices(0, size)), np.arange(size))


@settings(deadline=None)
@given(size=large_sizes, key=keys, data=st.data())
def test_large_sizes_have_an_inverse(size, key, data):
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + 5)
    plain = PlainNetwork(size, key)
    values = KeyedPermutation(size, key).indices(start, stop)
    assert values.dtype == np.int64
    assert values.tolist() == [plain.forward(i) for i in range(start, stop)]
    assert [plain.backward(v) for v in values.tolist()] == list(range(start, stop))
    assert all(0 <= v < size for v in values.tolist())


@settings(deadline=None)
@given(size=st.integers(1, 300), key=keys)
def test_small_sizes_equal_the_plain_sort(size, key):
    assert KeyedPermutation(size, key).indices(0, size).tolist() == plain_sorted(size, key)


@settings(deadline=None)
@given(size=st.sampled_from([100, 5000, SORTED_LIMIT + 1, 3 * SORTED_LIMIT, 10**9]), key=keys, data=st.data())
def test_any_window_is_the_same_however_it_was_reached(size, key, data):
    perm = KeyedPermutation(size, key)
    for _ in range(3):  # the block kept from one window must not leak into the next
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, min(size, start + 2 * BLOCK + 10)))
        window = perm.indices(start, stop)
        assert np.array_equal(window, KeyedPermutation(size, key).indices(start, stop))
        if stop > start:
            assert perm[start] == window[0]
            assert perm[stop - 1] == window[-1]


def test_a_returned_window_belongs_to_the_caller():
    perm = KeyedPermutation(1000, 3)
    window = perm.indices(0, 10)
    expected = window.copy()
    window[:] = -1
    assert np.array_equal(perm.indices(0, 10), expected)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (5, 4), (0, 11), (11, 11)])
def test_positions_outside_are_an_index_error(start, stop):
    with pytest.raises(IndexError, match="0 to 10"):
        KeyedPermutation(10, 0).indices(start, stop)


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="size"):
        KeyedPermutation(size, 0)


@pytest.mark.parametrize("size", [10, 1000, SORTED_LIMIT + 1])
def test_sequence_protocol(size):
    perm = KeyedPermutation(size, 5)
    assert len(perm) == size
    assert [perm[i] for i in range(10)] == perm.indices(0, 10).tolist()
    with pytest.raises(IndexError):
        perm[size]


@pytest.mark.parametrize("make_key", [lambda i: i, lambda i: mix(0, i), lambda i: mix(i, 0)])
def test_every_order_of_four_is_equally_likely(make_key):
    counts = Counter(tuple(KeyedPermutation(4, make_key(i)).indices(0, 4).tolist()) for i in range(24 * 300))
    assert z_score([counts[p] for p in permutations(range(4))], 300, 23) < 4


@pytest.mark.parametrize("size", range(2, 11))
def test_every_value_is_equally_likely_at_every_position(size):
    rounds = 4000
    counts = np.zeros((size, size))
    for key in range(rounds):
        counts[np.arange(size), KeyedPermutation(size, mix(9, key)).indices(0, size)] += 1
    assert z_score(counts, rounds / size, (size - 1) ** 2) < 4


@pytest.mark.parametrize("size", [10, 1000, SORTED_LIMIT + 1])
def test_fixed_points_are_as_rare_as_chance(size):
    rounds = 60 if size > SORTED_LIMIT else 600
    fixed = [
        int((KeyedPermutation(size, mix(1, key)).indices(0, size) == np.arange(size)).sum()) for key in range(rounds)
    ]
    # The number of fixed points of a random permutation has mean 1 and variance 1.
    assert abs(np.mean(fixed) - 1) < 4 / math.sqrt(rounds)
    assert 0.6 < np.var(fixed) < 1.5


@pytest.mark.parametrize("size", [1000, SORTED_LIMIT, SORTED_LIMIT + 1, 100_000, 1_000_000])
def test_neighbours_are_independent(size):
    """Joint counts of (value here, value further on) in 16x16 cells, at lags that the network's shape could favour."""
    columns = int(KeyedPermutation(size, 0)._columns)
    for lag in (1, 2, columns - 1, columns, columns + 1, 2 * columns):
        counts = np.zeros(256)
        for key in range(4):
            values = KeyedPermutation(size, mix(2, key)).indices(0, min(size, 100_000))
            cells = values * 16 // size
            counts += np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
        assert z_score(counts, counts.sum() / 256, 255) < 4.5, lag


@pytest.mark.parametrize("size", [1000, SORTED_LIMIT + 1, 1_000_000])
def test_differences_of_neighbours_are_uniform(size):
    counts = np.zeros(64)
    for key in range(8):
        values = KeyedPermutation(size, mix(3, key)).indices(0, min(size, 50_000))
        counts += np.bincount(np.diff(values) % size * 64 // size, minlength=64)
    assert z_score(counts, counts.sum() / 64, 63) < 4.5


@pytest.mark.parametrize("size", [500, SORTED_LIMIT + 1, 10**9, 10**15])
def test_one_position_is_uniform_over_keys(size):
    for position in (0, size // 2, size - 1):
        counts = np.bincount(
            [KeyedPermutation(size, mix(position, key))[position] * 16 // size for key in range(480)], minlength=16
        )
        assert z_score(counts, 30, 15) < 4.5


@pytest.mark.parametrize("size", [1000, SORTED_LIMIT + 1])
def test_epochs_are_unrelated(size):
    """Neighbouring keys, and keys of neighbouring epochs, give uncorrelated orders."""
    for first, second in ((0, 1), (mix(0, 0), mix(0, 1)), (mix(0, 7), mix(1, 7))):
        a, b = (KeyedPermutation(size, key).indices(0, size).astype(float) for key in (first, second))
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(size)


def test_seeking_is_immediate():
    durations = []
    for key in range(5):
        begin = time.perf_counter()
        KeyedPermutation(10**9, key).indices(987_654_321, 987_654_385)
        durations.append(time.perf_counter() - begin)
    assert min(durations) < 0.05
