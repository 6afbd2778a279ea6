"""Metrics of a run as a set: built from anything, named, sharing counts, saved and restored."""

import copy
import itertools
import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torchmetrics
from hypothesis import given, settings, strategies as st

from etude.core import CheckpointError, ConfigError, DataError, TrainingError
from etude.distributed import World
from etude.metrics import AUROC, F1, Accuracy, ConfusionMatrix, MetricSet, Precision, Recall
from etude.metrics.counts import MOST_CELLS
from etude.metrics.metric_set import build_metrics

CPU = torch.device("cpu")


def sample(seed=0, count=60, classes=4):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(classes, (count,), generator=generator)


def values(metrics, predictions, labels, cuts=()):
    found = metrics if isinstance(metrics, MetricSet) else MetricSet.of(metrics)
    found.begin(training=False)
    bounds = [0, *sorted(cuts), len(labels)]
    for start, end in itertools.pairwise(bounds):
        found.update(predictions[start:end], labels[start:end], training=False)
    return found.results(World(), CPU, training=False)


# ------------------------------------------------------------------ sharing


SHARED = [
    "accuracy",
    "f1",
    "precision",
    {"name": "recall", "average": "micro"},
    "balanced_accuracy",
    "confusion_matrix",
]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 50),
    classes=st.sampled_from([2, 3, 6]),
    nans=st.booleans(),
    ignored=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    cuts=st.lists(st.integers(0, 50), max_size=3),
)
def test_shared_counts_give_the_values_of_separate_metrics(seed, count, classes, nans, ignored, dtype, cuts):
    logits, labels = sample(seed, count, classes)
    logits = logits.to(dtype)
    if nans:
        logits[::3, 0] = math.nan
    if ignored:
        labels[::4] = -100
    together = MetricSet.of(SHARED)
    found = values(together, logits, labels, [min(cut, count) for cut in cuts])
    for name, metric in build_metrics(SHARED).items():
        metric.update(logits, labels)
        if name == "confusion_matrix":
            assert together.validation.metrics[name].compute().tolist() == metric.compute().tolist()
        else:
            assert found[name] == pytest.approx(metric.compute(), nan_ok=True)


def test_metrics_of_one_confusion_matrix_count_once(monkeypatch):
    counted = []
    for kind in (Accuracy, F1, Precision, ConfusionMatrix):
        update = kind.update
        monkeypatch.setattr(kind, "update", lambda self, *a, u=update, **k: (counted.append(self), u(self, *a, **k)))
    values(["accuracy", "f1", "precision", "confusion_matrix"], *sample())
    assert len(counted) == 1
    counted.clear()
    values([Accuracy(), F1(), {"name": "f1", "threshold": 0.3}, Accuracy(top_k=2)], *sample())
    assert len(counted) == 3


def test_an_object_of_a_set_can_be_used_alone_again():
    f1, matrix = F1(4), ConfusionMatrix(4)
    logits, labels = sample()
    metrics = MetricSet.of([f1, matrix])
    values(metrics, logits, labels)
    expected = matrix.compute().tolist()
    for one in (f1, matrix):
        one.reset()
        one.update(logits, labels)
    assert matrix.compute().tolist() == expected
    values(metrics, logits, labels)
    assert matrix.compute().tolist() == expected


def test_accuracy_of_class_ids_is_not_that_of_binary_labels():
    ids, labels = torch.tensor([3, 1, 0, 2]), torch.tensor([1, 1, 0, 2])
    for _ in range(2):
        assert values(["accuracy", "f1"], ids, labels)["accuracy"] == 0.75
    assert values([Accuracy(), F1(4)], ids, labels)["accuracy"] == 0.75


def test_accuracy_of_binary_logits_needs_a_threshold():
    logits, labels = sample(5, 80, 3)
    targets = (labels[:, None] == torch.arange(3)).float()
    targets[::4, 1] = math.nan
    there = ~targets.isnan()
    expected = sk.accuracy_score(targets[there], logits[there] > 0)
    for metrics in ([Accuracy(threshold=0.5)], [Accuracy(threshold=0.5), F1(threshold=0.5)]):
        assert values(metrics, logits, targets)["accuracy"] == pytest.approx(expected)
    with pytest.raises(DataError, match="threshold"):
        values(["accuracy"], logits, targets.nan_to_num(0).long())
    with pytest.raises(ConfigError, match="top_k"):
        Accuracy(top_k=2, threshold=0.5)


