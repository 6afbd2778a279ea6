"""On a CUDA device: labels out of range are noticed without waiting in a step, and never end the process."""

import pytest
import torch
from captured_runs import captured
from torch import nn

from etude import Trainer
from etude.core import DataError
from etude.engine.evaluation import evaluate
from etude.metrics.metric_set import MetricSet
from metric_classes import LABELS, LOGITS, OF_CLASSES, with_label

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


@pytest.mark.parametrize("label", [4, -1])
@pytest.mark.parametrize("make", OF_CLASSES.values(), ids=OF_CLASSES)
def test_a_label_that_is_no_class_is_an_error_when_the_value_is_read(make, label, no_waiting):
    metric, expected = make(), make()
    logits, labels, wrong = LOGITS.cuda(), LABELS.cuda(), with_label(label).cuda()
    metric.update(logits, labels)
    no_waiting(True)
    metric.update(logits, wrong)
    no_waiting(False)
    with pytest.raises(DataError, match=rf"^{type(metric).__name__}: .* the class {label}, .*\(0 … 3\)"):
        metric.compute()
    metric.reset()
    metric.update(logits, labels)
    expected.update(LOGITS, LABELS)
    torch.testing.assert_close(metric.compute(), expected.compute())


SOFT = torch.softmax(torch.randn(640, 3, generator=torch.Generator().manual_seed(1)), 1)
HOT = (SOFT > 0.3).float()
SAMPLES = torch.randn(640, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("capture", ["on", "off"])
@pytest.mark.parametrize(
    ("labels", "wrong", "words"), [(SOFT, 0.9, "sum to 2.7"), (HOT, 2.0, "found 2")], ids=["soft", "several"]
)
def test_labels_of_a_later_batch_that_do_not_fit_the_loss(labels, wrong, words, capture):
    changed = labels.clone()
    changed[500] = wrong
    config = {"epochs": 1, "batch_size": 8, "capture": capture, "log_interval": 10, "compile": "off"}
    for given, fails in ((labels, False), (changed, True)):
        trainer = Trainer(nn.Linear(6, 3), (SAMPLES, given), config=config, progress=False)
        if fails:
            with pytest.raises(DataError, match=words):
                trainer.train()
        else:
            trainer.train()
        assert captured(trainer) == (capture == "on")


def test_metrics_of_classes_are_captured_with_their_check():
    kept = ("auroc", "average precision")  # they keep rows, which a graph cannot
    measures = MetricSet.of([make() for name, make in OF_CLASSES.items() if name not in kept])
    data = torch.randn(320, 6), torch.arange(320) % 4
    config = {"epochs": 2, "batch_size": 8, "capture": "on", "compile": "off", "precision": "fp32"}
    trainer = Trainer(nn.Linear(6, 4), data, data, metrics=measures, config=config, progress=False)
    trainer.train()
    assert trainer.machine.evaluation._graphs, trainer.machine.evaluation.refused
    found = trainer.evaluate()
    again = evaluate(trainer.model, trainer.task, trainer.loaders.validation)
    assert found == pytest.approx(again, rel=1e-3)
