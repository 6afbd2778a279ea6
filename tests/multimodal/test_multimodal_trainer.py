"""Training over several modalities from Python: the loss of a `Trainer` and loops by hand."""

import joblib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from multimodal_runs import SHORT, make_batches, make_model

import etude
from etude import (
    CausalTransformerLM,
    MeaningfulLoss,
    Trainer,
    TrainingLoop,
    ValidationLoop,
    build_vocab_spec,
    combined_loss,
    configure_cuda_performance,
    load_config,
    set_seed,
)
from etude.checkpoint import CheckpointManager
from etude.multimodal import load_codebook, load_npz_key
from etude.optim import cosine_schedule_with_warmup

CONFIG = """\
vocab: {image: 12, scalar: 8, spectrum: 10}

training:
  seed: 0
  batch_size: 16
  epochs: 5
  learning_rate: 0.002
  weight_decay: 0.05
  warmup_steps: 3
  grad_clip: 1.0
  grad_accum_steps: 1
  num_workers: 0
  pin_memory: true
  log_every: 50
  save_every_steps: 3

  meaningful_loss:
    enabled: true
    sample_k_per_modality: 4096
    weight_image: 0.2
    weight_scalar: 0.3
    weight_spectrum: 0.4
"""
WEIGHTS = {"image": 0.2, "scalar": 0.3, "spectrum": 0.4}


def by_hand(model, batches, vocab, codebooks):
    """The numbers of an evaluation, from the formulas alone and in float64."""
    sums, counts = dict.fromkeys(("ce", *SHORT), 0.0), dict.fromkeys(("ce", *SHORT), 0)
    for batch in batches:
        with torch.no_grad():
            x = {key: value[:, :-1] for key, value in batch.items()}
            logits = model(x["tokens"], x["types"], x["attn_mask"]).double().reshape(-1, vocab.vocab_size)
        y = batch["tokens"][:, 1:].reshape(-1)
        counted = y != vocab.pad_id
        sums["ce"] += F.cross_entropy(logits[counted], y[counted], reduction="sum").item()
        counts["ce"] += int(counted.sum())
        for name, values in codebooks.items():
            modality, values = vocab.range_of(name), values.double().reshape(len(values), -1)
            rows = (y >= modality.base) & (y < modality.stop)
            expected = logits[rows][:, modality.slice].softmax(1) @ values
            errors = (expected - values[y[rows] - modality.base]).square().mean(1)
            sums[name] += errors.sum().item()
            counts[name] += int(rows.sum())
    return {name: sums[name] / counts[name] for name in sums}


@pytest.mark.parametrize("use_amp", [True, False])
def test_trainer_from_a_config_file(tmp_path, monkeypatch, codebooks, use_amp):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    img_codebook, spec_codebook, sca_centers = (codebooks[name] for name in ("image", "spectrum", "scalar"))

    config = load_config()
    set_seed(config.training.seed)
    configure_cuda_performance()
    vocab = build_vocab_spec(
        v_image=config.vocab.image,
        v_scalar=config.vocab.scalar,
        v_spectra=config.vocab.spectrum,
    )
    model = make_model(vocab)
    train_loader, val_loader = make_batches(vocab, 6), make_batches(vocab, 2, seed=9)
    trainer = Trainer(
        model=model,
        vocab=vocab,
        train_loader=train_loader,
        config=config.training,
        image_codebook=img_codebook,
        spectrum_codebook=spec_codebook,
        scalar_centers=sca_centers,
        device="cpu",
        output_dir="runs/experiment_001",
        use_amp=use_amp,
        use_ce=True,
        compile_model=False,
    )
    before = trainer.evaluate(train_loader)
    trainer.train(num_epochs=3)
    assert trainer.evaluate(train_loader)["loss_total"] < before["loss_total"]

    val_stats = trainer.evaluate(val_loader)
    expected, tolerance = by_hand(model, val_loader, vocab, codebooks), 1e-2 if use_amp else 1e-5
    assert val_stats["loss_ce"] == pytest.approx(expected["ce"], rel=tolerance)
    for name, short in SHORT.items():
        assert val_stats[f"loss_{short}"] == pytest.approx(expected[name], rel=tolerance)
    total = expected["ce"] + sum(weight * expected[name] for name, weight in WEIGHTS.items())
    assert val_stats["loss_total"] == val_stats["loss"] == pytest.approx(total, rel=tolerance)
    # What the file keeps under `training` reaches the trainer, although it has sections of its own. The schedule is as
    # long as the run, not as the file says.
    last = cosine_schedule_with_warmup(step=17, base_lr=0.002, warmup_steps=3, total_steps=18)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(last)
    assert trainer.optimizer.defaults["weight_decay"] == 0.05

    again = Trainer(
        model=make_model(vocab, n_layers=1),
        vocab=vocab,
        train_loader=train_loader,
        config=config.training,
        codebooks=codebooks,
        device="cpu",
        output_dir="runs/experiment_001",
    )
    again.load_checkpoint(CheckpointManager("runs/experiment_001/checkpoints").latest())
    assert again.state.clock.step == 18
    again.train()  # goes on to the 5 epochs of the file
    assert again.state.clock.step == 30


