"""Metrics of BasicTrainingLoop: one of a kind follows training, the next one validation."""

import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
from loop_parts import data, model
from torch import nn

from etude import (
    F1,
    Accuracy,
    BasicTrainingLoop,
    ConfusionMatrix,
    DataLoader,
    LanguageModelingLoss,
    LossTracker,
    Precision,
    Recall,
    TrainingLoop,
    TrainingMetrics,
)
from etude.core import ConfigError
from etude.optim import AdamW

METRICS = {
    "loss": LossTracker,
    "accuracy": Accuracy,
    "f1": lambda: F1(3),
    "precision": lambda: Precision(3, average="macro"),
    "recall": lambda: Recall(3),
    "confusion": lambda: ConfusionMatrix(3),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_follows_training_and_validation(name):
    """They hold the numbers of the last epoch: those of the same metric over all of its batches."""
    (x, y), one = data(), model()
    made = [METRICS[name]() for _ in range(3)]
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)  # the model stays, so that both can be computed after
    loop = BasicTrainingLoop(
        one, optimizer, metrics=made[:2], config={"batch_size": 11, "device": "cpu"}, progress=False
    )
    loop.fit((x, y), (x[:20], y[:20]), epochs=2)
    for metric, count in ((made[0], 44), (made[1], 20)):
        made[2].reset()
        if name == "loss":
            made[2].update(F.cross_entropy(one(x[:count]), y[:count]))
            assert metric.compute() == pytest.approx(made[2].compute(), rel=2e-2)  # a mean of means
        else:
            made[2].update(one(x[:count]), y[:count])
            torch.testing.assert_close(torch.as_tensor(metric.compute()), torch.as_tensor(made[2].compute()))


def test_metrics_of_tokens_line_up_with_the_labels():
    """A language model predicts the next token: what the loss shifts, metrics see shifted."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    ids = (torch.arange(9) + torch.arange(32)[:, None]) % 7
    accuracy = Accuracy()
    loop = BasicTrainingLoop(
        one,
        AdamW(one.parameters(), lr=0.05),
        metrics=[accuracy],
        loss=LanguageModelingLoss(),
        config={"batch_size": 8},
        progress=False,
    )
    logs = loop.fit(DataLoader({"input_ids": ids}, batch_size=8), epochs=12)
    assert accuracy.compute() == pytest.approx(logs["accuracy"])
    assert accuracy.compute() > 0.9


def test_training_metrics_follow_both():
    one, summary = model(), TrainingMetrics()
    loop = BasicTrainingLoop(one, metrics=[summary], config={"batch_size": 8}, progress=False)
    logs = loop.fit(data(), data(), epochs=3)
    assert (summary.current_epoch, summary.current_batch) == (2, 6)
    assert (summary.train_loss, summary.val_loss) == (logs["loss"], logs["val_loss"])
    assert summary.best_val_loss <= summary.val_loss


@pytest.mark.parametrize("metrics", [["f2"], [lambda p, y: 0.0], [F1]])
def test_what_cannot_be_updated_is_refused(metrics):
    with pytest.raises(ConfigError, match="metrics"):
        BasicTrainingLoop(model(), metrics=metrics)
    with pytest.raises(ConfigError, match="at most two of f1"):
        BasicTrainingLoop(model(), metrics=[F1(3), F1(3), F1(3)])


def test_an_epoch_without_a_validation_measures_its_training():
    def trained(**settings):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        loop = TrainingLoop(loss_strategy=nn.CrossEntropyLoss(), metrics=["f1"], progress=False, **settings)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        return net, lambda **more: loop.train_epoch(
            net, DataLoader(x, y, 7), optimizer, epoch=loop.clock.epoch, **more
        )

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    net, epoch = trained()
    expected = pytest.approx(sk.f1_score(y, net(x).argmax(1), average="macro"))
    assert epoch().parts == {"f1": expected}
    assert epoch(val_dataloader=(x, y)).parts.keys() & {"f1", "val_f1"} == {"val_f1"}
    assert epoch().parts == {"f1": expected}
    _, epoch = trained(train_metrics=True)
    assert epoch(val_dataloader=(x, y)).parts.keys() >= {"f1", "val_f1"}
    _, epoch = trained(train_metrics=False)
    assert not epoch().parts
