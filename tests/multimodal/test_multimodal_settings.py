"""Settings of the meaningful loss: one signature, and the same loss from every place that takes them."""

import copy
import inspect

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn

from etude import Trainer, build_vocab_spec, combined_loss
from etude.config import Document
from etude.core import ConfigError
from etude.data import TokenWriter
from etude.experiment import build_trainer, experiment_schema, validate_experiment
from etude.multimodal import MeaningfulLoss
from etude.multimodal.loss.settings import DEFAULTS, read_settings, settings_model

VOCAB = build_vocab_spec(v_scalar=8, v_image=6)
CODEBOOKS = {
    "scalar": torch.linspace(0, 1, 8),
    "image": torch.randn(6, 2, generator=torch.Generator().manual_seed(0)),
}
OTHERS = {
    "enabled": False,
    "sample_k": 3,
    "weight": 0.7,
    "weights": {"scalar": 2.0},
    "kind": {"scalar": "hl_gauss", "image": "huber"},
    "huber_delta": 0.2,
    "hl_sigma": 2.0,
    "use_ce": False,
    "shift": True,
    "ignore_index": -7,
    "label_smoothing": 0.25,
    "fused_head": False,
}
"""A value for every setting that is not its default."""
KINDS = {"kind": {"scalar": "hl_gauss", "image": "huber"}}
"""With these, every setting changes something."""


def described(loss):
    """All that settings decide about a loss."""
    logits = torch.linspace(-1, 1, 64).reshape(8, 8)
    return {
        "plain": {key: value for key, value in vars(loss).items() if isinstance(value, (bool, int, float, str, dict))}
        | {"reconstructions": None, "_edges": None},
        "losses": {
            name: one.row_losses(logits[:, : one.size].double(), torch.arange(8) % one.size).tolist()
            for name, one in loss.reconstructions.items()
        },
    }


@pytest.fixture
def plain_data(tmp_path):
    with TokenWriter(tmp_path / "data" / "train.bin") as writer:
        for _ in range(8):
            writer.add(np.arange(VOCAB.vocab_size))
    for name, values in CODEBOOKS.items():
        np.save(tmp_path / f"{name}.npy", values.numpy())
    return tmp_path


def from_file(folder, **sections):
    config = {
        "vocab": {"scalar": 8, "image": 6},
        "model": {"name": "transformer_lm", "d_model": 8, "n_layers": 1, "n_heads": 1, "max_len": 16},
        "data": {"name": "tokens", "root": str(folder / "data"), "read": "documents", "length": 16},
        **sections,
    }
    config["training"] = {"device": "cpu", **config.get("training", {})}
    return build_trainer(validate_experiment(Document(config)), progress=False).task.strategy


def files(folder):
    return {name: str(folder / f"{name}.npy") for name in CODEBOOKS}


def test_every_setting_is_tried():
    assert OTHERS.keys() == DEFAULTS.keys()
    assert all(OTHERS[key] != default for key, default in DEFAULTS.items())


def test_the_signature_is_the_only_list():
    arguments = inspect.signature(MeaningfulLoss).parameters
    assert set(DEFAULTS) == set(arguments) - {"vocab", "codebooks", "edges"}
    named = {f"weight_{name}" for name in ("image", "scalar", "spectrum")}
    assert set(settings_model().model_fields) == set(DEFAULTS) | named


@pytest.mark.parametrize("key", OTHERS)
def test_every_place_gives_the_same_loss(plain_data, key):
    settings = {**KINDS, key: OTHERS[key]}
    wanted = described(MeaningfulLoss(VOCAB, CODEBOOKS, **settings))
    usual = KINDS if key != "kind" else {}
    assert wanted != described(MeaningfulLoss(VOCAB, CODEBOOKS, **usual)) or key == "shift"
    model = nn.Linear(2, 2)
    given = {"vocab": VOCAB, "codebooks": CODEBOOKS, "progress": False}
    found = Trainer(model, config={"meaningful_loss": settings}, **given).task.strategy
    assert described(found) == wanted
    section = {"name": "meaningful", "codebooks": files(plain_data)}
    assert described(from_file(plain_data, loss=section | settings)) == wanted
    if key != "enabled":  # there, it turns the loss off
        loss = {"codebooks": files(plain_data)}
        assert described(from_file(plain_data, loss=loss, training={"meaningful_loss": settings})) == wanted


@pytest.mark.parametrize(("key", "kind"), [("huber_delta", "huber"), ("hl_sigma", "hl_gauss")])
def test_settings_of_a_kind_that_no_modality_has_are_warned_of(caplog, key, kind):
    for settings in ({key: OTHERS[key], "kind": {"scalar": kind}}, {key: DEFAULTS[key]}, {}):
        MeaningfulLoss(VOCAB, CODEBOOKS, **settings)
        assert not caplog.records
    MeaningfulLoss(VOCAB, CODEBOOKS, **{key: OTHERS[key]})
    assert len(caplog.records) == 1
    assert key in caplog.text
    assert kind in caplog.text


