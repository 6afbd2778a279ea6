"""The Triton kernels of the expected-value loss on a CUDA device, against the plain formula in float64."""

import pytest
import torch

from etude.core import HeadOutput
from etude.multimodal.loss import fused, gpu, make_reconstruction
from etude.multimodal.loss.fused import ExpectationProblem, LossPart, expected_value_sums

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

KINDS = ["mse", "huber", "wasserstein", "hl_gauss"]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative to the largest: of losses of rows, of gradients of hidden states, weights and bias."""


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    """Neither the chunks nor a warning may stand in for the kernels."""

    def refuse(problem):
        raise AssertionError("the chunks were taken")

    monkeypatch.setattr(gpu, "chunked_expectation", refuse)
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def make(kind, num, codes, width, size, dtype, *, bias=True, softcap=None, chunk="auto"):
    g = torch.Generator("cuda").manual_seed(num + codes + size)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float64, generator=g)

    values = draw(codes, size)
    recon = make_reconstruction(kind, values.sort(0).values if size == 1 else values, huber_delta=0.7)
    weights = torch.rand(num, device="cuda", generator=g) + 0.5
    weights[::5] = 0.0
    return ExpectationProblem(
        hidden=draw(num, width).to(dtype),
        weight=(2.0 * width**-0.5 * draw(codes, width)).to(dtype),
        bias=draw(codes).float() if bias else None,
        softcap=softcap,
        targets=torch.randint(codes, (num,), device="cuda", generator=g),
        row_weights=weights,
        reconstruction=recon.on(torch.device("cuda"), torch.float32),
        want_hidden=True,
        want_weight=True,
        want_bias=bias,
        chunk_rows=chunk,
    )


def exact(p):
    """Losses, squared errors and gradients by torch, from the formula in float64."""
    leaves = [None if one is None else one.double().requires_grad_() for one in (p.hidden, p.weight, p.bias)]
    logits = HeadOutput(*leaves, p.softcap).logits
    recon = p.reconstruction.on(torch.device("cuda"), torch.float64)
    losses = recon.row_losses(logits, p.targets)
    squares = (torch.softmax(logits, 1) @ recon.centred - recon.centred[p.targets]).square().mean(1)
    total = (losses * p.row_weights).sum()
    given = [one for one in leaves if one is not None]
    grads = iter(torch.autograd.grad(total, given))
    return losses.detach(), squares.detach(), *(None if one is None else next(grads) for one in leaves)


def check(p, tolerance):
    """Compare the kernel with the formula. Losses of rows of weight 0 are those of any target."""
    counted = p.row_weights != 0
    for name, mine, theirs in zip(fused.ExpectationResult._fields, fused.KERNELS["cuda"](p), exact(p), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            if mine.dim() == 1 and name != "grad_bias":
                mine, theirs = mine[counted], theirs[counted]
            scale = max(theirs.abs().max().item(), 0.1)
            error = (mine.double() - theirs).abs().max().item() / scale
            assert error < tolerance, f"{name}: {error}"


VECTORS = [(333, 300, 40, 3), (130, 2, 7, 16), (257, 2049, 96, 256), (64, 1100, 32, 100)]
SCALARS = [(333, 300, 40), (64, 2, 7), (257, 5001, 96)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num", "codes", "width", "size"), VECTORS)
def test_vectors(kind, num, codes, width, size):
    plain = make(kind, num, codes, width, size, torch.bfloat16, bias=False)
    check(plain, TOLERANCES[torch.bfloat16])
    full = make(kind, num, codes, width, size, torch.bfloat16, softcap=5.0, chunk=100)
    check(full, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num", "codes", "width"), SCALARS)
def test_scalars(kind, dtype, num, codes, width):
    full = make(kind, num, codes, width, 1, dtype, softcap=5.0, chunk=100)
    check(full, TOLERANCES[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 16])
def test_rows_of_weight_0_and_rows_that_are_not_finite(kind, size):
    p = make(kind, 64, 300, 32, size, torch.bfloat16)
    p.hidden[7] = float("nan")
    result = fused.KERNELS["cuda"](p)
    assert not bool(result.grad_hidden[p.row_weights == 0].any())
    bad = torch.zeros(64, dtype=torch.bool, device="cuda")
    bad[7] = True
    assert torch.equal(result.losses.isnan(), bad)
    assert torch.equal(result.squared_errors.isnan(), bad)
    assert torch.equal(result.grad_hidden.isnan().all(1), bad)


def whole(kind, size, num=512, codes=300, width=64):
    """A head under autocast, its part, and a function of both that returns the loss and gradients."""
    p = make(kind, num, codes, width, size, torch.bfloat16)
    hidden, weight = p.hidden.requires_grad_(), p.weight.float().requires_grad_()
    part = LossPart(p.reconstruction, slice(0, codes), None, p.targets, p.row_weights)

    def once():
        with torch.autocast("cuda", torch.bfloat16):
            losses, squares = expected_value_sums(HeadOutput(hidden, weight, None), [part])
        return [losses[0].detach(), squares[0], *torch.autograd.grad(losses[0], (hidden, weight))]

    return once


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100])
def test_no_waiting_the_same_bits_and_a_captured_graph(no_waiting, kind, size):
    once = whole(kind, size)
    first = once()
    no_waiting(True)
    second = once()
    no_waiting(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    for one in captured:
        one.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))


def test_the_error_is_less_than_that_of_autocast():
    """Of gradients less than half; the plain formula under bf16 autocast rounds logits and expected values.

    Losses have that of a codebook in bfloat16: 0.04 %, by chance up or down, so that of a sum is far less.
    """
    p = make("mse", 1024, 8192, 768, 256, torch.bfloat16, bias=False)
    losses, _, grad_hidden, grad_weight, _ = exact(p)
    found = fused.KERNELS["cuda"](p)
    hidden, weight = p.hidden.requires_grad_(), p.weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        plain = p.reconstruction.row_losses((hidden @ weight.t()).float(), p.targets)
        grads = torch.autograd.grad((plain * p.row_weights).sum(), (hidden, weight))

    def error(mine, theirs):
        return ((mine.double() - theirs).norm() / theirs.norm()).item()

    counted = p.row_weights != 0
    assert error(found.losses[counted], losses[counted]) < 1e-3
    assert error(found.losses[counted].sum(), losses[counted].sum()) < 1e-4
    assert error(found.grad_hidden, grad_hidden) < 0.5 * error(grads[0], grad_hidden)
    assert error(found.grad_weight, grad_weight) < 0.5 * error(grads[1], grad_weight)
