"""Evaluations whose batches are recorded: the numbers of usual ones, whatever changes between two of them.

A recorder of its own stands in for CUDA graphs: it calls the function again. Real graphs: tests/gpu.
"""

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from etude.core import LossTerm, Task
from etude.data import DataLoader
from etude.engine.captured_evaluation import MOST_LOST, CapturedEvaluation
from etude.engine.evaluation import evaluate
from etude.losses import ClassificationLoss, SupervisedTask
from etude.metrics import MetricSet

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (50,), generator=torch.Generator().manual_seed(1))


class RunAgain:
    """Replays by calling the function again: right as long as it reads only what it was recorded with."""

    def __init__(self, share=1.0, error=None):
        self.share, self.error, self.recorded, self.replayed = share, error, 0, 0

    def record(self, function):
        if self.error:
            raise self.error
        self.recorded += 1
        result = function()

        def replay():
            self.replayed += 1
            result.copy_(function())

        return result, replay

    def recover(self):
        pass

    def timed(self, function):
        return function(), self.share


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def loader():
    return DataLoader(X, Y, 8, shuffle=False)


def both(net, task, capture):
    """Return the numbers of an evaluation with and without recording."""
    return evaluate(net, task, loader(), capture=capture), evaluate(net, task, loader())


def test_the_numbers_are_those_of_usual_evaluations_while_the_weights_change():
    net, task, recorder = model(), SupervisedTask(ClassificationLoss()), RunAgain()
    capture = CapturedEvaluation(recorder)
    for _ in range(4):
        found, expected = both(net, task, capture)
        assert found == pytest.approx(expected, rel=1e-12)
        with torch.no_grad():
            for param in net.parameters():
                param.add_(0.1)
    assert capture.refused is None
    assert recorder.recorded == 2  # whole batches, and the last one, which comes once in an evaluation
    assert recorder.replayed > 15


class Counting(SupervisedTask):
    calls = 0

    def __call__(self, *arguments, **options):
        self.calls += 1
        return super().__call__(*arguments, **options)


class Collecting(Task):
    def __init__(self):
        self.total = torch.zeros(())

    def __call__(self, model, batch, *, metrics):
        self.total += len(batch.labels)
        return {"loss": LossTerm(model(batch.data).sum(), len(batch.labels))}


class Drawing(Task):
    def __call__(self, model, batch, *, metrics):
        return {"loss": LossTerm(model(batch.data + torch.rand(6)).sum(), len(batch.labels))}


@pytest.mark.parametrize(
    ("task", "recorder", "words"),
    [
        (Counting(ClassificationLoss()), RunAgain(), "on the host"),
        (Collecting(), RunAgain(), "changes tensors"),
        (Drawing(), RunAgain(), "random numbers"),
        (SupervisedTask(ClassificationLoss()), RunAgain(share=0.1), "fully used"),
        (SupervisedTask(ClassificationLoss()), RunAgain(error=RuntimeError("not permitted")), "not permitted"),
    ],
    ids=["counts", "collects", "draws", "large", "fails"],
)
def test_what_cannot_be_recorded_is_run_as_usual(task, recorder, words):
    net, capture = model(), CapturedEvaluation(recorder)
    for _ in range(2):
        found, expected = both(net, task, capture)
        assert found == pytest.approx(expected, rel=1e-12)
    assert words in capture.refused
    assert recorder.replayed == 0


def test_metrics_that_are_sums_are_part_of_a_recorded_batch():
    net, task, recorder = model(), SupervisedTask(ClassificationLoss()), RunAgain()
    task.measure(MetricSet.of(["accuracy", "f1", "confusion_matrix", "perplexity", "calibration_error"]))
    capture = CapturedEvaluation(recorder)
    for _ in range(5):
        found, expected = both(net, task, capture)
        assert found == pytest.approx(expected, rel=1e-12)
        logits = net.eval()(X)
        assert found["f1"] == pytest.approx(f1_score(Y, logits.argmax(1), average="macro"))
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(-1.1)
    assert capture.refused is None
    assert recorder.replayed > 15


def test_metrics_that_keep_scores_run_as_usual():
    net, task, recorder = model(), SupervisedTask(ClassificationLoss()), RunAgain()
    task.measure(MetricSet.of(["auroc"]))
    capture = CapturedEvaluation(recorder)
    found, expected = both(net, task, capture)
    assert found == expected
    assert "on the host" in capture.refused


def test_a_replay_that_gives_other_numbers_is_found():
    class Wrong(RunAgain):
        def record(self, function):
            result = function()
            return result, lambda: result.add_(1.0)

    net, task, capture = model(), SupervisedTask(ClassificationLoss()), CapturedEvaluation(Wrong())
    found, expected = both(net, task, capture)
    assert found == pytest.approx(expected, rel=1e-12)
    assert "differs" in capture.refused


@pytest.mark.parametrize("change", ["weights", "layer", "setting"])
def test_what_is_replaced_between_evaluations_counts(change):
    net, task, recorder = model(), SupervisedTask(ClassificationLoss()), RunAgain()
    capture = CapturedEvaluation(recorder)
    for number in range(MOST_LOST + 3):
        found, expected = both(net, task, capture)
        assert found == pytest.approx(expected, rel=1e-12)
        if change == "weights":
            net[0].weight.data = torch.full_like(net[0].weight, float(number))
        elif change == "layer":
            net[3] = nn.Tanh() if number % 2 else nn.Sigmoid()
        else:
            net[1].eps = 1e-3 * (number + 1)
    assert "in every evaluation" in capture.refused


def test_terms_that_only_some_batches_have():
    class Taking(Task):
        def __call__(self, model, batch, *, metrics):
            name = "odd count" if batch.labels[0] % 2 else "even"
            count = torch.tensor(float(len(batch.labels))) if name == "even" else len(batch.labels)
            return {name: LossTerm(model(batch.data).sum(), count), "all": LossTerm(batch.data.sum(), 1)}

    net = model().eval()
    found = evaluate(net, Taking(), loader())
    for name, parity in (("odd count", 1), ("even", 0)):
        parts = [(x, y) for x, y in zip(X.split(8), Y.split(8), strict=True) if y[0] % 2 == parity]
        total = sum(net(x).double().sum().item() for x, _ in parts)
        assert found[name] == pytest.approx(total / sum(len(y) for _, y in parts), rel=1e-5)
    assert found["all"] == pytest.approx(X.double().sum().item() / 7, rel=1e-4)
