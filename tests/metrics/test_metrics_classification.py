"""Precision, recall, F1 and the confusion matrix against scikit-learn and torchmetrics, over splits and odd cases."""

import math
from itertools import pairwise

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torchmetrics.functional.classification as tm
from hypothesis import given, settings, strategies as st
from torch import Tensor

import etude
from etude.config import lookup
from etude.core import ConfigError, DataError
from etude.metrics import F1, Accuracy, ConfusionMatrix, Metric, Precision, Recall

IGNORED = -100
SCORES = {Precision: sk.precision_score, Recall: sk.recall_score, F1: sk.f1_score}
TORCHMETRICS = {Precision: "precision", Recall: "recall", F1: "f1_score"}
AVERAGES = ("macro", "micro", "weighted")


def sample(seed: int, shape: tuple[int, ...], classes: int, missing: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return logits with the classes last, and targets of which some are ignored; small samples lack some classes."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < missing] = IGNORED
    return torch.randn(*shape, classes, generator=generator), targets


def label_sample(seed: int, shape: tuple[int, ...], rate: float = 0.4) -> tuple[Tensor, Tensor]:
    """Return logits and binary labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(shape, generator=generator) < rate).long()
    targets[torch.rand(shape, generator=generator) < 0.2] = IGNORED
    return torch.randn(shape, generator=generator), targets


def value(metric, predictions, targets, mask=None):
    metric.update(predictions, targets, mask)
    return metric.compute()


@pytest.mark.parametrize("kind", list(SCORES))
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 40),
    classes=st.integers(2, 6),
    average=st.sampled_from(AVERAGES),
    mask=st.booleans(),
)
def test_classes_equal_scikit_learn_and_torchmetrics(kind, seed, count, classes, average, mask):
    logits, targets = sample(seed, (count,), classes)
    given_mask = torch.arange(count) % 3 != 0 if mask else None
    result = value(kind(num_classes=classes, average=average), logits, targets, given_mask)
    if given_mask is not None:
        targets = targets.masked_fill(~given_mask, IGNORED)
    there = targets != IGNORED
    if not there.any():
        assert math.isnan(result)
        return
    expected = SCORES[kind](
        targets[there].numpy(), logits[there].argmax(-1).numpy(), average=average, zero_division=0
    )
    assert result == pytest.approx(expected, abs=1e-12)
    function = getattr(tm, f"multiclass_{TORCHMETRICS[kind]}")
    theirs = function(logits, targets, num_classes=classes, average=average, ignore_index=IGNORED)
    assert result == pytest.approx(theirs.item(), abs=1e-6)


@pytest.mark.parametrize("kind", list(SCORES))
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 30),
    threshold=st.sampled_from([0.5, 0.3, 0.8]),
    rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_binary_equals_scikit_learn_and_torchmetrics(kind, seed, count, threshold, rate):
    logits, targets = label_sample(seed, (count,), rate)
    result = value(kind(threshold=threshold), logits, targets)
    there = targets != IGNORED
    if not there.any():
        assert math.isnan(result)
        return
    predicted = (logits.double().sigmoid() > threshold)[there].numpy()
    assert result == pytest.approx(SCORES[kind](targets[there].numpy(), predicted, zero_division=0), abs=1e-12)
    function = getattr(tm, f"binary_{TORCHMETRICS[kind]}")
    theirs = function(logits.sigmoid(), targets, threshold=threshold, ignore_index=IGNORED)
    assert result == pytest.approx(theirs.item(), abs=1e-6)


@pytest.mark.parametrize("kind", list(SCORES))
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 25),
    labels=st.integers(1, 5),
    average=st.sampled_from(AVERAGES),
    missing=st.booleans(),
)
def test_labels_equal_scikit_learn_and_torchmetrics(kind, seed, count, labels, average, missing):
    logits, targets = label_sample(seed, (count, labels))
    if not missing:
        targets = targets.clamp(min=0)
    metric = kind(num_labels=labels, average=average)
    result = value(metric, logits, targets)
    if missing:
        # Label by label, since scikit-learn knows no missing ones.
        columns = [(targets[:, i], logits[:, i] > 0) for i in range(labels)]
        columns = [(t[t != IGNORED].numpy(), p[t != IGNORED].numpy()) for t, p in columns]
        columns = [(t, p) for t, p in columns if len(t)]
        if not columns:
            assert math.isnan(result)
            return
        scores = [SCORES[kind](t, p, zero_division=0) for t, p in columns]
        supports = [t.sum() for t, _ in columns]
        expected = {
            "macro": lambda: np.mean(scores),
            "weighted": lambda: np.average(scores, weights=supports) if sum(supports) else 0.0,
            "micro": lambda: SCORES[kind](*(np.concatenate(c) for c in zip(*columns, strict=True)), zero_division=0),
        }[average]()
        some_label_is_never_there = len(columns) < labels  # torchmetrics gives such a label a score of 0
    else:
        shape = (-1,) if labels == 1 else (-1, labels)
        # With one column scikit-learn sees a binary task, whose average runs over both classes.
        how = "binary" if labels == 1 else average
        truth, guess = (t.reshape(shape).numpy() for t in (targets, logits > 0))
        expected = SCORES[kind](truth, guess, average=how, zero_division=0)
        some_label_is_never_there = False
    assert result == pytest.approx(expected, abs=1e-12)
    if labels > 1 and not (some_label_is_never_there and average == "macro"):
        function = getattr(tm, f"multilabel_{TORCHMETRICS[kind]}")
        theirs = function(logits.sigmoid(), targets, num_labels=labels, average=average, ignore_index=IGNORED)
        assert result == pytest.approx(theirs.item(), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40), classes=st.integers(2, 5))
def test_confusion_matrices_equal_scikit_learn(seed, count, classes):
    logits, targets = sample(seed, (count,), classes)
    there = targets != IGNORED
    truth, guess = targets[there].numpy(), logits[there].argmax(-1).numpy()
    matrix = value(ConfusionMatrix(num_classes=classes), logits, targets)
    assert matrix.dtype is torch.int64
    if len(truth):
        assert matrix.tolist() == sk.confusion_matrix(truth, guess, labels=range(classes)).tolist()
    else:
        assert matrix.tolist() == [[0] * classes] * classes

    logits, targets = label_sample(seed, (count, classes))
    matrix = value(ConfusionMatrix(num_labels=classes), logits, targets)
    theirs = tm.multilabel_confusion_matrix(logits.sigmoid(), targets, num_labels=classes, ignore_index=IGNORED)
    assert matrix.tolist() == theirs.tolist()
    binary = value(ConfusionMatrix(), logits, targets)
    assert binary.shape == (2, 2)
    assert binary.tolist() == matrix.sum(0).tolist()


@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_nan_names_no_class_and_its_label_is_missed(seed, share):
    """In scikit-learn a class of its own, which none of the scores are about."""
    classes = 4
    logits, targets = sample(seed, (40,), classes)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < share] = math.nan
    counted = targets != IGNORED
    names = np.where(logits.isnan().any(1), classes, logits.nan_to_num(0.0).argmax(1))[counted]
    true = targets[counted].numpy()
    known = sorted(({*names} | {*true}) - {classes})
    for kind, score in SCORES.items():
        for average in AVERAGES:
            expected = score(true, names, labels=known, average=average, zero_division=0)
            assert value(kind(classes, average=average), logits, targets) == pytest.approx(expected)
    matrix = ConfusionMatrix(classes)
    matrix.update(logits, targets)
    whole = sk.confusion_matrix(true, names, labels=range(classes + 1))[:classes]
    np.testing.assert_array_equal(matrix.compute().numpy(), whole[:, :classes])


@pytest.mark.parametrize("labels", [None, 3])
def test_a_nan_is_neither_yes_nor_no(labels):
    shape = (30,) if labels is None else (30, labels)
    logits, targets = label_sample(0, shape)
    logits[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3] = math.nan
    matrix = ConfusionMatrix(num_labels=labels)
    matrix.update(logits, targets)
    columns = [logits <= 0, logits > 0, logits.isnan()]
    expected = torch.stack([(targets == row) & column for row in (0, 1) for column in columns], -1).sum(0)
    expected = expected.view(*shape[1:], 2, 3)
    assert torch.equal(matrix.compute(), expected[..., :2])
    (true_negative, false_positive), (missed, right) = expected[..., :2].movedim((-2, -1), (0, 1))
    recalls = right / (right + missed + expected[..., 1, 2])
    assert value(Recall(num_labels=labels), logits, targets) == pytest.approx(recalls.mean().item())
    precisions = right / (right + false_positive)
    assert value(Precision(num_labels=labels), logits, targets) == pytest.approx(precisions.mean().item())
    assert int(true_negative.sum()) > 0


MAKERS = [
    (lambda: Precision(num_classes=4, average="weighted"), sample(1, (60,), 4)),
    (lambda: F1(num_classes=4), sample(2, (60, 3), 4)),
    (lambda: Recall(num_labels=3, average="micro"), label_sample(3, (60, 3))),
    (lambda: F1(), label_sample(4, (60,))),
    (lambda: ConfusionMatrix(num_classes=4), sample(5, (60,), 4)),
    (lambda: ConfusionMatrix(num_labels=3), label_sample(6, (60, 3))),
]


def as_list(result):
    return result.tolist() if isinstance(result, Tensor) else result


@pytest.mark.parametrize(("make", "data"), MAKERS)
@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.integers(0, 60), max_size=4), ranks=st.integers(1, 3))
def test_the_value_does_not_depend_on_how_the_data_was_split(make, data, cuts, ranks):
    predictions, targets = data
    mask = (torch.arange(targets.numel()) % 5 != 0).view(targets.shape)
    whole, merged, reduced = make(), make(), make()
    whole.update(predictions, targets, mask)
    parts = [make() for _ in range(ranks)]
    for place, (start, end) in enumerate(pairwise([0, *sorted(cuts), 60])):
        parts[place % ranks].update(predictions[start:end], targets[start:end], mask[start:end])
    for part in parts:
        merged.merge(part)
    reduced.load_state(torch.stack([part.state() for part in parts]).sum(0))
    assert whole.state().tolist() == merged.state().tolist()
    assert whole.state().dtype is torch.int64
    assert as_list(whole.compute()) == as_list(merged.compute()) == as_list(reduced.compute())


@pytest.mark.parametrize(("make", "data"), MAKERS)
def test_state_dict_and_reset(make, data):
    metric, copy = make(), make()
    empty = metric.state().tolist()
    assert len(empty) == metric.num_sums
    metric.update(*data)
    copy.load_state_dict(metric.state_dict())
    for other in (metric, copy):
        other.update(*data)
    assert as_list(metric.compute()) == as_list(copy.compute())
    metric.reset()
    assert metric.state().tolist() == empty
    assert copy.state().sum() > 0


@pytest.mark.parametrize(("make", "data"), MAKERS)
def test_update_reads_nothing_from_the_device(make, data):
    """Tensors on the meta device have no values: reading one raises. On a GPU it would make the host wait."""
    data = [one.to("meta") for one in data]
    make().update(*data)
    make().update(*data, torch.ones_like(data[1]))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kind", list(SCORES))
@pytest.mark.parametrize("arguments", [{}, {"num_classes": 3}, {"num_labels": 3}])
def test_nothing_seen_is_nan(kind, arguments, average):
    metric = kind(**arguments, average=average)
    assert math.isnan(metric.compute())
    shape = (2, 3) if "num_labels" in arguments else (2,)
    metric.update(torch.zeros(shape).long(), torch.full(shape, IGNORED))
    metric.update(torch.zeros(shape).long(), torch.zeros(shape).long(), torch.zeros(shape))
    metric.update(torch.zeros(0, *shape[1:]).long(), torch.zeros(0, *shape[1:]).long())
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("kind", list(SCORES))
def test_no_positives_and_none_predicted_is_zero(kind):
    assert value(kind(), torch.full((5,), -1.0), torch.zeros(5).long()) == 0.0


def test_missing_labels_by_nan_mask_of_labels_and_mask_of_samples():
    predictions = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
    targets = torch.tensor([[1.0, math.nan], [0.0, 1.0], [1.0, 1.0]])
    expected = tm.multilabel_confusion_matrix(
        predictions.sigmoid(), targets.nan_to_num(IGNORED).long(), num_labels=2, ignore_index=IGNORED
    )
    assert value(ConfusionMatrix(num_labels=2), predictions, targets).tolist() == expected.tolist()
    filled, there = targets.nan_to_num(0.0), ~targets.isnan()
    assert value(ConfusionMatrix(num_labels=2), predictions, filled, there).tolist() == expected.tolist()
    samples = value(ConfusionMatrix(num_labels=2), predictions, filled, torch.tensor([0, 1, 1]))
    assert samples.tolist() == value(ConfusionMatrix(num_labels=2), predictions[1:], filled[1:]).tolist()


def test_a_label_that_is_never_there_has_no_score_and_no_say():
    predictions, targets = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, IGNORED], [1, IGNORED]])
    metric = F1(num_labels=2)
    assert value(metric, predictions, targets) == 1.0


def test_forms_of_predictions_agree():
    logits, targets = sample(10, (6, 7), 4)
    expected = value(F1(num_classes=4), logits, targets)
    assert value(F1(num_classes=4), logits.argmax(-1), targets) == expected
    assert value(F1(num_classes=4), logits.movedim(-1, 1), targets) == expected
    assert value(F1(num_classes=4, class_dim=1), logits.movedim(-1, 1), targets.int()) == expected

    logits, targets = label_sample(11, (50,))
    expected = value(F1(threshold=0.4), logits, targets)
    two = torch.stack([torch.full_like(logits, 3.0), logits + 3.0], -1)
    assert value(F1(threshold=0.4), logits[:, None], targets) == expected
    assert value(F1(threshold=0.4), two, targets) == pytest.approx(expected)
    assert value(F1(), logits.sigmoid() > 0.4, targets) == pytest.approx(expected)
    assert value(F1(threshold=0.4), logits.bfloat16().float(), targets.float()) == pytest.approx(expected, abs=0.1)


def test_another_ignore_index_and_none():
    predictions, targets = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 1, 2])
    kept = targets != 2
    assert value(Recall(num_classes=3, ignore_index=2), predictions, targets) == value(
        Recall(num_classes=3), predictions[kept], targets[kept]
    )
    with pytest.raises(DataError, match=r"targets hold the class -100, but num_classes is 3 \(0 … 2\)"):
        Recall(num_classes=3, ignore_index=None).update(predictions, torch.tensor([0, 1, -100, 2]))


def test_micro_scores_of_classes_are_accuracy():
    logits, targets = sample(12, (90,), 5)
    accuracy = value(Accuracy(), logits, targets)
    for kind in SCORES:
        assert value(kind(num_classes=5, average="micro"), logits, targets) == pytest.approx(accuracy)


@pytest.mark.parametrize("make", [lambda: F1(num_classes=3), lambda: ConfusionMatrix(num_classes=3)])
@pytest.mark.parametrize(
    ("predictions", "targets", "message"),
    [
        (torch.tensor([0, 3]), torch.tensor([0, 1]), r"predictions hold the class 3, but num_classes is 3"),
        (torch.tensor([0, -1]), torch.tensor([0, 1]), r"predictions hold the class -1"),
        (torch.tensor([0, 1]), torch.tensor([0, 3]), r"targets hold the class 3"),
        (torch.tensor([0, 1]), torch.tensor([0, -1]), r"targets hold the class -1"),
        (torch.zeros(2, 4), torch.tensor([0, 1]), r"have 4 classes, but num_classes is 3; make them equal"),
        (torch.zeros(2), torch.tensor([0, 1]), r"fits class ids \(integers\) only"),
        (torch.zeros(2, 3), torch.zeros(2), r"targets \(2,\) float32 are not class ids"),
        (torch.zeros(2, 3), torch.zeros(5).long(), r"do not fit targets \(5,\)"),
    ],
)
def test_classes_that_do_not_fit_are_one_clear_line(make, predictions, targets, message):
    metric = make()
    with pytest.raises(DataError, match=message):
        metric.update(predictions, targets)
    assert metric.state().sum() == 0


def test_labels_that_do_not_fit_are_one_clear_line():
    with pytest.raises(DataError, match=r"F1: predictions \(2, 3\) float32 do not fit targets \(2,\)"):
        F1().update(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(DataError, match=r"do not fit num_labels 4, their last dimension"):
        F1(num_labels=4).update(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(DataError, match=r"F1: the mask \(3,\) float32 must have the shape of the targets"):
        F1(num_labels=3).update(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 3, "num_labels": 3}, "set num_classes for classes or num_labels for labels, not both"),
        ({"num_classes": 1}, "num_classes is 1; it must be at least 2"),
        ({"num_labels": 0}, "num_labels is 0; it must be at least 1"),
        ({"threshold": 1.0}, "threshold is 1.0; it must be above 0 and below 1"),
        ({"average": "mean"}, "average is 'mean'; it must be one of macro, micro, weighted"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=f"Precision: {message}"):
        Precision(**arguments)


def test_registered_and_exported():
    for name, kind in (("precision", Precision), ("recall", Recall), ("f1", F1)):
        assert lookup("metric", name).factory is kind
        assert issubclass(kind, Metric)
        assert getattr(etude, kind.__name__) is kind
    assert etude.ConfusionMatrix is ConfusionMatrix


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("make", "data"), MAKERS)
def test_on_cuda_an_update_never_waits(make, data):
    predictions, targets = (tensor.cuda() for tensor in data)
    metric, expected = make(), make()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            metric.update(predictions, targets, targets != 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        expected.update(*data, data[1] != 0)
    assert metric.state().tolist() == expected.state().tolist()
