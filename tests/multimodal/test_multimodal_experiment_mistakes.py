"""Mistakes in config files over several modalities: one line each, most of them before data is read."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from star_configs import BOTH, CONFIG, load, without_loss

from etude.config import build_selection
from etude.core import ConfigError, DataError, EtudeError
from etude.experiment import build_trainer

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            BOTH % ("language_modeling", "true"),
            (
                "x.yaml:2: training.meaningful_loss: asks for the loss 'meaningful', and loss.name is "
                "'language_modeling'; keep one"
            ),
        ),
        (
            BOTH % ("meaningful", "false"),
            (
                "x.yaml:2: training.meaningful_loss: turns the meaningful loss off, and loss.name is 'meaningful'; "
                "keep one"
            ),
        ),
        (
            BOTH % ("meaningful, weights: {image: 0.4}", "true"),
            (
                "x.yaml:2: training.meaningful_loss.weight_image: 0.5 contradicts loss.weights.image, which is 0.4; "
                "keep one"
            ),
        ),
        (
            "training:\n  meaningful_loss:\n    weight_imgae: 0.5\n",
            (
                "x.yaml:3: training.meaningful_loss.weight_imgae: unknown key; did you mean 'weight_image'? "
                "(allowed: enabled, sample_k, weight, weights, kind, huber_delta, hl_sigma, use_ce, …)"
            ),
        ),
        (
            "training:\n  meaningful_loss:\n    sample_k: 0\n",
            "x.yaml:3: training.meaningful_loss.sample_k: must be at least 1, got 0",
        ),
        (
            "vocab: {image: 3}\ntraining:\n  meaningful_loss:\n    weight_scalar: 1\n",
            (
                "x.yaml:4: training.meaningful_loss.weight_scalar: the vocabulary has no modality 'scalar' "
                "(there are: image)"
            ),
        ),
    ],
)
def test_contradictions_are_one_line(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["loss.weights={imgae: 1.0}"],
            (
                "command line: loss.weights.imgae: the vocabulary has no modality 'imgae'; did you mean 'image'? "
                "(there are: image, scalar, class)"
            ),
        ),
        (
            ["loss.kind={spectrum: mse}"],
            (
                "command line: loss.kind.spectrum: the vocabulary has no modality 'spectrum' "
                "(there are: image, scalar, class)"
            ),
        ),
        (
            ["vocab.image=8"],
            (
                "command line: vocab: differs from the vocabulary of the data: modality 'image' has 9 tokens from "
                "id 6 in the data, 8 tokens from id 6 in this section; remove this section to use that of the data"
            ),
        ),
        (
            ["vocab={image: 9, modalities: {image: 3}}"],
            "command line: vocab: the size of the modality 'image' is given twice; keep one",
        ),
        (["vocab.image=0"], "command line: vocab.image: must be at least 1, got 0"),
        (["loss.vocab=3"], "command line: loss.vocab: is supplied when the component is built .*"),
        (["loss.kind=hubber"], "command line: loss.kind: .*got 'hubber'; did you mean 'huber'.*"),
    ],
)
def test_mistakes_are_found_before_the_data_is_read(stars, overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(CONFIG, *overrides)
    found = str(caught.value)
    assert found == words or re.fullmatch(words, found), found
    assert "\n" not in found


@pytest.mark.usefixtures("stars")
@pytest.mark.parametrize(
    ("values", "words"), [(np.ones((7, 2)), "'image' .*7 .*9"), (np.full((9, 2), np.nan), "NaN")]
)
def test_codebooks_that_do_not_fit_are_found_before_training(values, words):
    np.save("wrong.npy", values)
    with pytest.raises(EtudeError, match=words):
        build_trainer(load(CONFIG, "loss.codebooks={image: wrong.npy}"), progress=False)


def test_codebook_file_that_is_missing_is_reported_when_it_is_read(stars):
    config = load(CONFIG, "loss.codebooks={image: none.npy}")
    with pytest.raises(DataError, match=r"loss: loss 'meaningful': none\.npy: no such file"):
        build_trainer(config, progress=False)


@pytest.mark.usefixtures("stars")
def test_meaningful_loss_without_a_vocabulary():
    shutil.copytree("stars", "bare")
    Path("bare/vocab.json").unlink()
    words = "x.yaml:5: loss: the meaningful loss needs a vocabulary, and neither the data nor a `vocab:` section"
    with pytest.raises(ConfigError, match=words):
        load(CONFIG, "data.root=bare")
    # Where the config alone cannot tell, building does.
    text = "model: lenet5\ndata: {name: mnist}\nloss: meaningful\n"
    config = load(text)
    with pytest.raises(
        ConfigError, match=r"x\.yaml:3: loss: loss 'meaningful': the meaningful loss needs a vocabulary"
    ):
        build_selection(config.require("loss"), path="loss", document=config.document)


@pytest.mark.parametrize("special", ["[]", "[PAD, MISS]", "[PAD, MISS, BOS, EOS, SEP, MASK]"])
def test_special_tokens_without_a_modality_are_refused(special):
    with pytest.raises(ConfigError, match=r"x\.yaml:1: vocab: .*no modality"):
        load(f"vocab: {{special: {special}}}\nmodel: lenet5\n")
    for says_nothing in ("vocab: {}\n", "vocab: {image: null, modalities: {}}\n"):
        assert "vocab" not in load(f"{says_nothing}model: lenet5\n").to_dict()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("model: lenet5\ntraining: {meaningful_loss: {weight: 1}}\n", r"training\.meaningful_loss"),
        ("model: lenet5\nvocab: {image: 3}\n", "vocab"),
    ],
)
def test_without_the_room_its_keys_are_refused(tmp_path, monkeypatch, text, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "etude.multimodal.feature", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"x\.yaml:2: {path}: "):
        load(text)


@pytest.mark.usefixtures("stars")
def test_tasks_cannot_use_the_loss(stars):
    text = without_loss() + "tasks:\n  tokens: {head: language_model, loss: {name: meaningful, weight: 0.2}}\n"
    with pytest.raises(ConfigError, match=r"x\.yaml:6: tasks\.tokens\.loss: .* a task learns from one number"):
        load(text)
