"""A rank without samples takes part in a step with terms like those of the other ranks."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from etude.core import LossTerm, Task
from etude.core.task import as_task
from etude.distributed.parallel import RankTask, local_gradients


def terms_of(model, batch, *, metrics):
    zero = model(batch).sum() * 0
    return {
        "loss": LossTerm(zero + 1, 1.0),
        "penalty": LossTerm(zero + 2, 1.0, 0.5, reported=False),
        "rare": LossTerm(zero + 3, 1.0, optional=True),
        "accuracy": LossTerm(zero.detach(), 1.0, 0.0),
    }


def test_terms_of_an_idle_rank_are_reported_as_those_of_the_others():
    said = []

    def gather(text):
        said.append(text)
        return list(said)

    world = SimpleNamespace(size=2, gather_text=gather, in_lockstep=False)
    model = nn.Linear(2, 1)
    busy = RankTask(as_task(terms_of), world)(model, torch.ones(3, 2), metrics=True)
    idle = RankTask(as_task(terms_of), world)(model, torch.ones(0, 2), metrics=True)
    assert json.loads(said[1]) == {}
    assert list(idle) == list(busy)
    for name, term in idle.items():
        assert (term.sum.item(), term.count) == (0.0, 0.0)
        expected = busy[name]
        assert (term.is_weighted, term.reported, term.optional) == (
            expected.is_weighted,
            expected.reported,
            expected.optional,
        )
        assert term.sum.requires_grad == term.is_weighted


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_with_accumulation_a_metric_with_a_gradient_stays_a_metric(in_lockstep):
    """Its count is not known before the last micro-batch, so it could not be trained later."""

    def terms(model, batch, *, metrics):
        output = model(batch)
        return {"loss": LossTerm(output.sum(), 3.0), "size": LossTerm(output.square().sum(), 3.0, 0.0)}

    world = SimpleNamespace(size=2, in_lockstep=in_lockstep, gather_text=lambda text: [text, text])
    model, task = nn.Linear(2, 1), RankTask(as_task(terms), world)
    with local_gradients(model):
        first = task(model, torch.ones(3, 2), metrics=True)
    last = task(model, torch.ones(3, 2), metrics=True)
    assert [[one.is_weighted for one in some.values()] for some in (first, last)] == [[True, False]] * 2


class Decides(Task):
    """Decides by the first value of a batch."""

    decision = None

    def __call__(self, model, batch, *, metrics):
        return {"loss": LossTerm(model(batch).sum(), self.decision)}

    def decide_on(self, model, batch):
        self.decision = batch[0, 0].item()

    def announcement(self):
        return None if self.decision is None else ""

    def decisions(self):
        return {} if self.decision is None else {"decision": self.decision}

    def decide(self, decisions):
        self.decision = decisions["decision"]


@pytest.mark.parametrize("rows", [0, 3])
def test_ranks_decide_alike(rows):
    """The second rank takes the decision of the first, also if it has no samples to decide on."""
    first = json.dumps({"decision": 5.0}), json.dumps({"loss": [True, True, False]})
    answers = iter(first)
    world = SimpleNamespace(size=2, in_lockstep=False, gather_text=lambda text: [next(answers), text])
    second = Decides()
    RankTask(second, world)(nn.Linear(2, 1), torch.ones(rows, 2), metrics=True)
    assert second.decision == 5.0


class DecidesLater(Decides):
    """A positive value decides, and the task has a metric from there on."""

    def __call__(self, model, batch, *, metrics):
        loss = model(batch).sum()
        return {"loss": LossTerm(loss, 1.0)} | (
            {"metric": LossTerm(loss.detach(), 1.0, 0.0)} if self.decision else {}
        )

    def decide_on(self, model, batch):
        self.decision = batch[0, 0].item() or None


def test_a_late_decision_may_add_terms():
    task = RankTask(DecidesLater(), SimpleNamespace(size=2, in_lockstep=False, gather_text=lambda text: [text]))
    names = [list(task(nn.Linear(2, 1), torch.full((3, 2), value), metrics=True)) for value in (0.0, 1.0, 0.0)]
    assert names == [["loss"], ["loss", "metric"], ["loss", "metric"]]
