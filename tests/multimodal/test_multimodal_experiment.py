"""Config files over several modalities: `vocab`, the loss `meaningful`, where it may be written, and whole runs."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude import Trainer
from etude.checkpoint import CheckpointManager, read_checkpoint
from etude.config import Document, build_selection
from etude.core import CheckpointError, ConfigError, DataError, EtudeError
from etude.data import TokenWriter, load_tokens
from etude.experiment import (
    build_trainer,
    evaluate_run,
    experiment_schema,
    load_config,
    resume_run,
    train_experiment,
    validate_experiment,
)
from etude.multimodal import (
    MeaningfulLoss,
    MultimodalWriter,
    ScalarTokenizer,
    VectorTokenizer,
    VocabSpec,
    build_vocab_spec,
    write_modalities,
)
from etude.multimodal.loss import make_reconstruction
from etude.multimodal.tokenizers import load_tokenizer

IMAGE, SCALAR, CLASS = 9, 6, 3

CONFIG = """\
model: {name: transformer_lm, d_model: 16, n_layers: 1, n_heads: 2, max_len: 16, dropout: 0.1}
data: {name: tokens, root: stars, read: documents, length: 12}
optimizer: {name: adamw, lr: 0.01}
training: {epochs: 3, batch_size: 8, log_interval: 1, device: cpu}
loss:
  name: meaningful
  weights: {image: 0.5, scalar: 0.3}
  sample_k: 5
"""


@pytest.fixture
def stars(tmp_path, monkeypatch):
    """A folder of multimodal data in the current folder; returns its vocabulary and tokenizers."""
    monkeypatch.chdir(tmp_path)
    vocab = build_vocab_spec(v_image=IMAGE, v_scalar=SCALAR, modalities={"class": CLASS})
    draw = torch.Generator().manual_seed(3)
    tokenizers = {
        "image": VectorTokenizer(torch.randn(IMAGE, 2, generator=draw)),
        "scalar": ScalarTokenizer(torch.tensor([-3, -2, 0, 0.5, 1, 2.5, 3])),
    }
    write_modalities("stars", vocab, tokenizers)
    for split, rows in (("train", 40), ("validation", 16), ("test", 16)):
        kinds = torch.randint(CLASS, (rows,), generator=draw)
        brightness = kinds[:, None] * 2 + torch.randint(2, (rows, 2), generator=draw)
        brightness[torch.rand(rows, 2, generator=draw) < 0.1] = -1
        images = kinds[:, None] * 3 + torch.randint(3, (rows, 4), generator=draw)
        with MultimodalWriter(f"stars/{split}.bin", vocab) as writer:
            writer.add_rows(["BOS", ("class", kinds), ("scalar", brightness), ("image", images), "EOS"])
    return vocab, tokenizers


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="x.yaml"):
    Path(name).write_text(text)
    return name


def load(text, *overrides):
    return load_config(write(text), overrides=overrides)


def strategy(text, *overrides):
    found = build_trainer(load(text, *overrides), progress=False).task.strategy
    assert isinstance(found, MeaningfulLoss)
    return found


def without_loss(text=CONFIG):
    return text.partition("loss:\n")[0]


# ------------------------------------------------------------------------------------------------ building


def test_loss_gets_vocabulary_codebooks_and_edges_of_the_data(stars):
    vocab, tokenizers = stars
    trainer = build_trainer(load(CONFIG, "loss.kind={scalar: hl_gauss}"), progress=False)
    loss = trainer.task.strategy
    assert loss.vocab == vocab
    assert (loss.weights, loss.sample_k, loss.use_ce) == ({"image": 0.5, "scalar": 0.3}, 5, True)
    assert [one.name for one in loss.reconstructions.values()] == ["mse", "hl_gauss"]
    for name, tokenizer in tokenizers.items():
        assert torch.equal(
            loss.reconstructions[name].values.float(), tokenizer.values.reshape(len(tokenizer.values), -1)
        )
    centres, edges = tokenizers["scalar"].values, tokenizers["scalar"].edges
    of_the_data, guessed = (make_reconstruction("hl_gauss", centres, edges=one) for one in (edges, None))
    found = loss.reconstructions["scalar"].soft_targets(torch.arange(SCALAR))
    torch.testing.assert_close(found, of_the_data.soft_targets(torch.arange(SCALAR)))
    assert (found - guessed.soft_targets(torch.arange(SCALAR))).abs().max() > 0.05
    assert (trainer.model.vocab_size, trainer.model.n_types) == (vocab.vocab_size, vocab.num_types)


def test_python_gets_the_same_loss_from_the_same_data(stars):
    config = load(CONFIG, "loss.kind=hl_gauss", "model.dropout=0")
    trainer, splits = build_trainer(config, progress=False), load_tokens("stars", read="documents", length=12)
    schema = splits.token_schema
    given = {"vocab": schema.vocab, "codebooks": schema.codebooks, "edges": schema.edges}
    again = Trainer(trainer.model, config=config.training, progress=False, **given)
    batches = list(splits.make_loader("validation", 8))
    assert again.evaluate(batches) == trainer.evaluate(batches)


def test_a_run_is_built_from_its_sections_and_what_training_is_filled_in_with_is_not_applied_again(stars):
    config = load(CONFIG, "training.warmup_steps=4")
    assert (config.training.warmup_steps, config.training.learning_rate) == (4, 0.01)
    rates = []
    for sections in (config.sections, {**config.sections, "scheduler": None}):
        trainer = build_trainer(replace(config, sections=sections), progress=False)
        trainer.train()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[1] == 0.01 > rates[0]


def test_n_types_of_the_file_wins(stars):
    assert build_trainer(load(CONFIG, "model.n_types=20"), progress=False).model.n_types == 20


def test_codebook_files_replace_those_of_the_data(stars):
    _, tokenizers = stars
    centers = np.linspace(0, 1, SCALAR)
    np.savez("scalar.npz", bin_centers=centers)
    loss = strategy(CONFIG, "loss.codebooks={scalar: scalar.npz}", "loss.kind={scalar: hl_gauss}")
    assert torch.equal(loss.reconstructions["image"].values.float(), tokenizers["image"].values)
    assert np.allclose(loss.reconstructions["scalar"].values[:, 0], centers)
    # The edges of the data belong to its own centres, and are left out with them.
    assert loss.reconstructions["scalar"].edges.max() < 2


def test_other_losses_are_not_given_what_they_do_not_ask_for(stars):
    trainer = build_trainer(load(without_loss() + "loss: language_modeling\n"), progress=False)
    assert not isinstance(trainer.task.strategy, MeaningfulLoss)
    assert trainer.meta["vocab"] == stars[0].to_dict()  # checkpoints tell what the ids mean all the same


def test_vocabulary_of_the_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("centers.npy", np.arange(4.0))
    with TokenWriter("plain/train.bin") as writer:
        for _ in range(20):
            writer.add(np.array([2, 6, 7, 8, 9, 10, 11, 3]))
    text = """\
