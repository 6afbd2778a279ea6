"""The global generators: preserved to the last bit, and watched for draws of every kind."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from etude.data.sources.global_rng import GLOBALS, Preserved

SEEDS = itertools.count(1)  # hypothesis has seeded with 0
DRAWS = {
    "python": [random.random, lambda: random.gauss(0, 1), lambda: random.sample(range(900), 800)],
    "numpy": [
        np.random.rand,
        np.random.randn,
        lambda: np.random.randint(9, size=624),
        lambda: np.random.seed(next(SEEDS)),
    ],
    "torch": [lambda: torch.rand(()), lambda: torch.randn(()), lambda: torch.randn(99), lambda: torch.rand(624)],
}
READS = {
    "python": [lambda: random.getstate()],
    "numpy": [lambda: np.random.get_state(), lambda: np.random.get_state(legacy=False)],
    "torch": [lambda: torch.initial_seed(), lambda: torch.get_rng_state(), lambda: torch.random.get_rng_state()],
}
ALL = [(name, draw) for name, draws in DRAWS.items() for draw in draws]
SOME = st.lists(st.sampled_from(ALL), max_size=6)


def states():
    """By the functions of the libraries."""
    _, words, used, has_gauss, gauss = np.random.get_state()
    return random.getstate(), words.tolist(), used, has_gauss, gauss, torch.get_rng_state().tolist()


@given(before=SOME, inside=SOME, watched=st.sets(st.sampled_from(sorted(GLOBALS))))
def test_everything_drawn_inside_is_undone_and_noticed(before, inside, watched):
    for _, draw in before:
        draw()
    expected = states()
    with Preserved(watched) as generators:
        for _, draw in inside:
            draw()
    assert states() == expected
    assert set(generators.drawn) == watched & {name for name, _ in inside}


@pytest.mark.parametrize("name", READS)
def test_asking_for_a_state_or_a_seed_counts_as_drawing(name):
    for read in READS[name]:
        with Preserved(GLOBALS) as generators:
            read()
        assert generators.drawn == [name]


def test_a_draw_that_is_undone_inside_is_noticed():
    with Preserved(GLOBALS) as generators, torch.random.fork_rng(devices=[]):
        torch.rand(1)
    assert generators.drawn == ["torch"]


def test_blocks_within_each_other_each_see_their_own():
    functions = torch.initial_seed, random.getstate, np.random.get_state
    with Preserved(GLOBALS) as outer:
        random.random()
        with Preserved(GLOBALS) as inner:
            torch.initial_seed()
        with Preserved(GLOBALS) as second:
            pass
    assert (outer.drawn, inner.drawn, second.drawn) == (["python", "torch"], ["torch"], [])
    assert (torch.initial_seed, random.getstate, np.random.get_state) == functions


def test_an_error_inside_leaves_nothing_behind():
    expected, function = states(), torch.get_rng_state

    def draw_and_fail():
        random.random(), np.random.randn(), torch.rand(3)
        raise KeyError

    with pytest.raises(KeyError), Preserved(GLOBALS):
        draw_and_fail()
    assert states() == expected
    assert torch.get_rng_state is function
