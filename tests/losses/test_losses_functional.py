"""Cross entropy against the formula written out in float64, over masks, smoothing, weights, shapes and types."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from etude.core.errors import DataError, TrainingError
from etude.losses import cross_entropy, mean_of
from etude.losses.binary import binary_accuracy_term
from etude.losses.functional import accuracy_term, cross_entropy_term
from etude.losses.linear import linear_cross_entropy_terms
from etude.trainer.loops.functions import FunctionTask

SHAPES = [(1,), (7,), (3, 5), (2, 1), (2, 3, 5)]


def reference(logits, targets, weight_of_element, smoothing=0.0, class_weights=None):
    """Σ and count by plain loops over the elements, in float64; classes last."""
    num_classes = logits.shape[-1]
    logits, targets = logits.detach().double().reshape(-1, num_classes), targets.reshape(-1)
    class_weights = torch.ones(num_classes).double() if class_weights is None else class_weights.double()
    total = count = 0.0
    for row, label, weight in zip(logits, targets.tolist(), weight_of_element.reshape(-1).tolist(), strict=True):
        if weight == 0:
            continue
        log_probs = row - torch.log(torch.exp(row).sum())
        hard = -class_weights[label] * log_probs[label]
        smooth = -(class_weights * log_probs).sum() / num_classes
        total += weight * ((1 - smoothing) * hard + smoothing * smooth).item()
        count += weight * class_weights[label].item()
    return total, count


def make(shape, num_classes=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, num_classes, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(num_classes, shape, generator=generator), generator


@pytest.mark.parametrize("mask_kind", ["none", "bool", "int", "float", "ignored", "ignored and masked"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_and_count_equal_the_formula(shape, weighted, smoothing, mask_kind):
    logits, targets, generator = make(shape)
    class_weights = torch.rand(6, generator=generator) + 0.1 if weighted else None
    element = torch.ones(shape)
    mask = None
    given = targets
    if "ignored" in mask_kind:
        ignored = torch.rand(shape, generator=generator) < 0.4
        given = targets.masked_fill(ignored, -100)
        element = element * ~ignored
    if mask_kind in ("bool", "int", "ignored and masked"):
        mask = torch.rand(shape, generator=generator) < 0.6
        element = element * mask
        mask = mask.int() if mask_kind == "int" else mask
    elif mask_kind == "float":
        mask = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.7)
        element = element * mask
    term = cross_entropy_term(logits, given, mask, smoothing, class_weights=class_weights)
    total, count = reference(logits, targets, element, smoothing, class_weights)
    assert term.sum.item() == pytest.approx(total, rel=2e-6, abs=1e-6)
    assert float(term.count) == pytest.approx(count, rel=2e-6, abs=1e-7)
    mean = cross_entropy(logits, given, mask, smoothing, class_weights=class_weights)
    assert mean.item() == pytest.approx(total / count if count else 0.0, rel=4e-6, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_is_torchs(smoothing, weighted):
    logits, targets, generator = make((4, 9), dtype=torch.float64)
    weights = torch.rand(6, generator=generator).double() if weighted else None
    targets[1, 4:] = -100
    ours = torch.autograd.grad(
        cross_entropy(logits, targets, None, smoothing, class_weights=weights), logits, retain_graph=True
    )[0]
    theirs = torch.autograd.grad(
        F.cross_entropy(logits.movedim(-1, 1), targets, weights, label_smoothing=smoothing), logits
    )[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_summed_in_float32(dtype, tolerance, autocast):
    logits, targets, _ = make((64, 33), dtype=dtype)
    total, count = reference(logits, targets, torch.ones(64, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        term = cross_entropy_term(logits, targets)
    assert term.sum.dtype == torch.float32
    assert float(term.count) == count
    assert term.sum.item() == pytest.approx(total, rel=1e-5)  # a sum in half precision would be off by far more
    (gradient,) = torch.autograd.grad(term.sum, logits)
    exact = (torch.softmax(logits.detach().double(), -1) - F.one_hot(targets, 6)).to(torch.float64)
    torch.testing.assert_close(gradient.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("ignore_index", [None, -100, 255])
def test_labels_of_any_integer_type(dtype, ignore_index):
    logits, targets, _ = make((3, 5))
    given = targets.to(dtype)
    counted = torch.ones(3, 5)
    if ignore_index == 255:
        given[0, :2], counted[0, :2] = 255, 0
    term = cross_entropy_term(logits, given, ignore_index=ignore_index)
    total, count = reference(logits, targets, counted)
    assert term.sum.item() == pytest.approx(total, rel=1e-6)
    assert float(term.count) == count
    masked = cross_entropy_term(logits, given, torch.ones(3, 5, dtype=torch.bool), ignore_index=ignore_index)
    assert float(masked.count) == count


def test_without_mask_and_ignored_label_the_count_is_a_number():
    logits, targets, _ = make((4, 5))
    assert cross_entropy_term(logits, targets, ignore_index=None).count == 20
    assert isinstance(cross_entropy_term(logits, targets).count, torch.Tensor)


@pytest.mark.parametrize("class_dim", [-1, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_class_probabilities(class_dim, masked):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    targets = torch.softmax(torch.randn(3, 4, 5, generator=generator, dtype=torch.float64), class_dim)
    elements = -(targets * torch.log_softmax(logits, class_dim)).sum(class_dim)
    mask = torch.rand(elements.shape, generator=generator) < 0.5 if masked else torch.ones(elements.shape)
    term = cross_entropy_term(logits, targets, mask if masked else None, class_dim=class_dim)
    torch.testing.assert_close(term.sum, (elements * mask).sum())
    assert float(term.count) == float(mask.sum())


def test_classes_in_dimension_one():
    logits, targets, _ = make((2, 3, 5))
    torch_style = cross_entropy_term(logits.movedim(-1, 1), targets, class_dim=1)
    classes_last = cross_entropy_term(logits, targets)
    torch.testing.assert_close(torch_style.sum, classes_last.sum)
    assert float(torch_style.count) == float(classes_last.count) == 30


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_left_to_count_is_zero_with_zero_gradient(mask_dtype, smoothing):
    logits, targets, _ = make((2, 3))
    for term in (
        cross_entropy_term(logits, targets, torch.zeros(2, 3, dtype=mask_dtype), smoothing),
        cross_entropy_term(logits, F.one_hot(targets, 6).float(), torch.zeros(2, 3, dtype=mask_dtype), smoothing),
        cross_entropy_term(logits[1:], torch.full((1, 3), -100), None, smoothing),
    ):
        assert term.sum.item() == 0
        assert float(term.count) == 0
        assert mean_of(term).item() == 0
        (gradient,) = torch.autograd.grad(mean_of(term), logits)
        assert gradient.eq(0).all()


def test_parts_add_up_to_the_whole():
    logits, targets, generator = make((12, 7), dtype=torch.float64)
    mask = torch.rand(12, 7, generator=generator) < 0.5
    whole = cross_entropy_term(logits, targets, mask, 0.1)
    parts = [cross_entropy_term(logits[i : i + 4], targets[i : i + 4], mask[i : i + 4], 0.1) for i in (0, 4, 8)]
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    assert sum(float(part.count) for part in parts) == float(whole.count)


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
@pytest.mark.parametrize("ignore", [None, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_out_of_range_is_named(shape, ignore, smoothing):
    logits, targets, _ = make(shape, num_classes=10)
    targets.view(-1)[3] = 12
    expected = r"^labels out of range: found 12, but the model's output has 10 classes \(0 … 9\)$"
    with pytest.raises(DataError, match=expected):
        cross_entropy_term(logits, targets, None, smoothing, ignore_index=ignore)
    with pytest.raises(DataError, match="found 12"):
        cross_entropy_term(logits, targets, torch.ones(shape), smoothing, ignore_index=ignore)


def test_a_label_out_of_range_in_an_image():
    with pytest.raises(DataError, match="found 3, but the model's output has 3 classes"):
        cross_entropy_term(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 3), class_dim=1)


def test_minus_100_without_ignore_index_is_not_swallowed():
    logits, targets, _ = make((4,))
    targets[2] = -100
    with pytest.raises(DataError, match=r"found -100.*set ignore_index: -100"):
        cross_entropy_term(logits, targets, ignore_index=None)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (
            (4, 10),
            torch.zeros(4, 1, dtype=torch.long),
            r"labels of shape \(4, 1\).*\(4, 10\).*expected \(4,\).*squeeze",
        ),
        ((4, 10), torch.zeros(3, dtype=torch.long), r"labels of shape \(3,\).*expected \(4,\)"),
        ((4, 10), torch.zeros(4), r"floating-point labels of shape \(4,\).*indices are integers of shape \(4,\)"),
        ((4, 10), torch.zeros(4, 10, dtype=torch.long), r"expected \(4,\).*floating-point probabilities"),
        ((2, 5, 10), torch.zeros(5, 2, dtype=torch.long), r"labels of shape \(5, 2\).*expected \(2, 5\)"),
        ((), torch.zeros(1, dtype=torch.long), "a single number"),
    ],
)
def test_shapes_that_do_not_fit(logits, targets, message):
    with pytest.raises(TrainingError, match=message):
        cross_entropy_term(torch.zeros(logits), targets)


def test_masks_and_weights_that_do_not_fit():
    logits, targets, _ = make((2, 3))
    for mask in (torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4)):
        with pytest.raises(TrainingError, match=r"a mask of shape \(2, 4\) does not fit labels of shape \(2, 3\)"):
            cross_entropy_term(logits, targets, mask)
    for mask in (torch.ones(2), torch.ones(3, 2), torch.ones(6)):
        with pytest.raises(TrainingError, match=rf"a mask of shape {re.escape(str(tuple(mask.shape)))} does not fit"):
            cross_entropy_term(logits, logits.detach(), mask)
    with pytest.raises(TrainingError, match="there are 2 class weights, but the model's output has 6 classes"):
        cross_entropy_term(logits, targets, class_weights=torch.ones(2))


def test_other_errors_of_torch_are_not_disguised():
    logits, targets, _ = make((4,))
    with pytest.raises(RuntimeError) as caught:
        cross_entropy_term(logits.to("meta"), targets)
    assert not isinstance(caught.value, TrainingError)


@pytest.mark.parametrize("ignore_index", [-100, 0, 2])
def test_accuracy_counts_the_largest_logit_where_the_label_counts(ignore_index):
    logits, targets, _ = make((5, 40))
    targets[:, ::3] = ignore_index
    counted = targets != ignore_index
    term = accuracy_term(logits, targets, int(counted.sum()), ignore_index)
    right = sum(
        int(row.argmax() == label)
        for row, label in zip(logits.view(-1, 6), targets.view(-1), strict=True)
        if label != ignore_index
    )
    assert float(term.sum) == right > 0
    assert term.weight == 0
    assert not term.sum.requires_grad


@pytest.mark.parametrize("kind", ["logits", "fused", "binary", "functions"])
def test_a_nan_among_the_logits_is_never_right(kind):
    """Every way in which a loss counts its accuracy; a NaN is the largest number for argmax, and no number above 0."""
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(60, 3, generator=draw), torch.randint(3, (60,), generator=draw)
    nan = torch.rand(60, 3, generator=draw) < 0.2
    if kind == "binary":
        targets = torch.randint(2, (60, 3), generator=draw)
        right = int(((logits > 0) == (targets == 1))[~nan].sum())
    else:
        right = int((logits.argmax(1) == targets)[~nan.any(1)].sum())
    given = logits.masked_fill(nan, math.nan)
    if kind == "logits":
        found = accuracy_term(given, targets, 60)
    elif kind == "fused":
        found = linear_cross_entropy_terms(given, torch.eye(3), targets, metrics=True)["accuracy"]
    elif kind == "binary":
        found = binary_accuracy_term(given, targets)
    else:
        task = FunctionTask(lambda x: x, F.cross_entropy)
        found = task(None, (given, targets), metrics=True)["accuracy"]
    assert float(found.sum) == right > 0
    assert float(found.count) == targets.numel()
