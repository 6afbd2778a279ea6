"""Without a loss, the shapes of the first batch choose one; what fits none is listed."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.core.errors import TrainingError
from etude.losses import ClassificationLoss, FunctionLoss, LanguageModelingLoss, SegmentationLoss, as_strategy
from etude.losses.inferred import InferredLoss

IDS = torch.randint(1, 9, (3, 6), generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(3, 6, 9)


def choose(output, batch):
    strategy = InferredLoss()
    assert strategy.counts(batch) is None
    strategy.terms(output, batch, metrics=False)
    return strategy.chosen


def test_classification():
    assert type(choose(torch.randn(4, 3), (None, torch.tensor([0, 1, 2, 0])))) is ClassificationLoss
    assert (
        type(choose(torch.randn(4, 3), (None, torch.tensor([0, 1, 2, 0], dtype=torch.uint8)))) is ClassificationLoss
    )


def test_segmentation():
    assert type(choose(torch.randn(2, 3, 4, 5), (None, torch.zeros(2, 4, 5, dtype=torch.long)))) is SegmentationLoss


def test_regression():
    output, labels = torch.randn(5, 2), torch.randn(5, 2)
    chosen = choose(output, (None, labels))
    assert isinstance(chosen, FunctionLoss)
    torch.testing.assert_close(chosen.compute_loss(output, (None, labels)), F.mse_loss(output, labels))


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (torch.randn(4, 3), (None, torch.tensor([0, 1, 2, 0]))),
        (torch.randn(2, 3, 4, 5), (None, torch.zeros(2, 4, 5, dtype=torch.long))),
        (torch.randn(5, 2), (None, torch.randn(5, 2))),
        (TEXT, {"input_ids": IDS}),
        (TEXT, {"input_ids": IDS, "labels": IDS}),
        (TEXT, {"input_ids": IDS, "labels": IDS.flip(1)}),
        (TEXT, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}),
    ],
)
def test_another_that_takes_over_the_decisions_is_the_same_without_a_batch(output, batch):
    one, other = InferredLoss(-100), InferredLoss(-100)
    assert one.decisions() == {}
    one.terms(output, batch, metrics=False)
    decisions = json.loads(json.dumps(one.decisions()))
    other.decide(decisions)
    assert type(other.chosen) is type(one.chosen)
    shared = vars(one.chosen).keys() - {"_finds_shift", "function", "_options"}
    assert all(vars(one.chosen)[name] == vars(other.chosen)[name] for name in shared)
    assert other.derived({"loss": 1.5}) == one.derived({"loss": 1.5})
    assert other.decisions() == one.decisions()
    other.decide({})
    assert other.chosen is None


def test_a_shift_that_was_given_is_not_decided_by_others():
    given, asking = LanguageModelingLoss(shift=False), LanguageModelingLoss()
    for loss in (given, asking):
        loss.decide({"shift": True})
    assert (given.shift, given.decisions()) == (False, {})
    assert (asking.shift, asking.decisions()) == (True, {"shift": True})


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        (IDS,),
        {"input_ids": IDS},
        {"input_ids": IDS, "labels": IDS.masked_fill(IDS == 3, -100)},
        (IDS, IDS),
    ],
)
def test_labels_that_repeat_the_inputs_are_shifted(batch):
    chosen = choose(TEXT, batch)
    assert type(chosen) is LanguageModelingLoss
    assert chosen.shift


@pytest.mark.parametrize(
    "batch",
    [
        (IDS[:, :-1], IDS[:, 1:]),  # next tokens prepared beforehand
        {"input_ids": IDS[:, 1:].masked_fill(IDS[:, 1:] == 3, 0), "labels": IDS[:, 1:]},  # masked tokens
        (torch.randn(3, 5, 2), IDS[:, 1:]),  # classes of frames
    ],
)
def test_labels_that_line_up_are_not_shifted(batch):
    labels = IDS[:, 1:]
    chosen = choose(TEXT[:, 1:], batch)
    assert not chosen.shift
    expected = F.cross_entropy(TEXT[:, 1:].reshape(-1, 9), labels.reshape(-1))
    torch.testing.assert_close(chosen.compute_loss(TEXT[:, 1:], batch), expected)


def test_the_labels_of_an_encoder_decoder_are_not_shifted_even_if_it_copies():
    output = {"logits": TEXT, "encoder_last_hidden_state": torch.zeros(3, 6, 2)}
    assert not choose(output, {"input_ids": IDS, "labels": IDS}).shift


def test_a_next_token_batch():
    chosen = choose(TEXT[:, 1:], {"tokens": IDS, "attn_mask": torch.ones(3, 6)})
    assert isinstance(chosen, LanguageModelingLoss)


def test_the_choice_is_kept():
    strategy = as_strategy(None)
    batch = (None, torch.tensor([0, 1]))
    strategy.terms(torch.randn(2, 3), batch, metrics=False)
    chosen = strategy.chosen
    assert strategy.counts(batch) == {"loss": 2}
    with pytest.raises(TrainingError, match="do not fit the model's output"):
        strategy.terms(torch.randn(2, 3), (None, torch.randn(2, 2)), metrics=False)
    assert strategy.chosen is chosen


@pytest.mark.parametrize(
    ("output", "batch", "found"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2), r"shape \(4, 3\) with no labels"),
        (
            torch.zeros(4, 3),
            (None, torch.zeros(4, 1, dtype=torch.long)),
            r"\(4, 3\) with torch.int64 labels \(4, 1\)",
        ),
        (torch.zeros(4, 1), (None, torch.zeros(4)), r"\(4, 1\) with torch.float32 labels \(4,\)"),
        (torch.zeros(4, 5, 6), torch.zeros(4, 5), r"\(4, 5, 6\) with no labels"),
        (torch.zeros(4), (None, torch.zeros(4, dtype=torch.long)), r"\(4,\) with torch.int64 labels \(4,\)"),
    ],
)
def test_what_fits_nothing_is_listed(output, batch, found):
    with pytest.raises(TrainingError, match=found) as caught:
        choose(output, batch)
    for choice in ("classification", "language modelling", "segmentation", "regression"):
        assert choice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_as_strategy_keeps_strategies_and_wraps_functions():
    strategy = ClassificationLoss()
    assert as_strategy(strategy) is strategy
    assert isinstance(as_strategy(nn.MSELoss()), FunctionLoss)
    assert isinstance(as_strategy(F.cross_entropy), FunctionLoss)
