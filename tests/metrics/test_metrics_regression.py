"""Metrics of regression and of probabilities against scikit-learn, torchmetrics and the plain formula."""

import math
from itertools import pairwise

import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
import torchmetrics.functional.classification as tm
from hypothesis import given, settings, strategies as st

from etude.core import DataError
from etude.metrics import MAE, MSE, R2, RMSE, CalibrationError, Perplexity, Spearman

PEERS = {
    MAE: sk.mean_absolute_error,
    MSE: sk.mean_squared_error,
    R2: sk.r2_score,
    RMSE: lambda targets, predictions: math.sqrt(sk.mean_squared_error(targets, predictions)),
}


def fed(metric, predictions, targets, cuts=()):
    for start, end in pairwise([0, *sorted(cuts), len(targets)]):
        metric.update(predictions[start:end], targets[start:end])
    return metric.compute()


@pytest.mark.parametrize("kind", PEERS)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 50),
    outputs=st.sampled_from([None, 1, 3]),
    offset=st.sampled_from([0.0, 1e6]),
    cuts=st.lists(st.integers(0, 50), max_size=3),
)
def test_equals_scikit_learn_for_any_split_and_offset(kind, seed, count, outputs, offset, cuts):
    generator = torch.Generator().manual_seed(seed)
    shape = (count,) if outputs is None else (count, outputs)
    targets = torch.randn(shape, generator=generator, dtype=torch.float64) + offset
    predictions = targets + 0.3 * torch.randn(shape, generator=generator)
    expected = PEERS[kind](targets.numpy(), predictions.numpy())
    cuts = [min(cut, count) for cut in cuts]
    assert fed(kind(), predictions, targets, cuts) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    one, other = kind(), kind()
    fed(one, predictions[:1], targets[:1])
    fed(other, predictions[1:], targets[1:])
    one.merge(other)
    assert one.compute() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", PEERS)
def test_missing_labels_nan_predictions_and_nothing(kind):
    targets, predictions = torch.tensor([1.0, math.nan, 3.0, 5.0]), torch.tensor([1.5, 2.0, 3.0, 4.0])
    there = ~targets.isnan()
    assert fed(kind(), predictions, targets) == pytest.approx(fed(kind(), predictions[there], targets[there]))
    assert fed(kind(), predictions[:, None], targets) == fed(kind(), predictions, targets)
    predictions[0] = math.nan
    assert math.isnan(fed(kind(), predictions, targets))
    assert math.isnan(kind().compute())
    with pytest.raises(DataError, match=r"\(4, 3\)"):
        kind().update(torch.zeros(4, 3), torch.zeros(4))


def test_constant_labels_are_as_in_scikit_learn():
    for predictions in (torch.ones(3), torch.tensor([1.0, 1.0, 2.0])):
        assert fed(R2(), predictions, torch.ones(3)) == sk.r2_score(torch.ones(3), predictions)
    assert math.isnan(fed(R2(), torch.ones(1), torch.ones(1)))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40), cut=st.integers(0, 40), second=st.booleans())
def test_perplexity_is_that_of_the_mean_cross_entropy(seed, count, cut, second):
    generator = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(count, 7, 5, generator=generator), torch.randint(5, (count, 7), generator=generator)
    targets[torch.rand(count, 7, generator=generator) < 0.3] = -100
    targets[0, 0] = 1
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).exp().item()
    shaped = logits.movedim(-1, 1) if second else logits
    assert fed(Perplexity(), shaped, targets, [min(cut, count)]) == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), count=st.integers(1, 60), cut=st.integers(0, 60), bins=st.sampled_from([5, 15]))
def test_calibration_equals_torchmetrics(seed, count, cut, bins):
    generator = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(count, 4, generator=generator), torch.randint(4, (count,), generator=generator)
    targets[1:][torch.rand(count - 1, generator=generator) < 0.2] = -100
    expected = tm.multiclass_calibration_error(
        logits.softmax(1), targets, num_classes=4, n_bins=bins, ignore_index=-100
    )
    found = fed(CalibrationError(bins), logits, targets, [min(cut, count)])
    assert found == pytest.approx(expected.item(), abs=1e-6)
    binary = (targets == 1).long()
    expected = tm.binary_calibration_error(logits[:, 0].sigmoid(), binary, n_bins=bins)
    assert fed(CalibrationError(bins), logits[:, 0], binary) == pytest.approx(expected.item(), abs=1e-6)


def test_a_nan_is_reported_not_raised():
    logits = torch.tensor([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    for metric in (Perplexity(), CalibrationError()):
        assert math.isnan(fed(metric, logits, torch.tensor([0, 1])))
        assert math.isnan(type(metric)().compute())
    assert fed(Perplexity(), torch.tensor([[0.0, 1e9]]), torch.tensor([0])) == math.inf


@pytest.mark.parametrize("metric", [MAE, MSE, R2, RMSE, Spearman])
def test_predictions_may_have_a_last_dimension_of_one(metric):
    predictions, targets = torch.tensor([1.0, 3.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert fed(metric(), predictions[:, None], targets) == fed(metric(), predictions, targets)
    with pytest.raises(DataError, match=metric.__name__):
        fed(metric(), predictions[:3], targets)