def test_use_ce_false_leaves_reconstruction_alone(vocab, codebooks):
    trainer = Trainer(
        make_model(vocab), make_batches(vocab, 4), vocab=vocab, codebooks=codebooks, use_ce=False, progress=False
    )
    stats = trainer.evaluate(make_batches(vocab, 2))
    parts = sum(0.1 * stats[f"loss_{short}"] for short in SHORT.values())
    assert stats["loss_total"] == pytest.approx(parts)
    assert stats["loss_ce"] > 0  # measured all the same
    assert Trainer(
        make_model(vocab), vocab=vocab, codebooks=codebooks, config={"meaningful_loss": {"use_ce": False}}
    ).evaluate(make_batches(vocab, 2))["loss_total"] == pytest.approx(parts)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_perplexity_of_an_epoch_is_that_of_the_tokens(vocab, codebooks, smoothing):
    model, batches = make_model(vocab), make_batches(vocab, 3)
    loss = MeaningfulLoss(vocab, codebooks, label_smoothing=smoothing)
    expected = np.exp(by_hand(model, batches, vocab, codebooks)["ce"])
    validated = ValidationLoop(loss).validate_epoch(model, batches)
    assert validated.perplexity == pytest.approx(expected, rel=1e-5)
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    trained = TrainingLoop(loss_strategy=loss).train_epoch(model, batches, frozen)
    assert trained.perplexity == pytest.approx(expected, rel=1e-5)
    assert validated.loss > 1.001 * np.log(expected)


def test_enabled_false_is_cross_entropy_alone(vocab, codebooks):
    config = {"meaningful_loss": {"enabled": False}}
    trainer = Trainer(make_model(vocab), vocab=vocab, codebooks=codebooks, config=config, progress=False)
    stats = trainer.evaluate(make_batches(vocab, 2))
    assert stats["loss_total"] == stats["loss_ce"]
    assert "loss_img" not in stats


def test_arrays_and_other_modalities():
    vocab = build_vocab_spec(v_scalar=6, modalities={"period": 5, "class": 3})
    codebooks = {"period": np.linspace(0, 1, 5), "scalar": np.arange(6.0)}
    config = {"meaningful_loss": {"weights": {"period": 2.0}, "weight": 0.5, "kind": {"period": "wasserstein"}}}
    trainer = Trainer(make_model(vocab), vocab=vocab, codebooks=codebooks, config=config, progress=False)
    stats = trainer.evaluate(make_batches(vocab, 3))
    total = stats["loss_ce"] + 0.5 * stats["loss_sca"] + 2.0 * stats["loss_period"]
    assert stats["loss_total"] == pytest.approx(total)
    assert stats["loss_period"] != pytest.approx(stats["mse_period"])  # the kind was taken
    assert stats["rmse_sca"] == pytest.approx(stats["loss_sca"] ** 0.5)
    assert "loss_class" not in stats  # it has no codebook