def test_a_last_dimension_of_one_is_a_binary_logit():
    logits, labels = sample(6, 80, 2)
    expected = sk.accuracy_score(labels, logits[:, 1] > 0)
    for metrics in (["accuracy"], ["accuracy", "f1"]):
        assert values(metrics, logits[:, 1:], labels)["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("classes", [3, math.isqrt(MOST_CELLS) + 2])
def test_many_classes_have_three_counts_each(classes):
    logits, labels = sample(1, 500, classes)
    logits[::7, 1] = math.nan
    labels[::5] = -100
    f1 = F1(classes)
    f1.update(logits, labels)
    assert f1.num_sums == (classes * (classes + 1) if classes == 3 else 3 * classes)
    with_matrix = values([F1(classes), ConfusionMatrix(classes)], logits, labels)
    assert f1.compute() == pytest.approx(with_matrix["f1"])


# ------------------------------------------------------------------ what can be a metric


def test_balanced_accuracy_equals_scikit_learn():
    logits, labels = sample(2, 40, 4)
    labels[labels == 3] = 0  # a class that is predicted, but never true
    expected = sk.balanced_accuracy_score(labels, logits.argmax(1)) if (logits.argmax(1) != 3).all() else None
    recalls = [(logits.argmax(1)[labels == k] == k).double().mean() for k in range(3)]
    assert values(["balanced_accuracy"], logits, labels)["balanced_accuracy"] == pytest.approx(
        float(np.mean(recalls))
    )
    assert expected is None or expected == pytest.approx(float(np.mean(recalls)))
    two = logits[:, 0]
    expected = sk.balanced_accuracy_score(labels > 0, two > 0)
    assert values(["balanced_accuracy"], two, (labels > 0).long())["balanced_accuracy"] == pytest.approx(expected)


def off(predictions, labels):
    return (predictions.argmax(1) != labels).float()


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(0, 60), max_size=4))
def test_a_function_is_a_mean_over_samples_for_any_split(cuts):
    logits, labels = sample()
    expected = off(logits, labels).mean().item()
    found = values([off, {"name": "accuracy"}], logits, labels, cuts)
    assert found["off"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(1 - expected)
    cuts = [cut for cut in cuts if 0 < cut < 60]
    scalar = values({"mean": lambda p, y: off(p, y).mean()}, logits, labels, sorted(set(cuts)))
    assert scalar["mean"] == pytest.approx(expected)


def test_a_function_may_return_a_number_and_nothing_else():
    logits, labels = sample()
    assert values({"three": lambda p, y: 3}, logits, labels) == {"three": 3.0}
    with pytest.raises(TrainingError, match="text"):
        values({"text": lambda p, y: "x"}, logits, labels)


def test_a_function_may_select_samples():
    logits, labels = sample()
    (found,) = values({"recall0": lambda p, y: p[y == 0].argmax(1) == 0}, logits, labels, range(2, 60, 2)).values()
    assert found == pytest.approx(sk.recall_score(labels, logits.argmax(1), labels=[0], average=None)[0])


def test_values_that_are_not_those_of_samples_are_one_warning(caplog):
    logits, labels = sample()
    values({"off": off, "selected": lambda p, y: off(p, y)[y > 0]}, logits, labels, [10, 20, 30, 40, 50])
    assert not caplog.records
    values({"by_class": lambda p, y: torch.ones(4)}, logits, labels, [10, 20, 30, 40, 50])
    (record,) = caplog.records
    assert "by_class" in record.getMessage()


def test_metrics_of_torchmetrics_by_object_collection_and_path():
    logits, labels = sample()
    classes = {"num_classes": 4, "average": "macro"}
    expected = sk.f1_score(labels, logits.argmax(1), average="macro")
    by_path = {"name": "torchmetrics", "metric": "classification.MulticlassF1Score", "arguments": classes}
    found = values([torchmetrics.F1Score("multiclass", **classes), by_path], logits, labels, [20])
    assert found == pytest.approx({"multiclass_f1_score": expected, "multiclass_f1_score_2": expected})
    per_class = torchmetrics.classification.MulticlassF1Score(4, average=None)
    group = torchmetrics.MetricCollection({"f": torchmetrics.F1Score("multiclass", **classes), "each": per_class})
    found = values(group, logits, labels, [20])
    assert found["f"] == pytest.approx(expected)
    each = sk.f1_score(labels, logits.argmax(1), average=None)
    assert [found[f"each_class{k}"] for k in range(4)] == pytest.approx(each)
    matrix = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)
    with pytest.raises(ConfigError, match=r"\(4, 4\)"):
        values([matrix], logits, labels)
    with pytest.raises(ConfigError, match="NoSuch"):
        build_metrics({"name": "torchmetrics", "metric": "NoSuch"})