@pytest.mark.parametrize("key", ["enabled", "sample_k", "weight", "weights", "kind", "huber_delta", "hl_sigma"])
def test_combined_loss_is_the_loss_of_the_settings(key):
    settings = {**KINDS, "sample_k": None, key: OTHERS[key]}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(6, VOCAB.vocab_size, (4, 9), generator=generator)
    logits = torch.randn(4, 8, VOCAB.vocab_size, generator=generator, dtype=torch.float64)
    loss = MeaningfulLoss(VOCAB, CODEBOOKS, shift=False, **settings)
    torch.manual_seed(3)
    wanted = loss.compute_loss(logits, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    torch.manual_seed(3)
    found, _ = combined_loss(logits, tokens[:, 1:], VOCAB, codebooks=CODEBOOKS, config=settings)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("key", ["use_ce", "shift", "ignore_index", "label_smoothing", "fused_head"])
def test_combined_loss_refuses_settings_that_say_nothing_to_it(key):
    logits, targets = torch.zeros(1, 2, VOCAB.vocab_size), torch.tensor([[6, 8]])
    with pytest.raises(ConfigError, match=rf"config\.{key}: unknown key"):
        combined_loss(logits, targets, VOCAB, codebooks=CODEBOOKS, config={key: OTHERS[key]})


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {}),
        (None, {}),
        ({"sample_k_per_modality": 4}, {"sample_k": 4}),
        ({"weight_image": 0.5}, {"weights": {"image": 0.5}}),
        ({"weight_image": None, "weights": None}, {}),
        ({"weight_scalar": 1, "weights": {"period": 2}}, {"weights": {"period": 2.0, "scalar": 1.0}}),
        ({"sample_k": None, "weight": 2}, {"sample_k": None, "weight": 2.0}),
    ],
)
def test_other_spellings(given, arguments):
    found = read_settings(given)
    assert {key: value for key, value in found.items() if key != "weights" or value} == arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weigth": 1.0}, r"training\.meaningful_loss\.weigth: unknown key; did you mean 'weight'"),
        ({"weight_image": -1}, r"training\.meaningful_loss\.weight_image: .*at least 0"),
        ({"weight": float("inf")}, r"training\.meaningful_loss\.weight: "),
        ({"sample_k": 0}, r"training\.meaningful_loss\.sample_k: .*at least 1"),
        ({"hl_sigma": 0.0}, r"training\.meaningful_loss\.hl_sigma: "),
        ({"kind": "mes"}, r"training\.meaningful_loss\.kind: .*did you mean 'mse'"),
        ({"use_ce": "no"}, r"training\.meaningful_loss\.use_ce: "),
        ({"weight_image": 1, "weights": {"image": 2}}, "'image' is given twice"),
        (3, r"training\.meaningful_loss: expected a mapping"),
    ],
)
def test_mistakes_are_one_line(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_settings(given)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def editor():
    return jsonschema.Draft202012Validator(experiment_schema())


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        OTHERS,
        *({key: value} for key, value in OTHERS.items()),
        {"kind": "wasserstein", "sample_k": None},
        {"sample_k_per_modality": 64, "weight_image": 0.5},
        {"weight_image": None, "weights": {"image": 2}},
        {"weight_image": 1, "weights": {"scalar": 2}},
        {"weight_image": 1, "weights": None},
        {"sample_k_per_modality": 64, "sample_k": 64},
        {"codebooks": {}},
        {"vocab": None},
        {"weigth": 1.0},
        {"weight": -1},
        {"weights": {"image": "1"}},
        {"sample_k": 0},
        {"hl_sigma": 0.0},
        {"label_smoothing": 1.5},
        {"kind": "mes"},
        {"kind": {"image": "mes"}},
        {"use_ce": "no"},
        {"enabled": None},
        [],
        True,
    ],
    ids=str,
)
def test_editors_accept_what_a_file_may_say(editor, given):
    file = {"model": "transformer_lm", "vocab": {"scalar": 8, "image": 6}, "training": {"meaningful_loss": given}}
    try:
        validate_experiment(Document(copy.deepcopy(file)))
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert not refused or "training.meaningful_loss" in refused
    assert editor.is_valid(file) is (not refused)
    assert editor.is_valid({"extends": "base.yaml", **file}) is (not refused)


def test_editors_complete_every_setting(editor):
    schema = editor.schema["$defs"]["meaningful_loss"]["properties"]
    assert schema.keys() >= {*DEFAULTS, "sample_k_per_modality", "weight_image", "weight_scalar", "weight_spectrum"}
