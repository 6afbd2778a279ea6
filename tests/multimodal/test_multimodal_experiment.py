"""Config files over several modalities: `vocab`, the loss `meaningful`, where it may be written, and whole runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from star_configs import BOTH, CONFIG, IMAGE, SCALAR, load, strategy, without_loss, write

from etude import Trainer
from etude.checkpoint import CheckpointManager, read_checkpoint
from etude.config import Document
from etude.core import CheckpointError, ConfigError
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
from etude.multimodal import MeaningfulLoss, ScalarTokenizer, VectorTokenizer, VocabSpec
from etude.multimodal.loss import make_reconstruction
from etude.multimodal.tokenizers import load_tokenizer

pytestmark = pytest.mark.usefixtures("own_folder")


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


def test_schema_knows_the_section_and_the_loss():
    schema = json.dumps(experiment_schema())
    for word in ('"meaningful"', "hl_gauss", '"vocab"', '"spectrum"', "sample_k"):
        assert word in schema


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
    path, numbers, *_ = evaluate_run(tmp_path / "whole", split="test")
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