@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy])
def test_edges_of_bins_reach_the_loss(vocab, codebooks, form):
    edges = torch.tensor([-4.0, -1.9, -1.3, -0.5, 0.1, 0.4, 1.0, 1.5, 2.1])
    config = {"meaningful_loss": {"kind": {"scalar": "hl_gauss"}}}
    given = {"codebooks": codebooks, "config": config, "progress": False}
    batches = make_batches(vocab, 2)
    found, guessed = (
        Trainer(make_model(vocab), vocab=vocab, **given, **more).evaluate(batches)["loss_sca"]
        for more in ({"edges": {"scalar": form(edges)}}, {})
    )
    loss = MeaningfulLoss(vocab, codebooks, kind={"scalar": "hl_gauss"}, edges={"scalar": edges})
    assert found == Trainer(make_model(vocab), loss=loss, progress=False).evaluate(batches)["loss_sca"]
    assert abs(found - guessed) > 1e-5


def test_custom_training_loop(vocab, codebooks, capsys):
    device = "cpu"
    train_loader = make_batches(vocab, 8)
    model = make_model(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    img_codebook, spec_codebook, sca_centers = (codebooks[name] for name in ("image", "spectrum", "scalar"))
    losses = []

    for batch in train_loader * 3:
        tokens = batch["tokens"].to(device)
        types = batch["types"].to(device)
        attn_mask = batch["attn_mask"].to(device)

        # Next-token setup
        x = tokens[:, :-1]
        x_types = types[:, :-1]
        x_mask = attn_mask[:, :-1]
        y = tokens[:, 1:]

        # Forward pass
        logits = model(x, x_types, x_mask)

        # Compute loss
        loss, stats = combined_loss(
            logits=logits,
            targets=y,
            vocab=vocab,
            image_codebook=img_codebook,
            spectrum_codebook=spec_codebook,
            scalar_centers=sca_centers,
            config={
                "enabled": True,
                "sample_k": 4096,
                "weight_image": 0.1,
                "weight_scalar": 0.1,
                "weight_spectrum": 0.1,
            },
            use_ce=True,
        )

        # Backward pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        # Log statistics
        print(
            f"Loss: {stats['loss_ce']:.4f}, "
            f"Img: {stats['loss_img']:.4f}, "
            f"Sca: {stats['loss_sca']:.4f}, "
            f"Spec: {stats['loss_spec']:.4f}"
        )
        losses.append(loss.item())
    assert sum(losses[-8:]) < sum(losses[:8])
    assert len(capsys.readouterr().out.splitlines()) == 24


def test_a_loop_by_hand_and_the_trainer_train_the_same(vocab, codebooks):
    batches, models = make_batches(vocab, 5), [make_model(vocab), make_model(vocab)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    for batch in batches:
        tokens, types, mask = batch["tokens"], batch["types"], batch["attn_mask"]
        logits = models[0](tokens[:, :-1], types[:, :-1], mask[:, :-1])
        loss, _ = combined_loss(logits, tokens[:, 1:], vocab, codebooks=codebooks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    Trainer(
        models[1],
        batches,
        vocab=vocab,
        codebooks=codebooks,
        config={"epochs": 1, "gradient_clip_norm": None, "learning_rate": 0.1},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        progress=False,
    ).train()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_loading_codebooks(tmp_path, vocab, codebooks):
    joblib.dump({"centroids": codebooks["image"].numpy()}, tmp_path / "codebook_kmeans_2048.joblib")
    np.savez(tmp_path / "spectrum_tokenizer_config.npz", codebook=codebooks["spectrum"].numpy())
    np.savez(tmp_path / "scalar_tokenizer_config.npz", quantile_centers=codebooks["scalar"].numpy())
    img_codebook = load_codebook(
        tmp_path / "codebook_kmeans_2048.joblib",
        key_candidates=("centroids", "codebook", "centers"),
    )
    spec_codebook = load_npz_key(
        tmp_path / "spectrum_tokenizer_config.npz",
        key_candidates=("centroids", "codebook", "centers"),
    )
    sca_centers = load_npz_key(
        tmp_path / "scalar_tokenizer_config.npz",
        key_candidates=("bin_centers", "centers", "quantile_centers"),
    )
    files = {"image_codebook": img_codebook, "spectrum_codebook": spec_codebook, "scalar_centers": sca_centers}
    model, batches = make_model(vocab), make_batches(vocab, 2)
    assert Trainer(model, vocab=vocab, **files, progress=False).evaluate(batches) == Trainer(
        model, vocab=vocab, codebooks=codebooks, progress=False
    ).evaluate(batches)


def test_schedule_by_its_printed_arguments():
    def lr(step):
        return cosine_schedule_with_warmup(
            step=step, base_lr=2e-4, warmup_steps=2000, total_steps=200_000, min_lr_ratio=0.1
        )

    assert lr(0) == 0
    assert lr(1000) == pytest.approx(1e-4)
    assert lr(2000) == pytest.approx(2e-4)
    assert lr(101_000) == pytest.approx(1.1e-4)
    assert lr(200_000) == pytest.approx(2e-5)


def test_model_of_the_usual_size_can_be_made():
    vocab = build_vocab_spec(v_image=2048, v_scalar=512, v_spectra=1024)
    with torch.device("meta"):
        model = CausalTransformerLM(
            vocab_size=vocab.vocab_size,
            n_types=20,
            d_model=768,
            n_layers=12,
            n_heads=12,
            d_ff=3072,
            dropout=0.1,
            max_len=2048,
        )
        tokens = torch.zeros(2, 2048, dtype=torch.long)
        logits = model(tokens, tokens, torch.ones(2, 2048, dtype=torch.bool))
    assert logits.shape == (2, 2048, 3590)
    assert model.num_parameters() > 85e6


@pytest.mark.parametrize("fused", [False, True])
def test_accumulated_small_batches_are_one_large_batch(vocab, codebooks, fused):
    large = make_batches(vocab, 3, rows=8)
    small = [{key: value[i : i + 2] for key, value in batch.items()} for batch in large for i in range(0, 8, 2)]
    found = []
    for batches, accumulate in ((large, 1), (small, 4)):
        model = make_model(vocab).double()
        Trainer(
            model,
            batches,
            loss=MeaningfulLoss(vocab, codebooks, sample_k=None, weight=1.0, fused_head=fused),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            config={"epochs": 2, "grad_accum_steps": accumulate, "gradient_clip_norm": None, "precision": "fp32"},
            progress=False,
        ).train()
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-10, atol=1e-10)
    assert not torch.equal(found[0]["head.weight"], make_model(vocab).double().head.weight)


def test_names_at_the_top():
    for name in ("VocabSpec", "build_vocab_spec", "MeaningfulLoss", "combined_loss", "load_config"):
        assert getattr(etude, name).__name__ == name


def test_an_epoch_without_anything_to_learn_is_reported(vocab, codebooks, caplog):
    batch = {"tokens": torch.full((2, 5), vocab.miss_id), "types": torch.zeros(2, 5, dtype=torch.int64)}
    trainer = Trainer(
        make_model(vocab),
        [batch],
        vocab=vocab,
        codebooks=codebooks,
        use_ce=False,
        config={"epochs": 2},
        progress=False,
    )
    trainer.train()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "nothing was learned in epoch 1",
        "nothing was learned in epoch 2",
    ]
