"""Cross entropy and expected values as one number for a loop by hand, against the formula in float64."""

import numpy as np
import pytest
import torch
from combined_problem import BOOKS, IMAGE, PERIOD, SCALAR, SHORT, SPECTRUM, VOCAB, by_hand, make

from etude.core import DataError, HeadOutput
from etude.losses import linear_autograd
from etude.losses.chunked import chunked
from etude.multimodal import build_vocab_spec
from etude.multimodal.loss import bin_edges, combined_loss, make_reconstruction, meaningful_terms


@pytest.mark.parametrize("as_head", [True, False])
@pytest.mark.parametrize("use_ce", [True, False])
def test_against_the_formula(as_head, use_ce):
    hidden, weight, targets = make()
    config = {"sample_k": 4096, "weight_image": 0.3, "weight_scalar": 0.02, "weights": {"period": 1.5}}
    output = HeadOutput(hidden, weight) if as_head else hidden @ weight.T
    loss, stats = combined_loss(
        output, targets, VOCAB, **BOOKS, config=config, use_ce=use_ce, codebooks={"period": PERIOD}
    )
    books = {"image": IMAGE, "scalar": SCALAR, "spectrum": SPECTRUM, "period": PERIOD}
    weights = {"image": 0.3, "scalar": 0.02, "period": 1.5}
    total, numbers = by_hand(hidden @ weight.T, targets, weights, books, use_ce)
    assert list(stats) == ["loss_total", "loss_ce", "loss_img", "loss_sca", "loss_spec", "loss_class", "loss_period"]
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(stats["loss_total"], total.detach(), rtol=1e-12, atol=0)
    for name, expected in numbers.items():
        torch.testing.assert_close(stats[name], expected.detach(), rtol=1e-12, atol=0)
    assert float(stats["loss_class"]) == 0.0
    assert not any(one.requires_grad for one in stats.values())
    found = torch.autograd.grad(loss, (hidden, weight))
    for mine, theirs in zip(found, torch.autograd.grad(total, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["mse", "huber", "wasserstein", "hl_gauss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_and_a_head_give_the_same(kind, dtype):
    hidden, weight, targets = make(dtype, extra=3)
    head = HeadOutput(hidden, weight, softcap=3.0)
    config = {"kind": kind, "huber_delta": 0.4, "hl_sigma": 0.5}
    runs = []
    for output in (head, head.logits):
        loss, stats = combined_loss(output, targets, VOCAB, **BOOKS, config=config)
        runs.append([loss, *stats.values(), *torch.autograd.grad(loss, (hidden, weight), retain_graph=True)])
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_kinds_by_modality_and_their_options():
    hidden, weight, targets = make()
    logits = (hidden @ weight.T).detach()
    kinds = {"image": "wasserstein", "scalar": "huber"}
    config = {"kind": kinds, "huber_delta": 0.25}
    _, stats = combined_loss(logits, targets, VOCAB, **BOOKS, config=config)
    for name, values, kind in (
        ("image", IMAGE, "wasserstein"),
        ("scalar", SCALAR, "huber"),
        ("spectrum", SPECTRUM, "mse"),
    ):
        codes = VOCAB.decode(name, targets)
        own = logits[codes >= 0][:, VOCAB.range_of(name).slice]
        expected = make_reconstruction(kind, values, huber_delta=0.25).row_losses(own, codes[codes >= 0]).mean()
        assert float(stats[f"loss_{SHORT[name]}"]) == pytest.approx(float(expected), rel=1e-12)
    others = [
        float(combined_loss(logits, targets, VOCAB, **BOOKS, config={"kind": "hl_gauss", "hl_sigma": sigma})[0])
        for sigma in (0.3, 0.75, 2.0)
    ]
    assert len(set(others)) == 3
    assert float(combined_loss(logits, targets, VOCAB, **BOOKS, config={"kind": "hl_gauss"})[0]) == others[1]


def test_what_is_not_enabled_leaves_the_cross_entropy():
    hidden, weight, targets = make()
    logits = hidden @ weight.T
    for use_ce in (True, False):  # something has to be learned
        loss, stats = combined_loss(logits, targets, VOCAB, **BOOKS, config={"enabled": False}, use_ce=use_ce)
        torch.testing.assert_close(loss, by_hand(logits, targets, {}, {})[0], rtol=1e-12, atol=0)
        assert loss.requires_grad
        assert [name for name, value in stats.items() if float(value)] == ["loss_total", "loss_ce"]
    loss, _ = combined_loss(logits, targets, VOCAB)
    torch.testing.assert_close(loss, by_hand(logits, targets, {}, {})[0], rtol=1e-12, atol=0)


def test_without_cross_entropy_nothing_of_it_flows_back():
    hidden, weight, targets = make()
    loss, stats = combined_loss(hidden @ weight.T, targets, VOCAB, scalar_centers=SCALAR, use_ce=False)
    assert float(stats["loss_ce"]) > 0
    grad = torch.autograd.grad(loss, weight)[0]
    own = torch.zeros(VOCAB.vocab_size, dtype=torch.bool)
    own[VOCAB.range_of("scalar").slice] = True
    assert bool(grad[own].any())
    assert not bool(grad[~own].any())


@pytest.mark.parametrize("use_ce", [True, False])
def test_gradients_of_the_cross_entropy_are_computed_only_where_it_is_trained(use_ce, monkeypatch):
    seen = []
    monkeypatch.setitem(linear_autograd.KERNELS, "cpu", lambda problem: seen.append(problem) or chunked(problem))
    hidden, weight, targets = make()
    combined_loss(HeadOutput(hidden, weight), targets, VOCAB, scalar_centers=SCALAR, use_ce=use_ce)
    assert [problem.want_gradients for problem in seen] == [use_ce]


def test_a_weight_of_0_leaves_a_modality_out():
    hidden, weight, targets = make()
    logits = hidden @ weight.T
    loss, stats = combined_loss(logits, targets, VOCAB, **BOOKS, config={"weight_scalar": 0, "weight_image": 0.0})
    expected, _ = by_hand(logits, targets, {}, {"spectrum": SPECTRUM})
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert float(stats["loss_sca"]) == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int16, torch.int64])
def test_targets_of_any_integer_type(dtype):
    hidden, weight, targets = make()
    targets = targets.clamp_min(0)
    loss, _ = combined_loss(hidden @ weight.T, targets.to(dtype), VOCAB, **BOOKS)
    expected, _ = combined_loss(hidden @ weight.T, targets, VOCAB, **BOOKS)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("token", [0, 1, -100])
@pytest.mark.parametrize("as_head", [True, False])
def test_batches_without_values_have_a_gradient_of_0(token, as_head):
    hidden, weight, targets = make(torch.float32)
    head = HeadOutput(hidden, weight)
    loss, stats = combined_loss(
        head if as_head else head.logits, torch.full_like(targets, token), VOCAB, **BOOKS, use_ce=False
    )
    assert float(loss.detach()) == 0.0
    assert all(bool(value.isfinite()) for value in stats.values())
    assert (float(stats["loss_ce"]) > 0) == (token == 1)  # MISS is predicted like any other token
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_codebooks_of_all_kinds():
    hidden, weight, targets = make(torch.float32)
    expected, _ = combined_loss(hidden @ weight.T, targets, VOCAB, scalar_centers=SCALAR)
    for values in (SCALAR.numpy(), SCALAR.tolist(), SCALAR.double(), SCALAR[:, None], SCALAR.requires_grad_()):
        found, _ = combined_loss(hidden @ weight.T, targets, VOCAB, scalar_centers=values)
        torch.testing.assert_close(found, expected)
    SCALAR.requires_grad_(False)


def test_by_position_as_by_name():
    hidden, weight, targets = make()
    logits = hidden @ weight.T
    expected, _ = combined_loss(logits, targets, VOCAB, **BOOKS, config={"weight_image": 2.0}, use_ce=False)
    found, _ = combined_loss(logits, targets, VOCAB, IMAGE, SPECTRUM, SCALAR, {"weight_image": 2.0}, False)
    assert torch.equal(found, expected)
    books = {"image": IMAGE, "scalar": SCALAR, "spectrum": SPECTRUM}
    found, _ = combined_loss(logits, targets, VOCAB, codebooks=books, config={"weight_image": 2.0}, use_ce=False)
    assert torch.equal(found, expected)


def test_weights_of_the_three_modalities_are_allowed_where_there_are_others():
    vocab = build_vocab_spec(modalities={"mass": 3})
    config = {"enabled": True, "sample_k": 8, "weight_image": 0.1, "weight_scalar": 0.1, "weight_spectrum": 0.1}
    logits = torch.zeros(1, 2, 9)
    books = {"mass": torch.tensor([0.0, 1.0, 2.0])}
    _, stats = combined_loss(logits, torch.tensor([[6, 8]]), vocab, codebooks=books, config=config)
    assert {name: float(value) for name, value in stats.items() if name not in ("loss_ce", "loss_total")} == {
        "loss_img": 0.0,
        "loss_sca": 0.0,
        "loss_spec": 0.0,
        "loss_mass": 1.0,
    }


def test_edges_lie_halfway_and_as_far_out_as_in():
    assert bin_edges(torch.tensor([1.0, 2.0, 4.0, 5.0])).tolist() == [0.5, 1.5, 3.0, 4.5, 5.5]
    assert bin_edges(torch.tensor([7.0])).tolist() == [6.5, 7.5]


def test_codebooks_are_looked_at_once_in_a_loop(monkeypatch):
    """Checking them waits for a device; other tensors, changed ones and other settings are looked at again."""
    from etude.multimodal.loss import strategy

    calls = []
    usual = strategy.make_reconstructions
    monkeypatch.setattr(
        strategy, "make_reconstructions", lambda *given, **named: calls.append(1) or usual(*given, **named)
    )
    hidden, weight, targets = make(torch.float32)
    logits, centers = (hidden @ weight.T).detach(), SCALAR.clone()

    def looked(values, **config):
        calls.clear()
        _, stats = combined_loss(logits, targets, VOCAB, scalar_centers=values, config=config)
        codes = VOCAB.decode("scalar", targets)
        own = logits[codes >= 0][:, VOCAB.range_of("scalar").slice]
        recon = make_reconstruction(config.get("kind", "mse"), torch.as_tensor(values))
        expected = recon.row_losses(own, codes[codes >= 0]).mean()
        assert float(stats["loss_sca"]) == pytest.approx(float(expected), rel=1e-5)
        return len(calls)

    assert [looked(centers) for _ in range(3)] == [1, 0, 0]
    centers.mul_(2.0)
    assert [looked(centers) for _ in range(2)] == [1, 0]
    assert [looked(centers, kind="wasserstein") for _ in range(2)] == [1, 0]
    assert [looked(SCALAR + number) for number in range(3)] == [1, 1, 1]
    assert [looked(centers.numpy()) for _ in range(2)] == [1, 1]  # nobody can tell whether an array has changed
    with torch.inference_mode():
        values = SCALAR.clone()
    assert [looked(values) for _ in range(2)] == [1, 1]
    broken = centers.clone()
    looked(broken)
    broken[2] = float("nan")
    for _ in range(2):
        with pytest.raises(DataError, match="code 2 is not finite"):
            looked(broken)


@pytest.mark.parametrize("kind", ["mse", "huber", "wasserstein", "hl_gauss"])
def test_training_goes_on_after_a_call_in_inference_mode(kind):
    hidden, weight, targets = make(torch.float32)
    centers = SCALAR.clone()
    with torch.inference_mode():
        _, before = combined_loss(hidden @ weight.T, targets, VOCAB, scalar_centers=centers, config={"kind": kind})
    logits = (hidden @ weight.T).detach().requires_grad_()
    loss, after = combined_loss(logits, targets, VOCAB, scalar_centers=centers, config={"kind": kind})
    loss.backward()
    assert logits.grad.abs().sum() > 0
    assert float(before["loss_sca"]) == pytest.approx(float(after["loss_sca"]))


def test_edges_of_bins_are_used():
    hidden, weight, targets = make(torch.float64)
    centers = torch.linspace(0, 1, VOCAB.range_of("scalar").size, dtype=torch.float64)
    edges = bin_edges(centers)
    edges[0] -= 3.0
    config = {"kind": "hl_gauss", "weight_scalar": 1.0}
    guessed, uneven = (
        combined_loss(hidden @ weight.T, targets, VOCAB, scalar_centers=centers, edges=given, config=config)[1]
        for given in (None, {"scalar": edges})
    )
    codes = VOCAB.decode("scalar", targets)
    own = (hidden @ weight.T)[codes >= 0][:, VOCAB.range_of("scalar").slice]
    expected = make_reconstruction("hl_gauss", centers, edges=edges).row_losses(own, codes[codes >= 0]).mean()
    assert float(uneven["loss_sca"]) == pytest.approx(float(expected.detach()))
    assert float(guessed["loss_sca"]) != pytest.approx(float(expected.detach()), rel=1e-6)


def test_whole_numbers_are_values_too():
    hidden, weight, targets = make(torch.float32)
    logits = (hidden @ weight.T).detach()
    whole = combined_loss(logits, targets, VOCAB, scalar_centers=np.arange(5))[1]["loss_sca"]
    assert torch.equal(whole, combined_loss(logits, targets, VOCAB, scalar_centers=torch.arange(5.0))[1]["loss_sca"])


@pytest.mark.parametrize("kind", ["mse", "huber", "wasserstein", "hl_gauss"])
def test_autocast_does_not_round_values(kind):
    """A model that is sure of the right bin has no error, however many digits the values have."""
    size = VOCAB.range_of("scalar").size
    centers = torch.linspace(1000.3, 1007.1, size)
    targets = torch.arange(size) + VOCAB.base_scalar
    logits = torch.full((size, VOCAB.vocab_size), -50.0).scatter_(1, targets[:, None], 50.0)
    config = {"kind": kind, "hl_sigma": 1e-3}
    with torch.autocast("cpu", torch.bfloat16):
        _, stats = combined_loss(logits[None], targets[None], VOCAB, scalar_centers=centers, config=config)
    assert float(stats["loss_sca"]) == pytest.approx(0.0, abs=1e-6)


def test_autocast_does_not_round_the_squared_errors():
    size = VOCAB.range_of("scalar").size
    recon = {"scalar": make_reconstruction("wasserstein", torch.linspace(1000.3, 1007.1, size))}
    targets = torch.arange(size) + VOCAB.base_scalar
    logits = torch.full((size, VOCAB.vocab_size), -50.0).scatter_(1, targets[:, None], 50.0)
    with torch.autocast("cpu", torch.bfloat16):
        terms = meaningful_terms(logits, targets, VOCAB, recon, {"scalar": 1.0}, sample_k=None, metrics=True)
    assert float(terms["mse_sca"].sum) == pytest.approx(0.0, abs=1e-6)
