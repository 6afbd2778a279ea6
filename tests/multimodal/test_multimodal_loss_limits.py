"""Expected values straight from hidden states at their limits: large and small numbers, memory, a device that runs."""

import contextlib
import copy
import pickle

import pytest
import torch
from meaningful_problem import (
    DELTA,
    KINDS,
    SIGMA,
    Problem,
    assert_near,
    formula,
    from_hidden,
    from_logits,
    total_of,
    values_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from etude.core import HeadOutput
from etude.multimodal.loss import fused, make_reconstruction, meaningful_terms
from etude.multimodal.loss.fused import ExpectationProblem, LossPart, chunked_expectation, expected_value_sums
from etude.multimodal.loss.terms import logits_sums
from largest_tensor import Largest

# ------------------------------------------------------------------------------------------ large and small numbers


@pytest.mark.parametrize("way", [from_hidden, from_logits])
@pytest.mark.parametrize("kind", KINDS)
def test_small_differences_of_large_values_survive_float32(kind, way):
    """At 1e6 float32 knows steps of 1/16: what is common to all values must be gone before they are rounded."""
    problem = Problem(kind, torch.float32, shapes={"a": (6,), "b": (5, 3)})
    problem.values = {name: 1e6 + 0.1 * values for name, values in problem.values.items()}
    exact_losses, exact_squares, leaves = problem.exact()
    losses, squares = way(problem)
    for found, expected in zip([*losses, *squares], [*exact_losses, *exact_squares], strict=True):
        assert_near(found, expected, 1e-5, least=1e-6)
    found = torch.autograd.grad(total_of(losses), problem.inputs)
    for mine, theirs in zip(found, torch.autograd.grad(total_of(exact_losses), leaves), strict=True):
        assert_near(mine, theirs, 1e-5, least=1e-6)


def test_bins_over_many_orders_of_magnitude_survive_float32():
    """The narrow bins among small values are far narrower than the digits of float32 at the mean of all."""
    edges = torch.logspace(-3, 5, 501, dtype=torch.float64)
    centres = (edges[1:] + edges[:-1]) / 2
    recon = make_reconstruction("hl_gauss", centres, edges=edges)
    targets = torch.arange(500)
    cpu = torch.device("cpu")
    found = recon.on(cpu, torch.float32).soft_targets(targets)
    sigmas = 0.75 * edges.diff()
    for target in (0, 1, 100, 250, 499):
        cdf = torch.distributions.Normal(centres[target], sigmas[target]).cdf(edges)
        expected = cdf.diff() / (cdf[-1] - cdf[0])
        torch.testing.assert_close(found[target].double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sum(1), torch.ones(500))
    torch.testing.assert_close(recon.on(cpu, torch.float64).soft_targets(targets).float(), found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(300, 64), (300, 2), (2, 3), (1, 5)])
def test_the_width_of_a_gaussian_around_a_vector_is_that_of_its_nearest_neighbour(shape):
    """Also where a vector's distance from itself is not 0 but what products have left."""
    values = 10 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sigmas = make_reconstruction("hl_gauss", values, hl_sigma=0.5).sigmas
    gaps = (values.double()[None] - values.double()[:, None]).square().mean(2).sqrt().fill_diagonal_(float("inf"))
    expected = 0.5 * gaps.amin(1) if len(values) > 1 else torch.tensor([0.5], dtype=torch.float64)
    torch.testing.assert_close(sigmas, expected, rtol=1e-6, atol=0)


