"""The rows of the tasks' gradients are those of separate backward passes, whatever the steps before left in them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.core.task import LossTerm
from etude.distributed import World
from etude.engine.precision import MixedPrecision
from etude.multitask.gradients import LOSS, TaskRows

TASKS = ("a", "b", "c")
SHAPES = ((2, 3), (4,), (1, 2, 2))
used = st.dictionaries(st.sampled_from(TASKS), st.sets(st.integers(0, len(SHAPES) - 1)))
"""Of one micro-batch: which parameters the loss of each task depends on, none at all for some."""


def loss_of(params, places, factor):
    return sum((factor * params[place].square().sum() for place in sorted(places)), torch.tensor(0.0))


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@settings(deadline=None, max_examples=50)
@given(steps=st.lists(st.lists(used, min_size=1, max_size=3), min_size=1, max_size=4))
def test_rows_are_sums_of_separate_gradients(kind, steps):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    precision = MixedPrecision(kind)
    rows = TaskRows(TASKS, params, World(), precision)
    for number, micro_batches in enumerate(steps):
        rows.begin()
        expected = torch.zeros(len(TASKS), sum(param.numel() for param in params))
        for place, uses in enumerate(micro_batches):
            factor = 1.0 + number + 0.5 * place
            terms = {f"{task}{LOSS}": LossTerm(loss_of(params, places, factor), 1.0) for task, places in uses.items()}
            rows.add(terms, dict.fromkeys(terms, 2.0))
            for task, places in uses.items():
                parts = [2 * factor * p * (i in places) / 2 for i, p in enumerate(params)]
                expected[TASKS.index(task)] += torch.cat([part.detach().flatten() for part in parts])
        torch.testing.assert_close(rows.matrix(), expected)
        touched = set().union(*(places for uses in micro_batches for places in uses.values()))
        assert rows.reached == [int(place in touched) for place in range(len(params))]
        assert list(rows.found) == list(dict.fromkeys(task for uses in micro_batches for task in uses))
        rows.matrix().fill_(torch.nan)  # whoever is given the rows may write over them, and a loss may be NaN
