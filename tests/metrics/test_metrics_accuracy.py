"""Accuracy against torchmetrics and a plain count, over shapes, masks, batches and ranks."""

import math
import operator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from etude.config import lookup
from etude.core import ConfigError, DataError
from etude.metrics import Accuracy, Metric

IGNORED = -100


def accuracy_counts(predictions, targets, *, mask=None, **settings):
    """How many elements are right, and how many count."""
    metric = Accuracy(**settings)
    metric.update(predictions, targets, mask)
    return metric.state().unbind()


def sample(seed: int, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """Return logits with the classes in the last dimension, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.2] = IGNORED
    return torch.randn(*shape, classes, generator=generator), targets


def reference(logits: Tensor, targets: Tensor, top_k: int = 1) -> float:
    classes = logits.shape[-1]
    return float(
        multiclass_accuracy(
            logits.reshape(-1, classes),
            targets.reshape(-1),
            num_classes=classes,
            average="micro",
            top_k=top_k,
            ignore_index=IGNORED,
        )
    )


def value(logits: Tensor, targets: Tensor, **arguments) -> float:
    accuracy = Accuracy(**arguments)
    accuracy.update(logits, targets)
    return accuracy.compute()


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("shape", [(64,), (8, 9), (4, 3, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_torchmetrics_with_the_classes_last(seed, shape, top_k):
    logits, targets = sample(seed, shape, classes=6)
    assert value(logits, targets, top_k=top_k) == pytest.approx(reference(logits, targets, top_k), abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("shape", [(5, 9), (4, 3, 2)])
def test_equals_torchmetrics_with_the_classes_second(shape, top_k):
    logits, targets = sample(2, shape, classes=6)
    moved = logits.movedim(-1, 1)
    assert value(moved, targets, top_k=top_k) == pytest.approx(reference(logits, targets, top_k), abs=1e-6)


def test_class_ids_count_like_their_logits():
    logits, targets = sample(3, (7, 4), classes=5)
    assert value(logits.argmax(-1), targets) == value(logits, targets)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("classes_last", [True, False])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_an_element_with_a_nan_is_wrong(top_k, classes_last, share):
    logits, targets = sample(3, (6, 7, 5), 4)
    nan = torch.rand(logits.shape, generator=torch.Generator().manual_seed(4)) < share
    known = ~nan.any(-1)
    right = sum(
        int(target) in logits[place].topk(top_k).indices
        for place in known.nonzero().tolist()
        if (target := targets[(*place,)]) != IGNORED
        for place in [(*place,)]
    )
    given = logits.masked_fill(nan, math.nan)
    given = given if classes_last else given.movedim(-1, 1)
    found = accuracy_counts(given, targets, top_k=top_k, class_dim=-1 if classes_last else 1)
    assert [int(count) for count in found] == [right, int((targets != IGNORED).sum())]


def test_counts_are_those_of_a_python_loop_and_int64():
    logits, targets = sample(4, (50,), classes=3)
    mask = torch.arange(50) % 3
    correct, count = accuracy_counts(logits, targets, mask=mask)
    rows = [
        (row, target) for row, target, m in zip(logits.tolist(), targets.tolist(), mask.tolist(), strict=True) if m
    ]
    rows = [(row, target) for row, target in rows if target != IGNORED]
    assert int(count) == len(rows)
    assert int(correct) == sum(max(range(3), key=row.__getitem__) == target for row, target in rows)
    assert correct.dtype is count.dtype is torch.int64


def test_without_ignore_index_every_element_counts():
    targets = torch.tensor([0, IGNORED])
    assert [int(n) for n in accuracy_counts(torch.tensor([0, 1]), targets, ignore_index=None)] == [1, 2]
    mask = torch.tensor([True, False])
    assert [int(n) for n in accuracy_counts(torch.tensor([0, 1]), targets, mask=mask, ignore_index=None)] == [1, 1]
    assert [int(n) for n in accuracy_counts(torch.tensor([0, 1]), targets, ignore_index=0)] == [0, 1]


def test_equal_logits_are_not_right_for_every_class():
    """A collapsed model that gives all classes the same score must not look perfect."""
    targets = torch.arange(10)
    assert value(torch.zeros(10, 10), targets) == pytest.approx(0.1)
    assert value(torch.zeros(10, 10), targets, top_k=3) == pytest.approx(0.3)


@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(0, 60), max_size=4), ranks=st.integers(1, 3))
def test_the_value_does_not_depend_on_how_the_data_was_split(cuts, ranks):
    logits, targets = sample(5, (60,), classes=4)
    mask = torch.arange(60) % 5 != 0
    whole = Accuracy()
    whole.update(logits, targets, mask)
    parts = [Accuracy() for _ in range(ranks)]
    edges = [0, *sorted(cuts), 60]
    for place, (start, end) in enumerate(pairwise(edges)):
        parts[place % ranks].update(logits[start:end], targets[start:end], mask[start:end])

    reduced = Accuracy()
    reduced.load_state(torch.stack([part.state() for part in parts]).sum(0))
    merged = Accuracy()
    for part in parts:
        merged.merge(part)
    assert whole.compute() == reduced.compute() == merged.compute()
    assert whole.state().tolist() == merged.state().tolist()


def test_counts_stay_exact_beyond_what_floats_can_count():
    accuracy = Accuracy()
    accuracy.load_state(torch.tensor([2**53, 2**53 + 1]))
    accuracy.update(torch.tensor([1, 1]), torch.tensor([1, 1]))
    assert accuracy.state().tolist() == [2**53 + 2, 2**53 + 3]


def test_reset_and_state_dict():
    accuracy = Accuracy()
    assert math.isnan(accuracy.compute())
    accuracy.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
    copy = Accuracy()
    copy.load_state_dict(accuracy.state_dict())
    copy.update(torch.tensor([1]), torch.tensor([1]))
    assert (accuracy.compute(), copy.compute()) == (0.5, pytest.approx(2 / 3))
    accuracy.reset()
    assert math.isnan(accuracy.compute())


def test_batches_seen_in_inference_mode_and_outside_add_up():
    accuracy = Accuracy()
    with torch.inference_mode():
        accuracy.update(torch.tensor([1]), torch.tensor([1]))
    accuracy.update(torch.tensor([1]), torch.tensor([0]))
    assert accuracy.compute() == 0.5


def test_update_reads_nothing_from_the_device():
    """Tensors on the meta device have no values: reading one raises. On a GPU it would make the host wait."""
    logits, targets = (one.to("meta") for one in sample(6, (8, 3), classes=4))
    Accuracy().update(logits, targets, torch.ones_like(targets))
    Accuracy(top_k=2).update(logits, targets)


@pytest.mark.parametrize(
    ("predictions", "targets", "arguments", "error", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(5), {}, DataError, r"predictions \(4, 3\) float32 do not fit targets \(5,\)"),
        (torch.zeros(4), torch.zeros(4), {}, DataError, r"fits class ids \(integers\) and top_k 1 only"),
        (torch.zeros(4).long(), torch.zeros(4), {"top_k": 2}, DataError, "top_k 1 only"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 3), {}, ConfigError, r"dimension 1 or 2; set class_dim"),
        (torch.zeros(2, 3), torch.zeros(2), {"class_dim": 0}, DataError, r"for the classes, number 0"),
        (torch.zeros(2, 3), torch.zeros(2), {"class_dim": 7}, DataError, r"for the classes, number 7"),
        (torch.zeros(2, 3), torch.zeros(2), {"top_k": 4}, ConfigError, "top_k is 4 but there are 3 classes"),
        (torch.zeros(2, 3), torch.zeros(2), {"mask": torch.ones(3)}, DataError, "must have the shape of the targets"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(predictions, targets, arguments, error, message):
    with pytest.raises(error, match=message):
        accuracy_counts(predictions, targets.long(), **arguments)


def test_class_dim_settles_an_ambiguous_shape():
    logits = torch.zeros(1, 2, 2)
    logits[0, 1, 0] = 1.0  # classes last: position 1 says class 0; classes second: position 0 says class 1
    targets = torch.tensor([[1, 0]])
    assert value(logits, targets, class_dim=-1) == 0.5
    assert value(logits, targets, class_dim=2) == 0.5
    assert value(logits, targets, class_dim=1) == 1.0


def test_top_k_below_one_is_refused():
    with pytest.raises(ConfigError, match="top_k is 0; it must be at least 1"):
        Accuracy(top_k=0)


def test_registered_and_open_to_other_metrics():
    assert lookup("metric", "accuracy").factory is Accuracy

    class MeanError(Metric):
        num_sums = 2
        dtype = torch.float64

        def batch_sums(self, predictions, targets, mask):
            return torch.stack([(predictions - targets).abs().sum(), torch.tensor(float(targets.numel()))])

        def value(self, sums):
            return operator.truediv(*sums)

    metric = MeanError()
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    metric.update(torch.tensor([4.0]), torch.tensor([1.0]))
    assert metric.compute() == 2.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_cuda_an_update_never_waits():
    logits, targets = (tensor.cuda() for tensor in sample(7, (16, 5), classes=6))
    accuracy, best_of_two = Accuracy(), Accuracy(top_k=2)
    accuracy.load_state(torch.zeros(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for metric in (accuracy, best_of_two):
            metric.update(logits, targets, targets != 0)
            metric.update(logits, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counted = [accuracy_counts(logits.cpu(), targets.cpu(), mask=mask) for mask in (targets.cpu() != 0, None)]
    assert accuracy.state().tolist() == [sum(int(pair[i]) for pair in counted) for i in (0, 1)]
