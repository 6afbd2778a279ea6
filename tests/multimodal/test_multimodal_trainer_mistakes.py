"""What a `Trainer` over several modalities refuses: arguments that contradict each other, codebooks that do not fit."""

import pytest
import torch
import torch.nn.functional as F
from multimodal_runs import make_batches, make_model

from etude import Trainer, build_vocab_spec
from etude.core import ConfigError, DataError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_codebook": torch.zeros(12, 3)}, "image_codebook= .*pass vocab="),
        ({"edges": {"scalar": torch.zeros(9)}}, "edges= .*pass vocab="),
        ({"use_ce": False}, "use_ce= .*pass vocab="),
        (
            {"config": {"meaningful_loss": {}}},
            "config.meaningful_loss .*pass vocab=",
        ),
        (
            {"config": {"meaningful_loss": {}}, "loss": F.cross_entropy},
            "config.meaningful_loss .*keep loss=",
        ),
    ],
)
def test_without_a_vocabulary(vocab, given, words):
    with pytest.raises(ConfigError, match=words):
        Trainer(make_model(vocab), progress=False, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": F.cross_entropy}, "vocab= chooses the meaningful loss, and loss= another one; keep one of them"),
        ({"task": lambda *_: {}}, "vocab= chooses the meaningful loss, and task= another one; keep one of them"),
        (
            {"codebooks": {"image": torch.zeros(12, 3)}, "image_codebook": torch.zeros(12, 3)},
            "the codebook of 'image' is given twice",
        ),
        (
            {"codebooks": {"scaler": torch.zeros(8)}},
            "'scaler', which is not in the vocabulary; did you mean 'scalar'",
        ),
        ({"config": {"meaningful_loss": {"weights": {"imag": 1.0}}}}, "'imag', .*; did you mean 'image'"),
        ({"config": {"meaningful_loss": {"kind": {"imag": "mse"}}}}, "'imag', .*; did you mean 'image'"),
        (
            {"config": {"meaningful_loss": {"kind": "hubert"}}},
            "training.meaningful_loss.kind: .*'huber'.*got 'hubert'; did you mean 'huber'",
        ),
        (
            {"config": {"meaningful_loss": {"weight_image": 1, "weights": {"image": 2}}}},
            "training.meaningful_loss: the weight of 'image' is given twice, by weight_image and weights; keep one",
        ),
        (
            {"config": {"meaningful_loss": {"sample_k": 3, "sample_k_per_modality": 4}}},
            "means the same as 'sample_k.*keep one",
        ),
        ({"config": {"meaningful_loss": {"weight_image": -1}}}, "weight_image: must be at least 0, got -1"),
    ],
)
def test_mistakes_with_a_vocabulary(vocab, given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Trainer(make_model(vocab), vocab=vocab, progress=False, **given)
    assert "\n" not in str(caught.value)


def test_codebook_of_a_modality_that_is_not_there():
    vocab = build_vocab_spec(v_scalar=4)
    with pytest.raises(ConfigError, match="'image', which is not in the vocabulary"):
        Trainer(make_model(vocab), vocab=vocab, image_codebook=torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(7, 3), "'image' does not fit: there are 7 values for its 12 tokens"),
        (torch.full((12, 3), torch.nan), "'image' does not fit: .*finite"),
    ],
)
def test_codebook_that_does_not_fit(vocab, values, words):
    with pytest.raises(DataError, match=words):
        Trainer(make_model(vocab), vocab=vocab, image_codebook=values)


def test_vocabulary_by_position_is_refused(vocab, codebooks):
    with pytest.raises(ConfigError, match="pass vocab="):
        Trainer(make_model(vocab), vocab, make_batches(vocab, 1), codebooks=codebooks)
    with pytest.raises(DataError, match=r"train_loader.*VocabSpec.*by name"):
        Trainer(make_model(vocab), vocab, make_batches(vocab, 1))
    with pytest.raises(ConfigError, match=r"vocab must be a VocabSpec.*found dict"):
        Trainer(make_model(vocab), make_batches(vocab, 1), vocab=vocab.to_dict())


@pytest.mark.parametrize(
    ("wrong", "hint"), [("codebook", "codebooks"), ("optimiser", "optimizer"), ("quite_another", None)]
)
def test_unknown_argument(vocab, wrong, hint):
    words = rf"Trainer\(\) has no argument '{wrong}'" + (f"; did you mean '{hint}'" if hint else "$")
    with pytest.raises(TypeError, match=words):
        Trainer(make_model(vocab), **{wrong: 1})