def test_names():
    own = build_metrics([F1(3), F1(3, average="none"), F1(3), {"name": "accuracy", "k": 5}, off])
    assert list(own) == ["f1", "f1_per_class", "f1_2", "accuracy_top5", "off"]
    logits, labels = sample(classes=3)
    each = sk.f1_score(labels, logits.argmax(1), average=None)
    found = values([F1(average="none", class_names=["cat", "dog", "cow"])], logits, labels)
    assert found == pytest.approx(dict(zip(["f1_cat", "f1_dog", "f1_cow"], each, strict=True)))
    assert list(values({"mine": F1(3)}, logits, labels)) == ["mine"]
    with pytest.raises(ConfigError, match="2 class_names"):
        values([F1(average="none", class_names=["cat", "dog"])], logits, labels)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["f2"], "metrics.0.*f2.*f1"),
        ([{"name": "f1", "averge": "micro"}], "averge"),
        ([F1], "class F1"),
        ([lambda p, y: 0.0], "name"),
        ([3], "3"),
        ({"mine": 3}, "metrics.mine"),
        ({"loss": "f1"}, "metrics.loss"),
        ([{"name": "torchmetrics", "metric": "no.such.F1Score"}], "'no.such.F1Score'"),
        ([{"name": "torchmetrics", "metric": "classification.NoSuch"}], "'classification.NoSuch'"),
        ([{"name": "torchmetrics", "metric": "functional.f1_score"}], "'functional.f1_score'"),
        ([{"name": "torchmetrics", "metric": "F1Score", "arguments": {"tsk": 3}}], "F1Score.*'t(a)?sk'"),
    ],
)
def test_what_is_no_metric_is_refused_with_its_place(metrics, words):
    with pytest.raises(ConfigError, match=words):
        build_metrics(metrics)


# ------------------------------------------------------------------ training


def test_training_metrics_by_name_or_all():
    assert list(MetricSet.of(["f1", "auroc"], ["auroc"]).training.metrics) == ["auroc"]
    assert list(MetricSet.of(["f1", "auroc"], True).training.metrics) == ["f1", "auroc"]
    assert not MetricSet.of(["f1"]).wants(training=True)
    with pytest.raises(ConfigError, match=r"f2.*f1"):
        MetricSet.of(["f1"], ["f2"])


EVERY = [
    "accuracy",
    "f1",
    "confusion_matrix",
    "auroc",
    "perplexity",
    "calibration_error",
    off,
    torchmetrics.F1Score("multiclass", num_classes=4, average="macro"),
    torchmetrics.AUROC("multiclass", num_classes=4),
]


@pytest.mark.parametrize("processes", [1, 3])
def test_what_was_counted_before_a_checkpoint_counts_after_it(processes):
    logits, labels = sample()
    whole, before, after = (MetricSet.of(copy.deepcopy(EVERY), True) for _ in range(3))
    whole.update(logits, labels, training=True)
    if processes == 1:
        before.update(logits[:25], labels[:25], training=True)
        states = [before.state_dict()]
    else:  # fewer processes than before: the states are combined
        states = [MetricSet.of(copy.deepcopy(EVERY), True).state_dict()]  # one that had no samples
        for start, end in ((0, 10), (10, 25)):
            before.begin(training=True)
            before.update(logits[start:end], labels[start:end], training=True)
            states.append(copy.deepcopy(before.state_dict()))
    after.load_state_dict(*states)
    before.begin(training=True)  # the state is a copy
    after.update(logits[25:], labels[25:], training=True)
    expected, found = (one.results(World(), CPU, training=True) for one in (whole, after))
    assert found == pytest.approx(expected)
    assert len(found) == len(EVERY) - 1  # a matrix is no number


@pytest.mark.parametrize("metrics", [[Precision(4), "f1"], ["f1", "accuracy"]])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_state_of_a_later_epoch_fits_metrics_that_have_seen_nothing(metrics, as_ids):
    logits, labels = sample()
    predictions = logits.argmax(1) if as_ids else logits
    labels = labels if "accuracy" in metrics or not as_ids else labels % 2
    whole, after = (MetricSet.of(copy.deepcopy(metrics), True) for _ in range(2))
    for _ in range(2):  # the first epoch shows how many classes there are
        whole.begin(training=True)
        whole.update(predictions[:25], labels[:25], training=True)
        saved = copy.deepcopy(whole.state_dict())
        whole.update(predictions[25:], labels[25:], training=True)
        expected = whole.results(World(), CPU, training=True)
    after.load_state_dict(saved)
    after.update(predictions[25:], labels[25:], training=True)
    assert after.results(World(), CPU, training=True) == expected


