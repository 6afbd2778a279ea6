"""The Triton kernel of linear_cross_entropy against the plain formula in float64; on a CPU by triton's interpreter."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from etude.core.errors import DataError
from etude.losses import linear_autograd, linear_cross_entropy, linear_cross_entropy_terms
from etude.losses.chunked import LinearProblem, chunked
from grids import sampled
from largest_tensor import Largest
from linear_formula import MASKS, TOLERANCES, assert_near, compare, doubled, formula, make, masked

triton = pytest.importorskip("triton")
linear_gpu = importlib.import_module("etude.losses.linear_gpu")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] + [torch.float16] * (DEVICE == "cuda")
"""On the CPU, float16 is computed in float32."""
BLOCK = 256
"""Logits of a block in half precision; in float32 there are two blocks in it."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy, of infinities


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """Use the kernel, in small blocks, for all rows: also for those that the CPU would leave out."""
    monkeypatch.setattr(linear_gpu, "BLOCK_BYTES", 2 * BLOCK)
    monkeypatch.setattr(linear_autograd, "DROP_BELOW", -1.0)
    monkeypatch.setitem(linear_autograd.KERNELS, DEVICE, linear_gpu.fused)


def moved(*tensors):
    """Return the tensors on the device under test."""
    return [
        None if one is None else one.detach().to(DEVICE).requires_grad_(one.is_floating_point()) for one in tensors
    ]


def check(shape, num_classes, width, dtype, mask_kind, smoothing, softcap, bias, chunk, seed=0, times=1):
    hidden, weight, offset, targets, g = make(shape, num_classes, width, dtype, bias=bias, seed=seed)
    targets, mask, element = masked(mask_kind, targets, g)
    hidden, weight, offset, targets = moved(hidden, weight, offset, targets)
    mask, element = None if mask is None else mask.to(DEVICE), element.to(DEVICE)
    compare(hidden, weight, offset, targets, mask, element, times * TOLERANCES[dtype], smoothing, softcap, chunk)


OPTIONS = [(0.0, None, False), (0.1, None, True), (0.0, 2.0, True), (0.2, 3.0, False)]


@pytest.mark.parametrize(("mask_kind", "dtype", "options"), sampled(4, MASKS, DTYPES, OPTIONS))
def test_types_masks_and_options(dtype, mask_kind, options):
    smoothing, softcap, bias = options
    check((2, 4), 300, 6, dtype, mask_kind, smoothing, softcap, bias, chunk=5)


CLASSES = [1, 2, 16, 63, 64, 65, 2 * BLOCK, 2 * BLOCK + 1]


