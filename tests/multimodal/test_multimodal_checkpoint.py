"""Checkpoints of several modalities: vocabulary and codebooks are compared, and a resumed run is the same run."""

import json

import pytest
import torch
from multimodal_runs import SHORT, make_batches, make_model

from etude import MeaningfulLoss, Trainer, VocabSpec, build_vocab_spec
from etude.checkpoint import CheckpointManager, read_checkpoint
from etude.core import CheckpointError
from etude.losses import LanguageModelingLoss


def saved(folder, vocab, codebooks, **options):
    trainer = Trainer(
        make_model(vocab), make_batches(vocab, 2), output_dir=folder, vocab=vocab, codebooks=codebooks, **options
    )
    trainer.config = trainer.config.model_copy(update={"epochs": 1})
    trainer.train()
    return CheckpointManager(folder / "checkpoints").latest()


def test_checkpoint_remembers_the_vocabulary(tmp_path, vocab, codebooks):
    path = saved(tmp_path / "run", vocab, codebooks, use_ce=False, progress=False)
    meta = read_checkpoint(path).meta
    assert VocabSpec.from_dict(meta["vocab"]) == vocab
    config = meta["config"]
    assert [config[f"base_{name}"] for name in SHORT] == [6, 18, 26]
    assert config["vocab_size"] == 36
    assert config["loss_config"]["use_ce"] is False
    assert config["loss_config"]["weights"] == {"image": 0.1, "scalar": 0.1, "spectrum": 0.1}
    assert {name: one["shape"] for name, one in meta["codebooks"].items()} == {
        "image": [12, 3],
        "scalar": [8],
        "spectrum": [10, 4],
    }
    assert len({one["sha256"] for one in meta["codebooks"].values()}) == 3
    assert json.loads((path / "meta.json").read_text())["vocab"] == vocab.to_dict()


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ({"v_image": 8}, {}, "modality 'image' .*12 tokens from id 6.*8 tokens from id 6"),
        ({"special": ("PAD", "MISS")}, {}, "special token 'BOS' is only in the checkpoint"),
        ({"special": ("MISS", "PAD", "BOS", "EOS", "SEP", "MASK")}, {}, "special token 'PAD' .*id 0.*id 1"),
        ({"modalities": {"class": 2}}, {}, "modality 'class' is only in this run"),
        ({}, {"image": torch.ones(12, 5)}, r"codebook of 'image' .*\(12, 3\).*\(12, 5\)"),
        ({}, {"scalar": torch.linspace(-2, 2.5, 8)}, "the codebook of 'scalar' has other values"),
    ],
)
def test_checkpoint_of_another_vocabulary_is_refused(tmp_path, vocab, codebooks, sizes, changes, words):
    path = saved(tmp_path / "run", vocab, codebooks, progress=False)
    other = build_vocab_spec(**{"v_image": 12, "v_scalar": 8, "v_spectra": 10, **sizes})
    values = {name: changes.get(name, one)[: other.range_of(name).size] for name, one in codebooks.items()}
    trainer = Trainer(make_model(other), make_batches(other, 1), vocab=other, codebooks=values, progress=False)
    with pytest.raises(CheckpointError, match=words) as caught:
        trainer.load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert trainer.state.clock.step == 0


def test_what_tokens_mean_is_compared_and_not_how_they_are_trained(tmp_path, vocab, codebooks):
    path = saved(tmp_path / "run", vocab, codebooks, progress=False)
    as_arrays = {name: one.double().numpy() for name, one in codebooks.items()}
    for options in (
        {"vocab": vocab, "codebooks": as_arrays, "config": {"meaningful_loss": {"weight": 3.0, "kind": "huber"}}},
        {"loss": MeaningfulLoss(vocab, codebooks)},
        {},
    ):
        trainer = Trainer(make_model(vocab), make_batches(vocab, 1), progress=False, **options)
        trainer.load_checkpoint(path)
        assert trainer.state.clock.step == 2
    fewer = {"image": codebooks["image"]}
    trainer = Trainer(make_model(vocab), make_batches(vocab, 1), vocab=vocab, codebooks=fewer, progress=False)
    with pytest.raises(CheckpointError, match="codebook of 'scalar' is only in the checkpoint"):
        trainer.load_checkpoint(path)


