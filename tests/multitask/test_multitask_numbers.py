"""Numbers of several tasks: means of terms that come and go, and metrics in validation."""

import json

import pytest
import sklearn.metrics as sklearn
import torch
from task_parts import (
    NAN,
    TASKS,
    WEIGHTS,
    ByHand,
    left_behind,
    make_batch,
    make_model,
    make_step,
    make_task,
    trainer,
    whole,
)

from etude import Trainer
from etude.core import StepReport
from etude.engine.evaluation import evaluate
from etude.engine.step_log import StepLog
from etude.metrics import AUROC, F1, ConfusionMatrix, Precision as PrecisionMetric


def test_means_of_terms_that_come_and_go():
    """Each over its own labels; a task without labels in a window has no key in it, and none is NaN."""
    log = StepLog()

    def add(**pairs):
        sums = {f"{task}/loss": torch.tensor(total) for task, (total, _) in pairs.items()}
        counts = {f"{task}/loss": torch.tensor(count) for task, (_, count) in pairs.items()}
        log.add(StepReport(sums, counts, torch.tensor(1.0), 1.0, torch.tensor(0.0), 0.1, set(sums)))

    add(a=(6.0, 3.0))
    add(b=(4.0, 1.0), c=(0.0, 0.0))
    add(a=(2.0, 1.0), b=(2.0, 2.0))
    means = log.take_window().means()
    assert means == {"a/loss": 2.0, "b/loss": 2.0}
    add(c=(5.0, 2.0))
    assert log.take_window().means() == {"c/loss": 2.5}
    add(a=(NAN, 3.0))
    bad = log.take_window().means()
    assert bad["a/loss"] != bad["a/loss"]  # labels were there, and the loss was not finite: that is to be seen
    assert log.take_epoch().means() == {"a/loss": 2.0, "b/loss": 2.0, "c/loss": 2.5}


class Batches(list):
    """The least of a loader."""

    def iterate(self, epoch, position=0):
        class Iterator:
            def __init__(self, batches):
                self.batches = iter(batches)

            def __iter__(self):
                return self.batches

            def close(self):
                pass

        return Iterator(self)


def test_metrics_over_batches_are_those_of_scikit_learn_on_the_whole():
    sklearn = pytest.importorskip("sklearn.metrics")
    metrics = {
        "kind": {"f1": F1(num_classes=3), "precision": PrecisionMetric(num_classes=3, average="weighted")},
        "flags": {"f1": F1(num_labels=4), "micro": F1(num_labels=4, average="micro")},
    }
    model, batches = make_model().eval(), Batches(make_batch(size, size) for size in (7, 1, 12, 5))
    task = make_task(**metrics)
    found = evaluate(model, task, batches)
    data = whole(batches)
    with torch.no_grad():
        out = model(data, ["kind", "flags", "size"])
    there = data["kind"] != -100
    true, guess = data["kind"][there], out["kind"].argmax(1)[there]
    assert found["kind/f1"] == pytest.approx(sklearn.f1_score(true, guess, average="macro"))
    assert found["kind/precision"] == pytest.approx(
        sklearn.precision_score(true, guess, average="weighted", zero_division=0)
    )
    assert found["kind/accuracy"] == pytest.approx(sklearn.accuracy_score(true, guess))
    columns = [~data["flags"][:, place].isnan() for place in range(4)]
    each = [
        (data["flags"][rows, place], (out["flags"][rows, place] > 0).double()) for place, rows in enumerate(columns)
    ]
    assert found["flags/f1"] == pytest.approx(sum(sklearn.f1_score(t, g, zero_division=0) for t, g in each) / 4)
    flat = [torch.cat(parts) for parts in zip(*each, strict=True)]
    assert found["flags/micro"] == pytest.approx(sklearn.f1_score(*flat))
    losses = {t: total.item() for t, total in ByHand(None, model).losses([data]).items()}
    assert {t: found[f"{t}/loss"] for t in TASKS} == pytest.approx(losses)
    assert found["loss"] == pytest.approx(sum(WEIGHTS[t] * loss for t, loss in losses.items()))
    assert evaluate(model, task, batches) == found  # counts begin again
    assert not task._measuring


def test_in_validation_a_task_without_labels_has_no_numbers():
    task = make_task(kind={"f1": F1(num_classes=3)})
    batches = Batches([make_batch(5, 1, missing=2.0)])
    found = evaluate(make_model(), task, batches)
    assert {name for name in found if name != "loss"} == {"size/loss"}
    assert all(value == value for value in found.values())


def test_a_failed_validation_does_not_leave_training_measuring():
    metric = F1(num_classes=3)
    task, model = make_task(kind={"f1": metric}), make_model()
    with pytest.raises(KeyError):
        evaluate(model, task, Batches([make_batch(5, 1), BadBatch(make_batch(5, 1))]))
    before = metric.state().clone()
    make_step(model, task)([make_batch(6, 1)])
    assert torch.equal(metric.state(), before)


class BadBatch(dict):
    def items(self):
        raise KeyError("a broken batch")


def test_names_of_validation_begin_with_val(tmp_path):
    result = trainer(None, tmp_path).train()
    assert {"val_loss", "val_kind/loss", "val_kind/f1", "val_flags/accuracy", "kind/loss", "kind/weight"} <= set(
        result
    )
    _, records = left_behind(tmp_path)
    third = next(record for record in records if record.get("step") == 3)  # its batch has no labels of this task
    assert "kind/loss" not in third
    assert "kind/accuracy" not in third
    assert "flags/loss" in third


def test_labels_that_only_later_batches_of_validation_have_are_not_missed_when_it_is_tried(caplog):
    batches = [make_batch(6, place, dtype=torch.float32) for place in range(4)]
    for batch in batches[:2]:
        batch["kind"].fill_(-100)
    config = {"epochs": 1, "sanity_val_batches": 2}
    run = Trainer(
        make_model(dtype=torch.float32), batches[2:], batches, config=config, task=make_task(), progress=False
    )
    assert {"val_loss", "val_kind/loss"} <= run.train().keys()
    assert not [record for record in caplog.records if "no labels" in record.getMessage()]


def test_metrics_of_a_task_may_keep_scores_be_functions_and_have_several_results():
    def off(predictions, labels):
        return (predictions.argmax(1) != labels).float()[labels >= 0]

    metrics = {"auroc": AUROC(num_classes=3), "off": off, "each": F1(3, average="none"), "matrix": ConfusionMatrix(3)}
    task, model = make_task(kind=metrics), make_model().eval()
    batches = Batches(make_batch(size, size) for size in (7, 12, 5))
    found = evaluate(model, task, batches)
    data = whole(batches)
    with torch.no_grad():
        logits = model(data, ["kind"])["kind"].double()
    there = data["kind"] != -100
    true, logits = data["kind"][there], logits[there]
    area = sklearn.roc_auc_score(true, logits.softmax(1), multi_class="ovr")
    each = sklearn.f1_score(true, logits.argmax(1), average=None, labels=[0, 1, 2], zero_division=0)
    assert found["kind/auroc"] == pytest.approx(area)
    assert found["kind/off"] == pytest.approx((logits.argmax(1) != true).double().mean().item())
    assert [found[f"kind/each_class{k}"] for k in range(3)] == pytest.approx(each)
    matrix = json.loads(task.files()["kind_matrix.json"])["matrix"]
    assert matrix == sklearn.confusion_matrix(true, logits.argmax(1), labels=[0, 1, 2]).tolist()