@pytest.mark.parametrize(("num_rows", "num_classes", "dtype"), sampled(2, [1, 3], CLASSES, DTYPES))
def test_odd_shapes(num_rows, num_classes, dtype):
    for smoothing, softcap in [(0.0, None), (0.2, 2.0)]:
        check((num_rows,), num_classes, 3, dtype, "none", smoothing, softcap, True, "auto")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 6),
    num_classes=st.integers(1, 700),
    width=st.integers(1, 9),
    chunk=st.integers(1, 7),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(MASKS),
    smoothing=st.sampled_from([0.0, 0.3, 1.0]),
    softcap=st.sampled_from([None, 3.0]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_sizes(num_rows, num_classes, width, chunk, dtype, kind, smoothing, softcap, bias, seed):
    # With few rows, rounded numbers have nothing to cancel out with: the worst of all sizes needs more room.
    check((num_rows,), num_classes, width, dtype, kind, smoothing, softcap, bias, chunk, seed, times=2)


def problem_of(logits, labels, row_weights=None, dtype=torch.float32, **changes):
    """Return a problem with the given logits: hidden states are a unit matrix."""
    num_rows = len(logits)
    labels = torch.as_tensor(labels, device=DEVICE).expand(num_rows).contiguous()
    ones = torch.ones(num_rows, device=DEVICE)
    problem = LinearProblem(
        hidden=torch.eye(num_rows, device=DEVICE, dtype=dtype),
        weight=logits.T.to(DEVICE, dtype).contiguous(),
        bias=None,
        labels=labels,
        row_weights=ones if row_weights is None else torch.tensor(row_weights, device=DEVICE),
        label_smoothing=0.0,
        softcap=None,
        want_hidden=True,
        want_weight=True,
        want_bias=True,
        chunk_rows="auto",
    )
    return replace(problem, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_prediction_is_the_first_of_the_largest(dtype):
    """Everywhere in a row, in every order: within what a thread reads, between threads and between blocks."""
    places = [0, 1, 7, 8, 9, 40, BLOCK - 1, BLOCK, BLOCK + 9, 2 * BLOCK + 5]
    pairs = list(itertools.combinations(places, 2))[:: 1 if DEVICE == "cuda" else 4]
    for first, second in pairs:
        logits = torch.zeros(2, 2 * BLOCK + 30)
        logits[0, [first, second]] = 3.0
        logits[1, [first, second]] = torch.tensor([-1.0, 2.0])
        assert linear_gpu.fused(problem_of(logits, 0, dtype=dtype)).predicted.tolist() == [first, second]


def test_rows_that_are_not_finite():
    """A NaN anywhere makes the prediction -1 and the loss NaN; infinite logits alone can still be compared."""
    inf, nan, size = float("inf"), float("nan"), BLOCK + 50
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(0))
    logits[0, -1] = nan
    logits[1, 5] = inf
    logits[2, :] = -inf
    logits[3, 7] = -inf
    logits[4, :] = nan
    weights = torch.ones(size, 6, device=DEVICE)

    def solved(kernel):
        # The logits come in as a bias, one row at a time: products would spread what is not finite over all rows.
        rows = [problem_of(torch.zeros(1, size), 3, bias=row.to(DEVICE)) for row in logits]
        return [kernel(replace(row, weight=weights[:, :1] * 0)) for row in rows]

    for mine, theirs in zip(solved(linear_gpu.fused), solved(chunked), strict=True):
        assert mine.predicted.tolist() == theirs.predicted.tolist()
        torch.testing.assert_close(mine.losses, theirs.losses, equal_nan=True)
        torch.testing.assert_close(mine.grad_weight, theirs.grad_weight, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_weight_have_no_gradient_whatever_they_are(dtype, bad):
    hidden, weight, bias, targets, _ = make((6,), 300, dtype=dtype)
    hidden, weight, bias, targets = moved(hidden, weight, bias, targets)
    targets = targets.detach()
    targets[2:4] = -100
    whole = linear_cross_entropy_terms(hidden, weight, targets, bias, label_smoothing=0.1, metrics=True)
    expected = torch.autograd.grad(whole["loss"].sum, (hidden, weight, bias))
    hidden.data[2:4] = bad
    found_terms = linear_cross_entropy_terms(hidden, weight, targets, bias, label_smoothing=0.1, metrics=True)
    found = torch.autograd.grad(found_terms["loss"].sum, (hidden, weight, bias))
    assert not found[0][2:4].any()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    for name, term in whole.items():
        assert torch.equal(found_terms[name].sum, term.sum)


def test_a_row_that_counts_and_is_nan_is_not_hidden():
    hidden, weight, bias, targets = moved(*make((4,), 20)[:4])
    hidden.data[1] = float("nan")
    loss = linear_cross_entropy(hidden, weight, targets, bias).sum
    assert loss.isnan()
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert grads[0][1].isnan().all()
    assert grads[1].isnan().all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_float16_gradients_neither_vanish_nor_overflow(scale, monkeypatch):
    """Also with weights of the rows far from 1, as a mask may have."""
    if DEVICE == "cpu":  # where products of float16 do not add up in float32
        monkeypatch.setattr(linear_gpu, "product", lambda a, b, out: out.copy_(a.float() @ b.float()))
        monkeypatch.setattr(linear_gpu, "add_product", lambda a, b, out: out.add_(a.float() @ b.float()))
    hidden, weight, bias, targets = moved(*make((5,), 3001, dtype=torch.float16)[:4])
    problem = LinearProblem(
        hidden=hidden.detach(),
        weight=weight.detach(),
        bias=bias.detach().float(),
        labels=targets,
        row_weights=scale * torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], device=DEVICE),
        label_smoothing=0.0,
        softcap=None,
        want_hidden=True,
        want_weight=True,
        want_bias=True,
        chunk_rows=2,
    )
    found = linear_gpu.fused(problem)
    exact = doubled(hidden, weight, bias)
    loss = formula(*exact, targets, problem.row_weights.double())[0]
    expected = torch.autograd.grad(loss, exact)
    for mine, theirs in zip((found.grad_weight, found.grad_bias), expected[1:], strict=True):
        assert_near(mine / scale, theirs / scale, TOLERANCES[torch.float16])
        error = (mine - theirs).abs() / theirs.abs()
        assert error.median() < 2e-3  # most are sums of tiny probabilities
    if scale == 1.0:  # this one is in float16, where the others are too small or too large
        assert_near(found.grad_hidden, expected[0], TOLERANCES[torch.float16])


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_what_is_asked_for_is_computed(wanted):
    options = dict(zip(("want_hidden", "want_weight", "want_bias"), wanted, strict=True))
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    found, expected = (kernel(problem_of(logits, 3, **options)) for kernel in (linear_gpu.fused, chunked))
    assert tuple(one is not None for one in found[3:]) == wanted
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