def test_vectors_that_are_equal_share_the_target():
    values = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    values[7] = values[3]
    recon = make_reconstruction("hl_gauss", values)
    found = recon.soft_targets(torch.tensor([3, 7, 5]))
    torch.testing.assert_close(found[:2, 3], found[:2, 7])
    assert float(found[0, 3]) == float(found[0].max())
    assert float(found[2, 5]) > float(found[2, 3])
    others = torch.cdist(values, values)
    others[others < 1e-2] = float("inf")
    assert float(recon.sigmas[5]) == pytest.approx(0.75 * float(others[5].min()) / 4, rel=1e-4)
    same = make_reconstruction("hl_gauss", torch.ones(3, 2))
    torch.testing.assert_close(same.soft_targets(torch.arange(3)), torch.full((3, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_float16_beyond_its_range(kind):
    """Hidden states of 6e4, values of 1e5 and a loss scale of 65,536: the formula in float16 has no finite number."""
    problem = Problem(kind, torch.float16, shapes={"a": (6,), "b": (5, 3)})
    with torch.no_grad():
        problem.hidden.mul_(6e4 / problem.hidden.abs().max())
        problem.weight.mul_(1e-4)
    problem.values = {name: 1e5 * values for name, values in problem.values.items()}
    assert not torch.stack([values.half().square().sum() for values in problem.values.values()]).isfinite().all()
    losses, squares = from_hidden(problem)
    exact_losses, exact_squares, leaves = problem.exact()
    for found, expected in zip([*losses, *squares], [*exact_losses, *exact_squares], strict=True):
        assert_near(found, expected, 1e-4, least=1.0)
    # The size of the loss is divided out elsewhere; the scale comes on top of it, and must not overflow on the way.
    down = 2.0 / max(float(one.detach().abs()) for one in exact_losses) / 65536
    found = torch.autograd.grad(65536.0 * (down * total_of(losses)), problem.inputs)
    theirs = torch.autograd.grad(65536.0 * (down * total_of(exact_losses)), leaves)
    for mine, expected in zip(found, theirs, strict=True):
        assert bool(mine.isfinite().all())
        assert bool(mine.any())
        within = expected.abs().clamp_max(65504.0) * expected.sign()
        assert_near(mine, within, 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_float16_as_a_gpu_computes_them(kind):
    """Gradients are kept in float32 until what flows back is known: with values of 1e5 they are far beyond float16."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(num, 8, generator=g).half() for num in (11, 6))
    values, targets = 1e5 * values_of((6,), g), torch.arange(11) % 6
    recon = make_reconstruction(kind, values, huber_delta=DELTA, hl_sigma=SIGMA)
    own = recon.on(torch.device("cpu"), torch.float32)
    result = chunked_expectation(
        ExpectationProblem(hidden, weight, None, None, targets, torch.ones(11), own, True, True, False, 4)
    )
    exact = [one.double().requires_grad_() for one in (hidden, weight)]
    losses, squares = formula(kind, exact[0] @ exact[1].T, values, targets)
    assert_near(result.losses, losses, 5e-3)
    assert_near(result.squared_errors, squares, 5e-3)
    for mine, theirs in zip(result[2:4], torch.autograd.grad(losses.sum(), exact), strict=True):
        assert mine.dtype is torch.float32
        assert_near(mine, theirs, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_stay_finite(kind, dtype):
    problem = Problem(kind, dtype)
    with torch.no_grad():
        problem.hidden.mul_(1e4)
    losses, squares = from_hidden(problem, 5)
    grads = torch.autograd.grad(total_of(losses), problem.inputs)
    assert all(bool(one.isfinite().all()) for one in (*losses, *squares, *grads))


def test_bfloat16_adds_up_the_weights_gradient_in_float32():
    """1,024 rows give the same small push: added up in bfloat16 it would stop growing at 256 of them."""
    num = 1024
    hidden = torch.ones(num, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    part = LossPart(
        make_reconstruction("wasserstein", torch.tensor([0.0, 4.0])),
        slice(0, 2),
        None,
        torch.zeros(num, dtype=torch.int64),
        torch.ones(num),
    )
    (loss,), _ = expected_value_sums(HeadOutput(hidden, weight), [part], 1)
    assert float(loss.detach()) == 2.0 * num
    assert torch.autograd.grad(loss, weight)[0].flatten().tolist() == [-1.0 * num, 1.0 * num]


def test_losses_of_rows_of_weight_0_count_for_nothing_even_if_not_finite():
    problem = Problem("mse", torch.float32, shapes={"a": (6,)})
    problem.targets = 6 + torch.arange(29) % 6
    problem.row_weights[10:] = 0.0
    with torch.no_grad():
        problem.hidden[10:] = float("inf")
    (loss,), (square,) = from_hidden(problem)
    problem.hidden = problem.hidden.detach()[:10]
    problem.targets, problem.row_weights = problem.targets[:10], problem.row_weights[:10]
    assert_near(loss, problem.exact()[0][0], 1e-5)
    assert_near(square, problem.exact()[1][0], 1e-5)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", KINDS)
def test_reconstructions_can_be_copied(kind, again):
    for values in (torch.tensor([0.0, 1.0, 5.0]), torch.randn(3, 4)):
        recon = make_reconstruction(kind, values)
        logits, targets = torch.randn(3, 3), torch.arange(3)
        expected = recon.on(torch.device("cpu"), torch.float32).row_losses(logits, targets)
        found = again(recon).on(torch.device("cpu"), torch.float32).row_losses(logits, targets)
        assert torch.equal(found, expected)


def test_a_codebook_is_brought_to_a_device_and_type_once():
    recon = make_reconstruction("huber", torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64), huber_delta=0.3)
    one = recon.on(torch.device("cpu"), torch.float32)
    assert recon.on(torch.device("cpu"), torch.float32) is one
    assert (one.centred.dtype, one.delta, recon.centred.dtype) == (torch.float32, 0.3, torch.float64)
    exact = one.on(torch.device("cpu"), torch.float64)  # not of the rounded ones
    assert torch.equal(exact.centred, recon.centred)


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_all_logits_nor_all_probabilities_are_ever_held(kind, softcap, training):
    num, size, width, chunk = 400, 211, 4, 10
    problem = Problem(kind, torch.float32, num=num, width=width, shapes={"a": (size, 5)}, softcap=softcap)
    problem.targets = 6 + problem.targets % size
    parts = problem.parts()
    parts[0].reconstruction.on(torch.device("cpu"), torch.float32)
    head = problem.head
    with Largest() as largest, torch.set_grad_enabled(training):
        losses, _ = expected_value_sums(head, parts, chunk)
        if training:
            losses[0].backward()
    # A chunk of logits and one column (float64 for distances of vectors), or the inputs and their gradients.
    assert largest.numel <= max(chunk * (size + 1), num * width, (size + 6) * width, size * 6)
    assert largest.numel >= chunk * size
    with Largest() as largest:
        logits_sums(problem.head.logits, parts, metrics=False)
    assert largest.numel >= num * size


def test_terms_with_metrics_from_a_head_hold_a_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr(fused, "DEFAULT_CHUNK_BYTES", 1)  # as few rows as there can be: 64
    problem = Problem("huber", torch.float32, num=1000, width=4, shapes={"a": (97, 5), "b": (61,)})
    recon = {name: make_reconstruction("huber", values) for name, values in problem.values.items()}
    with Largest() as largest:
        terms = meaningful_terms(
            problem.head, problem.targets, problem.vocab, recon, {"a": 1.0, "b": 0.5}, sample_k=None, metrics=True
        )
        (terms["loss_a"].sum + terms["loss_b"].sum).backward()
    assert set(terms) == {"loss_a", "mse_a", "loss_b", "mse_b"}
    assert largest.numel <= max(64 * 97, 1000 * 4)


# ------------------------------------------------------------------------------------------ what a device is asked


WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "item", "equal")


class Waits(TorchDispatchMode):
    """Notes operations for whose result the host would wait on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.found.append(name)
        if name in ("index", "index_put", "index_put_"):
            indices = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.found.append(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on the CPU, so that code for other devices runs on it."""

    is_cpu = False


def elsewhere(tensor):
    found = tensor.as_subclass(Elsewhere)
    assert not found.is_cpu
    assert not found.reshape(-1).is_cpu
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sample_k", [None, 3, 20, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_way_of_other_devices_never_waits_and_agrees(kind, sample_k, training):
    """With 20 of 29 positions every modality has all of its own, and rows of others to fill up."""
    problem = Problem(kind, torch.float32, softcap=2.0)
    recon = {name: make_reconstruction(kind, values) for name, values in problem.values.items()}
    for one in recon.values():
        one.on(torch.device("cpu"), torch.float32)
    weights = dict.fromkeys(recon, 1.0)

    def once(targets, most):
        return meaningful_terms(problem.head, targets, problem.vocab, recon, weights, sample_k=most, metrics=True)

    with Waits() as waits, torch.set_grad_enabled(training):
        terms = once(elsewhere(problem.targets), sample_k)
        if training:
            sum(terms[f"loss_{name}"].sum for name in recon).backward()
    assert waits.found == []
    with Waits() as waits:
        usual = once(problem.targets, None)
    assert "nonzero" in waits.found  # what is asked is noticed
    for name, term in usual.items():
        assert int(terms[name].count) == int(term.count)
        assert float(terms[name].weight) == float(term.weight)
        if sample_k != 3:
            assert_near(terms[name].sum.as_subclass(torch.Tensor), term.sum, 1e-5, least=1.0)
    if training and sample_k != 3:
        found = [one.grad for one in problem.inputs]
        expected = torch.autograd.grad(sum(usual[f"loss_{name}"].sum for name in recon), problem.inputs)
        for mine, theirs in zip(found, expected, strict=True):
            assert_near(mine.as_subclass(torch.Tensor), theirs, 1e-5)


@pytest.mark.parametrize("sample_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_without_values_can_do_it_all(kind, sample_k, monkeypatch):
    """On the meta device there is nothing to look at: a value that the host needed would be an error."""
    monkeypatch.setattr(fused, "product_type", lambda hidden: hidden.dtype)  # torch knows no autocast there
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    problem = Problem(kind, torch.float32)
    recon = {name: make_reconstruction(kind, values) for name, values in problem.values.items()}
    hidden, weight, bias = (one.detach().to("meta").requires_grad_() for one in problem.inputs)
    for head in (HeadOutput(hidden, weight, bias, 2.0), HeadOutput(hidden, weight, bias, 2.0).logits):
        terms = meaningful_terms(
            head,
            problem.targets.to("meta"),
            problem.vocab,
            recon,
            dict.fromkeys(recon, 1.0),
            sample_k=sample_k,
            metrics=True,
        )
        assert {term.sum.device.type for term in terms.values()} == {"meta"}
        grads = torch.autograd.grad(sum(terms[f"loss_{name}"].sum for name in recon), (hidden, weight, bias))
        assert [grad.shape for grad in grads] == [one.shape for one in problem.inputs]