vocab: {scalar: 4, modalities: {class: 2}}
model: {name: transformer_lm, d_model: 16, n_layers: 1, n_heads: 2, max_len: 16}
data: {name: tokens, root: plain, read: documents, length: 12}
training: {epochs: 1, batch_size: 4, device: cpu}
loss: {name: meaningful, codebooks: {scalar: centers.npy}}
"""
    config = load(text)
    assert (config.vocab.scalar, config.vocab.image, config.vocab.modalities) == (4, None, {"class": 2})
    trainer = build_trainer(config, progress=False)
    assert (trainer.model.vocab_size, trainer.model.n_types) == (12, 0)
    assert trainer.train()["loss_sca"] >= 0
    again = validate_experiment(Document(config.to_dict()))
    assert again.to_dict() == config.to_dict()
    with pytest.raises(ConfigError, match=r"x\.yaml:1: vocab: the data has 50 tokens, the vocabulary only 12"):
        build_trainer(load(text, "data.vocab_size=50"), progress=False)


# ------------------------------------------------------------------------------------------------ two places, one loss


def test_settings_under_training_become_the_loss(stars):
    text = (
        without_loss() + "training: {epochs: 3, batch_size: 8, log_interval: 1, device: cpu, meaningful_loss: %s}\n"
    )
    text = text.replace("training: {epochs: 3, batch_size: 8, log_interval: 1, device: cpu}\n", "", 1)
    there = load(text % "{enabled: true, sample_k_per_modality: 5, weight_image: 0.5, weights: {scalar: 0.3}}")
    assert there.to_dict() == load(CONFIG).to_dict()
    assert "meaningful_loss" not in there.to_dict()["training"]
    settings = there.training.meaningful_loss  # and can be read where they were written
    assert settings == {"sample_k": 5, "weights": {"image": 0.5, "scalar": 0.3}}
    assert there.selection("loss").component.name == "meaningful"
    off = load(text % "{enabled: false, weight_image: 0.5}")
    assert off.selection("loss") is None
    assert off.training.meaningful_loss["enabled"] is False
    assert validate_experiment(Document(off.to_dict())).to_dict() == off.to_dict()


BOTH = "loss: {name: %s}\ntraining: {meaningful_loss: {enabled: %s, weight_image: 0.5}}\n"


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
    ("text", "override", "loss", "weights"),
    [
        (BOTH % ("meaningful", "true"), "loss.weights.image=0.7", "meaningful", {"image": 0.7}),
        (BOTH % ("meaningful", "true"), "training.meaningful_loss.weight_image=0.7", "meaningful", {"image": 0.7}),
        (BOTH % ("meaningful, weights: null", "true"), "name=x", "meaningful", {"image": 0.5}),
        (
            "training: {meaningful_loss: {enabled: false}}",
            "training.meaningful_loss.enabled=true",
            "meaningful",
            None,
        ),
        (BOTH % ("language_modeling", "true"), "training.meaningful_loss=null", "language_modeling", None),
        ("loss: {codebooks: {image: a.npy}}\ntraining: {meaningful_loss: {}}", "name=x", "meaningful", None),
    ],
)
def test_the_later_one_holds(tmp_path, monkeypatch, text, override, loss, weights):
    monkeypatch.chdir(tmp_path)
    config = load(text, override)
    found = config.selection("loss")
    assert (found and found.component.name) == loss
    assert (found.arguments.get("weights") if found else None) == weights
    assert validate_experiment(Document(config.to_dict())).to_dict() == config.to_dict()


# ------------------------------------------------------------------------------------------------ mistakes


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


def test_schema_knows_the_section_and_the_loss():
    schema = json.dumps(experiment_schema())
    for word in ('"meaningful"', "hl_gauss", '"vocab"', '"spectrum"', "sample_k"):
        assert word in schema


# ------------------------------------------------------------------------------------------------ runs


def weights_of(folder):
    return read_checkpoint(CheckpointManager(folder / "checkpoints").latest()).model_state


def test_run_evaluate_and_resume(stars, tmp_path):
    vocab, _ = stars
    outcome = train_experiment(write(CONFIG), run_dir=tmp_path / "whole", progress=False)
    assert outcome.status == "finished"
    for name in ("val_loss", "val_loss_total", "val_loss_ce", "val_loss_img", "val_loss_sca", "val_rmse_sca"):
        assert name in outcome.metrics
    written = load_config(tmp_path / "whole" / "config.yaml")
    assert written.to_dict() == load(CONFIG).to_dict() | {"name": written.name}
    path, numbers = evaluate_run(tmp_path / "whole", split="test")
    assert numbers["loss_total"] == pytest.approx(
        numbers["loss_ce"] + 0.5 * numbers["loss_img"] + 0.3 * numbers["loss_sca"]
    )
    meta = read_checkpoint(path).meta
    assert VocabSpec.from_dict(meta["vocab"]) == vocab
    assert meta["config"]["base_scalar"] == vocab.base_scalar
    assert meta["codebooks"]["image"]["shape"] == [IMAGE, 2]

    # Stopped after an odd step and resumed, with positions drawn and dropout: the same weights to the last bit.
    train_experiment(write(CONFIG), ["training.max_steps=7"], run_dir=tmp_path / "parts", progress=False)
    assert resume_run(tmp_path / "parts", ["training.max_steps=null"], progress=False).step == 15
    resumed = weights_of(tmp_path / "parts")
    for name, value in weights_of(tmp_path / "whole").items():
        assert torch.equal(value, resumed[name]), name


def other_bins():
    """Other edges for the bins of the scalar, around the same centres."""
    old = load_tokenizer("stars/tokenizers/scalar.safetensors")
    edges = old.edges.clone()
    edges[1] = (edges[1] + old.values[1]) / 2
    ScalarTokenizer(edges, old.values).save("stars/tokenizers/scalar.safetensors")


@pytest.mark.usefixtures("stars")
@pytest.mark.parametrize("loss", ["meaningful", "language_modeling"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda: VectorTokenizer(torch.randn(IMAGE, 2)).save("stars/tokenizers/image.safetensors"),
            "codebook of 'image' has other values",
        ),
        (other_bins, "bin edges of 'scalar'"),
    ],
)
def test_data_made_again_with_other_codes_is_noticed(tmp_path, loss, change, words):
    text = write(CONFIG if loss == "meaningful" else without_loss() + f"loss: {loss}\n")
    train_experiment(text, ["training.epochs=1"], run_dir=tmp_path / "run", progress=False)
    change()
    with pytest.raises(CheckpointError, match=words):
        evaluate_run(tmp_path / "run", split="test")
    with pytest.raises(CheckpointError, match=words):
        resume_run(tmp_path / "run", ["training.epochs=2"], progress=False)


@pytest.mark.usefixtures("stars")
def test_a_run_with_codebooks_of_its_own_resumes(tmp_path):
    np.savez("scalar.npz", bin_centers=np.linspace(0, 1, SCALAR))
    given = ["training.epochs=1", "loss.codebooks={scalar: scalar.npz}"]
    train_experiment(write(CONFIG), given, run_dir=tmp_path / "run", progress=False)
    assert resume_run(tmp_path / "run", ["training.epochs=2"], progress=False).epoch == 2
    np.savez("scalar.npz", bin_centers=np.linspace(0, 2, SCALAR))
    with pytest.raises(CheckpointError, match="codebook of 'scalar' has other values"):
        resume_run(tmp_path / "run", ["training.epochs=3"], progress=False)


@pytest.mark.usefixtures("stars")
def test_tasks_cannot_use_the_loss(stars):
    text = without_loss() + "tasks:\n  tokens: {head: language_model, loss: {name: meaningful, weight: 0.2}}\n"
    with pytest.raises(ConfigError, match=r"x\.yaml:6: tasks\.tokens\.loss: .* a task learns from one number"):
        load(text)