def test_the_same_call_gives_the_same_bits():
    hidden, weight, bias, targets = moved(*make((6,), 700)[:4])

    def once():
        term = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=4)
        return [term.sum, *torch.autograd.grad(term.sum, (hidden, weight, bias))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("num_classes", [70, 128])
def test_one_chunk_of_logits_is_held(num_classes, monkeypatch):
    monkeypatch.setattr(linear_gpu, "ROW_TILE", 16)
    monkeypatch.setattr(linear_gpu, "LOGITS_BYTES", 4 * 16 * 130)
    hidden, weight, bias, targets = moved(*make((20,), num_classes, 3)[:4])
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, bias).sum.backward()
    assert largest.numel == 16 * 128 * (1 if DEVICE == "cuda" else 4)  # the interpreter copies bytes


@pytest.mark.skipif(DEVICE == "cuda", reason="there it ends the process")
def test_labels_out_of_range():
    hidden, weight, bias, targets, _ = make((4,), 5)
    targets[2] = 5
    with pytest.raises(DataError, match="found 5"):
        linear_cross_entropy(hidden, weight, targets, bias)


def test_float64_and_no_rows_are_left_to_chunks(monkeypatch):
    monkeypatch.setitem(linear_autograd.KERNELS, DEVICE, linear_autograd._with_triton)
    monkeypatch.setattr(linear_gpu, "fused", None)
    for shape, dtype in [((4,), torch.float64), ((0,), torch.float32)]:
        check(shape, 20, 3, dtype, "none", 0.0, None, True, "auto")


def test_a_kernel_that_cannot_be_compiled_is_reported_once_and_replaced(monkeypatch):
    calls = []

    def fails(*_, **__):
        calls.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setitem(linear_autograd.KERNELS, "cpu", lambda problem: linear_autograd.KERNELS["cuda"](problem))
    monkeypatch.setitem(linear_autograd.KERNELS, "cuda", linear_autograd._with_triton)
    monkeypatch.setattr(linear_gpu.linear_triton, "cross_entropy_rows", {(4,): fails})
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        check((4,), 20, 3, torch.float32, "none", 0.0, None, True, "auto")
    check((4,), 20, 3, torch.float32, "none", 0.0, None, True, "auto")
    assert calls == [1]
