"""Binary and multi-label cross entropy against the plain formula in float64 and against torch; missing labels."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from etude.config import lookup
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.losses import BinaryLoss, MultiLabelLoss, binary_cross_entropy, multi_label_bce
from etude.losses.binary import binary_cross_entropy_term, multi_label_bce_term

NAN = math.nan


def reference(logits, targets, weights=None, pos_weight=1.0):
    """Σ w·loss and Σ w over the labels that are there, one by one in Python's floats."""
    total = count = 0.0
    weights = torch.ones_like(targets, dtype=torch.float64) if weights is None else weights.expand(targets.shape)
    for x, t, w in zip(
        logits.flatten().tolist(), targets.flatten().tolist(), weights.flatten().tolist(), strict=True
    ):
        if w == 0 or t == -100 or math.isnan(t):
            continue
        log_p, log_q = -math.log1p(math.exp(-x)), -math.log1p(math.exp(x))
        total -= w * (pos_weight * t * log_p + (1 - t) * log_q)
        count += w
    return total, count


def sample(seed: int, shape: tuple[int, ...], kind: str) -> tuple[Tensor, Tensor]:
    """Return logits and labels of which some are missing."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * 4
    missing = torch.rand(shape, generator=generator) < 0.3
    if kind == "integers":
        return logits, torch.randint(2, shape, generator=generator).masked_fill(missing, -100)
    soft = torch.rand(shape, generator=generator)
    targets = soft if kind == "soft" else soft.round()
    return logits, targets.masked_fill(missing, -100.0 if kind == "ignored" else NAN)


def masks(seed: int, shape: tuple[int, ...], kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed + 1000)
    values = torch.rand(shape, generator=generator)
    return {
        "none": None,
        "bool": values > 0.4,
        "long": (values > 0.4).long(),
        "float": values.masked_fill(values < 0.3, 0),
    }[kind]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(7,), (1,), (0,), (4, 3), (2, 3, 5)]),
    kind=st.sampled_from(["integers", "soft", "nan", "ignored"]),
    mask=st.sampled_from(["none", "bool", "long", "float"]),
    pos_weight=st.sampled_from([None, 0.5, 3.0]),
)
def test_sum_and_count_are_those_of_the_plain_formula(seed, shape, kind, mask, pos_weight):
    logits, targets = sample(seed, shape, kind)
    given_mask = masks(seed, shape, mask)
    weights = None if given_mask is None else given_mask.double()
    total, count = reference(logits, targets, weights, pos_weight or 1.0)
    term = binary_cross_entropy_term(logits, targets, given_mask, pos_weight)
    assert term.sum.item() == pytest.approx(total, rel=2e-6)
    assert float(term.count) == pytest.approx(count, rel=1e-6)
    mean = binary_cross_entropy(logits, targets, given_mask, pos_weight)
    assert mean.shape == ()
    assert mean.item() == pytest.approx(total / count if count else 0.0, rel=2e-6)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(6, 3), (1, 3), (2, 4, 3)]),
    kind=st.sampled_from(["integers", "soft", "nan"]),
    mask=st.sampled_from(["none", "bool", "float", "samples"]),
    label_weights=st.sampled_from([None, [1.0, 2.0, 0.5], [0.0, 1.0, 3.0], [2.0, 2.0, 2.0]]),
)
def test_multi_label_weighs_sum_and_count_alike(seed, shape, kind, mask, label_weights):
    logits, targets = sample(seed, shape, kind)
    given_mask = masks(seed, shape[:-1], "bool") if mask == "samples" else masks(seed, shape, mask)
    weights = torch.ones(shape, dtype=torch.float64)
    if given_mask is not None:
        weights = weights * (given_mask[..., None] if mask == "samples" else given_mask)
    given_weights = None if label_weights is None else torch.tensor(label_weights)
    if given_weights is not None:
        weights = weights * given_weights
    total, count = reference(logits, targets, weights)
    term = multi_label_bce_term(logits, targets, given_weights, given_mask)
    assert term.sum.item() == pytest.approx(total, rel=2e-6)
    assert float(term.count) == pytest.approx(count, rel=1e-5)
    value = multi_label_bce(logits, targets, given_weights, given_mask).item()
    assert value == pytest.approx(total / count if count else 0.0, rel=2e-6)


def test_without_missing_labels_it_is_torch_with_its_gradient():
    logits, targets = torch.randn(5, 4, requires_grad=True), torch.randint(2, (5, 4))
    expected = F.binary_cross_entropy_with_logits(logits, targets.float())
    torch.testing.assert_close(binary_cross_entropy(logits, targets), expected)
    torch.testing.assert_close(multi_label_bce(logits, targets.bool()), expected)
    ours, theirs = (torch.autograd.grad(loss, logits)[0] for loss in (multi_label_bce(logits, targets), expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(4,), (1,), (), (5, 1), (5, 4)])
def test_the_weight_of_positives_has_any_shape_that_torch_takes(shape):
    logits, targets, weight = torch.randn(5, 4), torch.randint(2, (5, 4)), torch.rand(shape) + 0.5
    expected = F.binary_cross_entropy_with_logits(logits, targets.float(), pos_weight=weight)
    torch.testing.assert_close(multi_label_bce(logits, targets, pos_weight=weight), expected)
    torch.testing.assert_close(binary_cross_entropy(logits, targets, pos_weight=weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_far_logits_stay_finite(dtype):
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
    term = binary_cross_entropy_term(logits, torch.tensor([1, 0, 0, 1]))
    assert term.sum.dtype is torch.float32
    assert term.sum.item() == pytest.approx(2 * logits[0].item())
    assert torch.autograd.grad(term.sum, logits)[0].tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("target", [0, 1])
def test_small_losses_and_gradients_keep_their_digits(target):
    """A label that is learned well has a loss near 0; differences of large numbers would lose it."""
    logits = torch.tensor([5.0, 12.0, 16.0, 25.0, 60.0]) * (1 if target else -1)
    logits.requires_grad_()
    for logit in logits:
        loss = binary_cross_entropy(logit, torch.tensor(target))
        assert loss.item() == pytest.approx(math.log1p(math.exp(-abs(logit.item()))), rel=1e-6)
        (gradient,) = torch.autograd.grad(loss, logits)
        slope = (1 - 2 * target) / (1 + math.exp(abs(logit.item())))
        assert gradient.sum().item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, NAN])
@pytest.mark.parametrize("how", ["nan", "ignored", "mask", "weight"])
def test_logits_of_missing_labels_reach_neither_the_sum_nor_a_gradient(bad, how):
    logits = torch.tensor([[1.0, bad]], requires_grad=True)
    targets = torch.tensor([[1.0, {"nan": NAN, "ignored": -100.0}.get(how, 1.0)]])
    mask = torch.tensor([[1, 0]]) if how == "mask" else None
    weights = torch.tensor([1.0, 0.0]) if how == "weight" else None
    term = multi_label_bce_term(logits, targets, weights, mask)
    assert term.sum.item() == pytest.approx(math.log1p(math.exp(-1)))
    assert float(term.count) == 1
    (gradient,) = torch.autograd.grad(term.sum, logits)
    assert gradient[0, 1] == 0
    assert gradient[0, 0].item() == pytest.approx(-1 / (1 + math.e))


def test_all_labels_missing_is_a_loss_of_zero_with_count_zero():
    logits = torch.randn(3, 2, requires_grad=True)
    for targets in (torch.full((3, 2), NAN), torch.full((3, 2), -100)):
        term = multi_label_bce_term(logits, targets, torch.tensor([1.0, 2.0]))
        assert (term.sum.item(), float(term.count)) == (0, 0)
        loss = multi_label_bce(logits, targets)
        assert loss.item() == 0
        assert torch.autograd.grad(loss, logits)[0].abs().sum() == 0


def test_a_head_of_one_output_fits_labels_without_that_dimension():
    logits, targets = torch.randn(6, 1), torch.randint(2, (6,))
    assert binary_cross_entropy(logits, targets) == binary_cross_entropy(logits[:, 0], targets)


def test_where_no_label_can_be_missing_the_count_is_a_plain_number():
    logits = torch.randn(2, 3)
    assert binary_cross_entropy_term(logits, torch.ones(2, 3, dtype=torch.bool)).count == 6
    assert type(binary_cross_entropy_term(logits, torch.ones(2, 3), ignore_index=None).count) is int
    with pytest.raises(DataError, match="found nan"):
        binary_cross_entropy(logits, torch.full((2, 3), NAN), ignore_index=None)


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.tensor([1, -1]), DataError, "found -1: map the labels to 0 and 1"),
        (torch.tensor([0.0, 2.0]), DataError, "found 2"),
        (torch.tensor([0, -100]).int() - 1, DataError, "found -101"),
        (torch.zeros(3), TrainingError, r"labels of shape \(3,\) do not fit the model's output of shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(targets, error, message):
    with pytest.raises(error, match=message):
        binary_cross_entropy(torch.zeros(2), targets)


def test_class_indices_mask_and_weights_that_do_not_fit():
    with pytest.raises(TrainingError, match="class indices need cross entropy"):
        multi_label_bce(torch.zeros(2, 3), torch.tensor([1, 0]))
    with pytest.raises(TrainingError, match=r"a mask of shape \(3,\) does not fit labels of shape \(2, 3\)"):
        multi_label_bce(torch.zeros(2, 3), torch.zeros(2, 3), mask=torch.ones(3))
    with pytest.raises(TrainingError, match=r"2 label_weights.*one per label"):
        multi_label_bce(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2))


class TestStrategies:
    def test_registered(self):
        assert lookup("loss", "binary_cross_entropy").factory is BinaryLoss
        assert lookup("loss", "multi_label").factory is MultiLabelLoss

    @pytest.mark.parametrize("kind", ["integers", "nan", "soft"])
    @pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.5]])
    def test_terms_counts_and_accuracy(self, kind, weights):
        logits, labels = sample(5, (40, 3), kind)
        strategy = MultiLabelLoss(label_weights=weights)
        terms = strategy.terms({"logits": logits}, (torch.zeros(40, 1), labels), metrics=True)
        given = None if weights is None else torch.tensor(weights)
        total, count = reference(logits, labels, given)
        assert terms["loss"].sum.item() == pytest.approx(total, rel=1e-5)
        assert float(terms["loss"].count) == pytest.approx(count)
        assert float(strategy.counts((torch.zeros(40, 1), labels))["loss"]) == float(terms["loss"].count)
        there = (labels != -100) & ~labels.float().isnan()
        assert float(terms["accuracy"].count) == there.sum()
        right = sum((x > 0) == (t > 0.5) for x, t in zip(logits[there].tolist(), labels[there].tolist(), strict=True))
        assert float(terms["accuracy"].sum) == right
        assert terms["accuracy"].weight == 0
        assert list(strategy.terms(logits, (None, labels), metrics=False)) == ["loss"]

    @settings(deadline=None, max_examples=20)
    @given(cuts=st.lists(st.integers(0, 12), max_size=3), seed=st.integers(0, 100))
    def test_micro_batches_add_up_to_the_batch(self, cuts, seed):
        logits, labels = sample(seed, (12, 3), "nan")
        logits.requires_grad_()
        strategy = MultiLabelLoss(label_weights=[1.0, 2.0, 0.25], pos_weight=[1.0, 4.0, 2.0])
        edges = [0, *sorted(cuts), 12]
        parts = [strategy.terms(logits[a:b], (None, labels[a:b]), metrics=False)["loss"] for a, b in pairwise(edges)]
        count = sum(float(part.count) for part in parts)
        loss = sum(part.sum for part in parts) / (count or 1)
        whole = strategy.compute_loss(logits, (None, labels))
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, whole)))

    def test_binary_head_with_and_without_its_last_dimension(self):
        logits, labels = sample(1, (20,), "integers")
        for output in (logits, logits[:, None], (logits[:, None], torch.tensor(0.0))):
            terms = BinaryLoss(pos_weight=2.0).terms(output, {"x": logits, "labels": labels}, metrics=True)
            total, count = reference(logits, labels, pos_weight=2.0)
            assert terms["loss"].sum.item() == pytest.approx(total, rel=1e-5)
            assert float(terms["accuracy"].count) == count

    def test_small_integers_and_bools_are_labels(self):
        logits = torch.tensor([1.0, -2.0, 3.0])
        wide = BinaryLoss().compute_loss(logits, (None, torch.tensor([1, 0, 0])))
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.float16):
            assert BinaryLoss().compute_loss(logits, (None, torch.tensor([1, 0, 0]).to(dtype))) == wide

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: BinaryLoss(pos_weight=0.0), "pos_weight is 0.0; it must be above 0"),
            (lambda: BinaryLoss(pos_weight=NAN), "pos_weight is nan"),
            (lambda: MultiLabelLoss(label_weights=[1.0, -1.0]), r"label_weights\[1\] is -1.0"),
            (lambda: MultiLabelLoss(label_weights=[NAN]), r"label_weights\[0\] is nan"),
            (lambda: MultiLabelLoss(pos_weight=[math.inf]), r"pos_weight\[0\] is inf"),
        ],
    )
    def test_weights_that_cannot_be(self, make, message):
        with pytest.raises(ConfigError, match=message):
            make()

    def test_too_few_weights(self):
        with pytest.raises(TrainingError, match=r"there are 2 label_weights, but .* has 3 labels"):
            MultiLabelLoss(label_weights=[1.0, 1.0]).compute_loss(torch.zeros(4, 3), (None, torch.zeros(4, 3)))

    def test_no_labels(self):
        with pytest.raises(TrainingError, match="MultiLabelLoss needs a tensor of labels"):
            MultiLabelLoss().compute_loss(torch.zeros(4, 3), torch.zeros(4, 3))
