"""How many steps a run has: as a plain count over its epochs, and at once however many epochs there are."""

import pytest
from hypothesis import given, settings, strategies as st

from etude.core import ConfigError
from etude.engine.step import GradientAccumulator

SCHEDULES = st.dictionaries(st.integers(0, 12), st.integers(1, 6), max_size=4)


@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.integers(1, 6), st.integers(0, 20), st.integers(0, 10), st.integers(0, 15))
def test_steps_equal_a_count_over_epochs(changes, first, batches, start, stop):
    accumulator = GradientAccumulator(accumulation_steps={**changes, 0: first})
    counted = sum(-(-batches // accumulator.steps_at(epoch)) for epoch in range(start, stop))
    assert accumulator.num_steps(batches, range(start, stop)) == counted


@pytest.mark.parametrize("epochs", [10**12, 10**30])
def test_many_epochs_take_no_time(epochs):
    accumulator = GradientAccumulator(accumulation_steps={0: 1, 5: 4})
    assert accumulator.num_steps(8, range(epochs)) == 5 * 8 + (epochs - 5) * 2


@pytest.mark.parametrize("schedule", [{}, {5: 1}, {0: 1, -1: 2}, {0: 0}, 0])
def test_schedule_that_cannot_be(schedule):
    with pytest.raises(ConfigError):
        GradientAccumulator(accumulation_steps=schedule)
