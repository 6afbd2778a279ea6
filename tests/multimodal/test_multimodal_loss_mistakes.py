"""What the meaningful loss refuses: settings, codebooks, outputs and ids that do not fit."""

import pytest
import torch
from loss_strategy_parts import BOOKS, SCALAR, VOCAB, tokens_of

from etude.core import ConfigError, DataError, TrainingError
from etude.multimodal.loss import MeaningfulLoss


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": {"imag": 1.0}}, ConfigError, "a weight is given for the modality 'imag', .* mean 'image'"),
        ({"weights": {"image": -1.0}}, ConfigError, "weight of the modality 'image' is -1.0"),
        ({"weight": float("nan")}, ConfigError, "weight of the modality 'image' is nan"),
        ({"sample_k": 0}, ConfigError, "sample_k is 0"),
        ({"kind": "mae"}, ConfigError, "kind of loss 'mae'"),
        ({"kind": {"spectrum": "mse"}}, ConfigError, "a kind of loss is given for the modality 'spectrum'"),
        ({"edges": {"spectrum": SCALAR}}, ConfigError, "edges is given for the modality 'spectrum'"),
        ({"kind": "hl_gauss", "edges": {"scalar": SCALAR}}, DataError, "'scalar' .* 5 bins need 6 edges"),
        ({"ignore_index": VOCAB.base_scalar + 2}, ConfigError, "ignore_index 14 is a token of the modality 'scalar'"),
        ({"use_ce": False, "weight": 0.0}, TrainingError, "nothing would be trained"),
    ],
)
def test_mistakes_are_one_line(options, error, message):
    with pytest.raises(error, match=message) as found:
        MeaningfulLoss(VOCAB, BOOKS, **options)
    assert "\n" not in str(found.value)


def test_codebooks_that_do_not_fit():
    with pytest.raises(ConfigError, match="a codebook is given for the modality 'spectrum'"):
        MeaningfulLoss(VOCAB, {"spectrum": SCALAR})
    with pytest.raises(DataError, match="'scalar' does not fit: there are 4 values for its 5 tokens"):
        MeaningfulLoss(VOCAB, {"scalar": SCALAR[:4]})
    with pytest.raises(TrainingError, match="nothing would be trained"):
        MeaningfulLoss(VOCAB, {}, use_ce=False)
    MeaningfulLoss(VOCAB, {"scalar": SCALAR[:4]}, enabled=False)  # not looked at


def test_outputs_that_do_not_fit():
    loss = MeaningfulLoss(VOCAB, BOOKS)
    tokens = tokens_of()
    with pytest.raises(TrainingError, match=r"found logits \(4, 21, 20\) and labels \(4, 20\)"):
        loss.terms(torch.zeros(4, 21, 20), {"tokens": tokens}, metrics=False)
    with pytest.raises(TrainingError, match=r"found logits \(4, 20\) and labels"):
        loss.terms(torch.zeros(4, 20), {"tokens": tokens}, metrics=False)
    with pytest.raises(
        TrainingError, match="vocabulary has 20 tokens, the model's output only 19; set the model's vocab"
    ):
        loss.terms(torch.zeros(4, 20, 19), {"tokens": tokens}, metrics=False)
    with pytest.raises(TrainingError, match="needs integer labels"):
        loss.terms(torch.zeros(4, 20, 20), {"tokens": tokens.float()}, metrics=False)


def test_a_weight_or_a_kind_needs_a_codebook(caplog):
    only = {"image": BOOKS["image"]}
    with pytest.raises(ConfigError, match="'scalar' has a weight but no codebook"):
        MeaningfulLoss(VOCAB, only, weights={"scalar": 0.5})
    with pytest.raises(ConfigError, match="'scalar' has a kind but no codebook"):
        MeaningfulLoss(VOCAB, only, kind={"scalar": "huber"})
    MeaningfulLoss(VOCAB, only, weights={"scalar": 0.0})
    MeaningfulLoss(VOCAB, only, weights={"scalar": 0.5}, enabled=False)
    assert not caplog.records
    MeaningfulLoss(VOCAB, {})
    assert "only cross entropy" in caplog.text


def test_ids_beyond_the_vocabulary_are_refused_though_the_output_has_room_for_them():
    batch = {"tokens": torch.full((2, 6), 3)}
    batch["tokens"][1, 4] = VOCAB.vocab_size
    wide = torch.zeros(2, 5, VOCAB.vocab_size + 50)
    with pytest.raises(
        DataError, match=f"token {VOCAB.vocab_size}, but the vocabulary has {VOCAB.vocab_size} tokens"
    ):
        MeaningfulLoss(VOCAB, BOOKS).terms(wide, batch, metrics=False)
