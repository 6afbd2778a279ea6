"""A sample of a grid of test cases: the whole grid takes minutes and runs with the slow tests."""

import itertools

import pytest


def sampled(every, *values):
    """Return all combinations; those whose places do not add up to a multiple of `every` are slow.

    With as many values in one list as `every`, each combination of the others is in the sample once.
    """
    grid = itertools.product(*(enumerate(some) for some in values))
    return [
        pytest.param(*(one for _, one in case), marks=[pytest.mark.slow] if sum(at for at, _ in case) % every else [])
        for case in grid
    ]
