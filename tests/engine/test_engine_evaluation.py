"""An evaluation without numbers says why there are none."""

import math

import pytest
import torch
from torch import nn

from etude.core import DataError, LossTerm, Task, TrainingError
from etude.data import as_loader
from etude.engine.evaluation import evaluate

SAMPLES = torch.arange(6.0).view(3, 2)


class Terms(Task):
    """Terms of the sum of the samples, with these fields."""

    def __init__(self, *fields, measured=None):
        self.fields, self.found = fields, measured or {}

    def __call__(self, model, batch, *, metrics):
        total = model(batch).sum()
        return {f"term{i}": LossTerm(total, len(batch), **fields) for i, fields in enumerate(self.fields)}

    def measured(self, world, device):
        return self.found

    def derived(self, means):
        return {"doubled": 2 * means["term0"]} if means else {}


class Uncounted(Terms):
    def __call__(self, model, batch, *, metrics):
        return {"rare": LossTerm(model(batch).sum() * 0, 0.0, optional=True)}


def evaluated(task, batches):
    return evaluate(nn.Identity(), task, as_loader(batches))


@pytest.mark.parametrize(
    "task", [Terms({"reported": False}), Terms({"reported": False}, {"reported": False}), Terms()]
)
def test_a_task_that_reports_nothing_is_not_taken_for_missing_data(task):
    with pytest.raises(TrainingError, match="reports no metrics") as caught:
        evaluated(task, [SAMPLES])
    assert "no batch" not in str(caught.value)


def test_metrics_of_the_task_are_numbers_enough():
    assert evaluated(Terms({"reported": False}, measured={"f1": 0.5}), [SAMPLES]) == {"f1": 0.5}


@pytest.mark.parametrize("batches", [[], [SAMPLES[:0]], [SAMPLES[:0], SAMPLES[:0]]], ids=["none", "empty", "empties"])
@pytest.mark.parametrize("task", [Terms({}), Terms({"reported": False}), Uncounted()])
def test_data_without_samples_is_an_error(task, batches):
    with pytest.raises(DataError, match="no batch"):
        evaluated(task, batches)


def test_batches_without_samples_are_passed_over():
    class Picky(nn.Module):
        def forward(self, x):
            return x.view(len(x), -1) / x.max()

    batches = [SAMPLES[:0], SAMPLES, SAMPLES[:0]]
    numbers = evaluate(Picky(), Terms({}), as_loader(batches))
    assert numbers == {"term0": pytest.approx(1.0), "doubled": pytest.approx(2.0)}


def test_optional_terms_may_all_be_without_a_number():
    assert evaluated(Uncounted(), [SAMPLES]) == {}


def test_a_term_that_must_be_counted_and_is_not_has_no_mean():
    class Nothing(Task):
        def __call__(self, model, batch, *, metrics):
            return {"loss": LossTerm(model(batch).sum() * 0, 0.0)}

    assert math.isnan(evaluated(Nothing(), [SAMPLES])["loss"])
