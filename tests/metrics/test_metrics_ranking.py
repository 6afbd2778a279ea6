"""AUROC, average precision and Spearman's correlation against scikit-learn and SciPy, over splits and odd cases."""

import itertools
import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk
import torch
from hypothesis import given, settings, strategies as st

from etude.core import ConfigError, DataError
from etude.metrics import AUROC, AveragePrecision, Spearman

PEERS = {AUROC: sk.roc_auc_score, AveragePrecision: sk.average_precision_score}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fed(metric, predictions, targets, cuts=()):
    """Return the value after updates with the pieces of the data between the cuts."""
    bounds = [0, *sorted(cuts), len(targets)]
    for start, end in itertools.pairwise(bounds):
        metric.update(predictions[start:end], targets[start:end])
    return metric.compute()


def peer(kind, targets, scores, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about classes that do not occur
        return PEERS[kind](targets, scores, **options)


def sample(seed, shape, *, ties=False):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator)
    return (scores * 2).round() / 2 if ties else scores, generator


@pytest.mark.parametrize("kind", PEERS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    rate=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    dtype=st.sampled_from(DTYPES),
    ties=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_binary_equals_scikit_learn(kind, seed, count, rate, dtype, ties, cuts):
    scores, generator = sample(seed, (count,), ties=ties)
    scores, targets = scores.to(dtype), (torch.rand(count, generator=generator) < rate).long()
    found = fed(kind(), scores, targets, [min(cut, count) for cut in cuts])
    assert found == pytest.approx(peer(kind, targets.numpy(), scores.double().numpy()), abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("average", ["macro", "weighted"])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(30, 80), classes=st.integers(3, 5))
def test_classes_against_the_rest_equal_scikit_learn(kind, average, seed, count, classes):
    logits, generator = sample(seed, (count, classes))
    targets = torch.cat([torch.arange(classes), torch.randint(classes, (count - classes,), generator=generator)])
    options = {"multi_class": "ovr"} if kind is AUROC else {}
    expected = peer(kind, targets.numpy(), logits.double().softmax(1).numpy(), average=average, **options)
    assert fed(kind(average=average), logits.double(), targets, [7]) == pytest.approx(expected, abs=1e-6)
    assert fed(kind(num_classes=classes, average=average), logits, targets) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [False, True])
def test_labels_equal_scikit_learn_one_by_one(kind, dtype, missing):
    scores, generator = sample(3, (200, 4), ties=True)
    scores = scores.to(dtype)
    targets = (torch.rand(200, 4, generator=generator) < 0.3).float()
    if missing:
        targets[torch.rand(200, 4, generator=generator) < 0.2] = math.nan
    there = ~targets.isnan()
    expected = [
        peer(kind, targets[there[:, k], k].numpy(), scores.double()[there[:, k], k].numpy()) for k in range(4)
    ]
    assert fed(kind(num_labels=4, average="none"), scores, targets, [50, 51]) == pytest.approx(expected, abs=1e-6)
    assert fed(kind(num_labels=4), scores, targets) == pytest.approx(np.mean(expected), abs=1e-6)
    named = kind(num_labels=4, average="none", class_names=["a", "b", "c", "d"])
    fed(named, scores, targets)
    assert list(named.results()) == [f"{kind.name}_{one}" for one in "abcd"]


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_logits_are_not_rounded(kind, dtype):
    logits, generator = sample(2, (300, 2))
    logits, targets = logits.to(dtype), torch.randint(2, (300,), generator=generator)
    scores = logits[:, 1].double() - logits[:, 0].double()
    assert fed(kind(), logits, targets) == pytest.approx(peer(kind, targets.numpy(), scores.numpy()), abs=1e-9)


def test_counted_and_kept_scores_add_up():
    scores, generator = sample(4, (300,), ties=True)
    targets = (torch.rand(300, generator=generator) < 0.4).long()
    mixed = AUROC()
    mixed.update(scores[:100].half(), targets[:100])
    mixed.update(scores[100:200].bfloat16(), targets[100:200])
    mixed.update(scores[200:], targets[200:])
    assert mixed.compute() == pytest.approx(sk.roc_auc_score(targets, scores), abs=1e-9)
    again = AUROC()
    again.load_state_dict(mixed.state_dict())
    assert again.compute() == mixed.compute()
    mixed.reset()
    assert math.isnan(mixed.compute())
    assert not math.isnan(again.compute())


def test_signed_zeros_are_a_tie():
    assert fed(AUROC(), torch.tensor([0.0, -0.0]).half(), torch.tensor([0, 1])) == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PEERS)
def test_a_nan_score_is_nan_and_ignored_labels_do_not_count(kind, dtype):
    scores = torch.tensor([0.1, math.nan, 0.3, 0.9], dtype=dtype)
    assert math.isnan(fed(kind(), scores, torch.tensor([0, 1, 0, 1])))
    assert fed(kind(), scores, torch.tensor([0, -100, 0, 1])) == 1.0


def test_a_class_that_does_not_occur_is_left_out_of_the_area_and_a_nan_is_not():
    logits, targets = torch.eye(3)[[0, 1, 0, 1]], torch.tensor([0, 1, 0, 1])
    assert fed(AUROC(), logits, targets) == 1.0
    logits[0, 0] = math.nan
    assert math.isnan(fed(AUROC(), logits, targets))


def test_nothing_seen_is_nan():
    for kind in (AUROC, AveragePrecision, Spearman):
        assert math.isnan(kind().compute())


@pytest.mark.parametrize(
    ("arguments", "message"), [({"num_classes": 3, "num_labels": 3}, "not both"), ({"average": "micro"}, "average")]
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AUROC(**arguments)


def test_shapes_that_do_not_fit():
    with pytest.raises(DataError, match=r"\(4, 3\)"):
        AUROC().update(torch.zeros(4, 3), torch.zeros(5))
    with pytest.raises(DataError, match="num_labels 2"):
        AUROC(num_labels=2).update(torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(DataError, match=r"\(4, 3\)"):
        Spearman().update(torch.zeros(4, 3), torch.zeros(4))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), count=st.integers(3, 50), ties=st.booleans(), cut=st.integers(0, 50))
def test_spearman_equals_scipy(seed, count, ties, cut):
    predictions, generator = sample(seed, (count, 2), ties=ties)
    targets = predictions + torch.randn(count, 2, generator=generator)
    found = fed(Spearman(), predictions, targets, [min(cut, count)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = np.mean([scipy.stats.spearmanr(predictions[:, k], targets[:, k]).statistic for k in range(2)])
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