@pytest.mark.parametrize(
    "own",
    [
        {"vocab": "gpt2", "codebooks": ["a", "b"]},
        {"vocab": {"size": 50257}, "codebooks": {"image": "vq.npz"}},
        {"vocab": {"special": 3, "modalities": None}, "codebooks": 7},
        {"vocab": {"special": {"PAD": 0}, "modalities": {"image": [6, 12]}}},
    ],
)
def test_facts_of_the_user_s_own_are_not_compared(tmp_path, vocab, codebooks, own):
    multimodal = Trainer(make_model(vocab), make_batches(vocab, 2), vocab=vocab, codebooks=codebooks, progress=False)
    plain = {"loss": LanguageModelingLoss(), "config": {"epochs": 1}, "progress": False}
    before = Trainer(make_model(vocab), make_batches(vocab, 2), meta=own, output_dir=tmp_path / "run", **plain)
    before.train()
    path = CheckpointManager(tmp_path / "run" / "checkpoints").latest()
    assert read_checkpoint(path).meta["vocab"] == own["vocab"]
    for now in (multimodal, Trainer(make_model(vocab), make_batches(vocab, 2), meta=own, **plain)):
        now.load_checkpoint(path)
        assert now.state.clock.step == 2


def test_codebooks_of_the_user_s_own_beside_a_vocabulary(tmp_path, vocab, codebooks):
    facts = {"vocab": vocab.to_dict(), "codebooks": {"image": "vq.npz"}}
    plain = {"loss": LanguageModelingLoss(), "config": {"epochs": 1}, "progress": False}
    Trainer(make_model(vocab), make_batches(vocab, 2), meta=facts, output_dir=tmp_path / "run", **plain).train()
    now = Trainer(make_model(vocab), make_batches(vocab, 2), vocab=vocab, codebooks=codebooks, progress=False)
    now.load_checkpoint(tmp_path / "run")
    assert now.state.clock.step == 2


def test_a_loss_made_by_hand_is_remembered_too(tmp_path, vocab, codebooks):
    trainer = Trainer(
        make_model(vocab),
        make_batches(vocab, 2),
        loss=MeaningfulLoss(vocab, codebooks),
        config={"epochs": 1},
        output_dir=tmp_path / "run",
        meta={"who": "me"},
        progress=False,
    )
    trainer.train()
    meta = read_checkpoint(CheckpointManager(tmp_path / "run" / "checkpoints").latest()).meta
    assert (meta["vocab"], meta["who"]) == (vocab.to_dict(), "me")


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("stop", [3, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 7))])
def test_resumed_run_draws_the_same_positions(tmp_path, vocab, codebooks, stop):
    batches = make_batches(vocab, 4)

    def trainer(folder, **config):
        return Trainer(
            make_model(vocab, dropout=0.1),
            batches,
            vocab=vocab,
            codebooks=codebooks,
            config={"epochs": 3, "meaningful_loss": {"sample_k": 2, "weight": 5.0}, **config},
            output_dir=folder,
            progress=False,
        )

    whole = trainer(tmp_path / "whole")
    whole.train()
    trainer(tmp_path / "parts", max_steps=stop).train()
    resumed = trainer(tmp_path / "parts")
    resumed.load_checkpoint(tmp_path / "parts")
    assert resumed.state.clock.step == stop
    resumed.train()
    for name, value in weights_of(whole).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    everything = trainer(tmp_path / "all", meaningful_loss={"weight": 5.0})
    everything.train()
    assert not torch.equal(everything.model.head.weight, whole.model.head.weight)  # sampling does make a difference