def test_a_state_of_a_process_that_had_no_samples():
    logits, labels = sample()
    for metric in EVERY:
        new, after = (MetricSet.of([copy.deepcopy(metric)], True) for _ in range(2))
        after.load_state_dict(new.state_dict())
        for one in (new, after):
            one.update(logits, labels, training=True)
        expected, found = (one.results(World(), CPU, training=True) for one in (new, after))
        assert found == pytest.approx(expected, nan_ok=True)


def test_a_state_of_another_size_is_refused():
    saved = F1(5).state_dict()
    with pytest.raises(CheckpointError, match="f1"):
        F1(num_labels=2).load_state_dict({**saved, "num_classes": 0})


def test_binary_and_multi_label_inputs():
    logits, labels = sample(5, 80, 1)
    labels = (torch.rand(80, generator=torch.Generator().manual_seed(1)) < 0.5).long()
    expected = sk.f1_score(labels, logits[:, 0] > 0), sk.roc_auc_score(labels, logits[:, 0])
    found = values(["f1", "auroc", "confusion_matrix"], logits[:, 0], labels, [13])
    assert (found["f1"], found["auroc"]) == pytest.approx(expected)
    two = torch.cat([torch.zeros(80, 1), logits], 1)
    found = values(["accuracy", "f1", "auroc"], two, labels, [13])
    assert (found["f1"], found["auroc"]) == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, logits[:, 0] > 0))
    many, targets = torch.randn(50, 3, generator=torch.Generator().manual_seed(2)), torch.zeros(50, 3).bernoulli_(0.4)
    found = values([F1(num_labels=3), AUROC(num_labels=3), Recall(num_labels=3)], many, targets)
    assert found["f1"] == pytest.approx(sk.f1_score(targets, many > 0, average="macro"))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(targets, many))


@pytest.mark.parametrize("metric", [ConfusionMatrix, lambda **names: F1(average="none", **names)])
def test_names_for_only_some_classes_are_refused_with_the_first_results(metric):
    with pytest.raises(ConfigError, match="class_names"):
        values([metric(class_names=["a", "b"])], *sample(3, 50, 3))


def test_classes_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="'a'"):
        values([F1(average="none", class_names=["a", "b", "a"])], *sample(3, 50, 3))


@pytest.mark.parametrize("normalized", [None, "true", "predicted", "all"])
def test_a_matrix_is_written_as_json_and_as_a_picture(normalized):
    logits, labels = sample(3, 50, 3)
    matrix = ConfusionMatrix(normalized=normalized, class_names=["a", "b<", "c"])
    matrix.update(logits, labels)
    how = {"predicted": "pred"}.get(normalized, normalized)
    expected = sk.confusion_matrix(labels, logits.argmax(1), normalize=how)
    np.testing.assert_allclose(matrix.compute().numpy(), expected)
    files = matrix.files()
    assert list(files) == ["confusion_matrix.json", "confusion_matrix.svg"]
    from xml.etree import ElementTree

    picture = ElementTree.fromstring(files["confusion_matrix.svg"])
    cells = [one for one in picture if one.tag.endswith("rect")][1:]
    shares = expected / expected.sum(1, keepdims=True)
    assert [float(one.get("fill-opacity")) for one in cells] == pytest.approx(shares.flatten().tolist(), abs=1e-3)


def test_updates_read_nothing_from_the_device():
    logits, labels = (one.to("meta") for one in sample())
    metrics = MetricSet.of(EVERY[:6])
    for _ in range(2):
        metrics.update(logits, labels, training=False)
    halves = MetricSet.of(["auroc"])
    halves.update(
        torch.zeros(8, dtype=torch.half, device="meta"),
        torch.zeros(8, dtype=torch.long, device="meta"),
        training=False,
    )
    regression = MetricSet.of(["mae", "r2", "spearman"])
    regression.update(logits, logits, training=False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_cuda_updates_never_wait_and_give_the_same_values():
    logits, labels = sample()
    inputs = {
        "classes": (EVERY[:7], logits, labels),
        "halves": (["auroc", "average_precision", "f1"], logits[:, 0].half(), (labels > 1).long()),
        "numbers": (["mae", "rmse", "r2", "spearman"], logits, logits.roll(1, 0)),
    }
    for metrics, predictions, targets in inputs.values():
        found, expected = MetricSet.of(metrics), values(metrics, predictions, targets)
        there = predictions.cuda(), targets.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for start, end in ((0, 20), (20, 60)):
                found.update(*(one[start:end] for one in there), training=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found.results(World(), torch.device("cuda"), training=False) == pytest.approx(expected, rel=1e-5)
