"""The Triton kernels of the expected-value loss against formulas in float64, on the CPU by triton's interpreter."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from meaningful_problem import KINDS, TOLERANCES, Problem, check, from_hidden, total_of, values_of

from etude.multimodal.loss import fused, gpu, make_reconstruction
from etude.multimodal.loss.fused import ExpectationProblem, chunked_expectation
from etude.multimodal.loss.gpu_chunks import VectorTable
from etude.multimodal.loss.kinds import MeanSquaredError
from forked_python import run_python
from grids import sampled

SCALARS = {"number": (5,), "wide": (6, 1), "one": (1,)}
VECTORS = {"vector": (7, 3), "one_vector": (1, 4), "pair": (2, 17)}


@pytest.fixture
def kernel(monkeypatch):
    """Use the kernels on the CPU, and nothing in their place."""
    pytest.importorskip("triton")
    monkeypatch.setitem(fused.KERNELS, "cpu", gpu.expectation)

    def chunks(problem):
        assert not len(problem.hidden), "the chunks were taken"
        return chunked_expectation(problem)

    monkeypatch.setattr(gpu, "chunked_expectation", chunks)


def problem_of(kind="mse", dtype=torch.bfloat16, *, num=9, codes=7, width=4, size=3, seed=0, **options):
    """One modality, with a weight of 0 for every third position."""
    g = torch.Generator().manual_seed(seed)
    values = values_of((codes, size), g)
    weights = 0.5 + torch.rand(num, generator=g)
    weights[::3] = 0.0
    known = {
        "hidden": torch.randn(num, width, generator=g).to(dtype),
        "weight": torch.randn(codes, width, generator=g).to(dtype),
        "bias": torch.randn(codes, generator=g),
        "softcap": None,
        "targets": torch.randint(codes, (num,), generator=g),
        "row_weights": weights,
        "reconstruction": make_reconstruction(kind, values).on(torch.device("cpu"), torch.float32),
        "want_hidden": True,
        "want_weight": True,
        "want_bias": True,
        "chunk_rows": "auto",
    }
    return ExpectationProblem(**known | options)


def in_float64(p):
    return replace(
        p,
        hidden=p.hidden.double(),
        weight=p.weight.double(),
        bias=None if p.bias is None else p.bias.double(),
        row_weights=p.row_weights.double(),
        reconstruction=p.reconstruction.on(torch.device("cpu"), torch.float64),
    )


# ------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize(
    ("kind", "dtype", "bias", "softcap"),
    sampled(2, KINDS, [torch.bfloat16, torch.float32], [True, False], [None, 1.5]),
)
def test_every_kind_and_type(kernel, kind, dtype, bias, softcap):
    shapes = SCALARS | (VECTORS if dtype is torch.bfloat16 else {})
    problem = Problem(kind, dtype, num=13, shapes=shapes, bias=bias, softcap=softcap)
    for chunk in (3, "auto"):
        check(problem, lambda problem, chunk=chunk: from_hidden(problem, chunk), TOLERANCES[dtype])


@pytest.mark.parametrize("shape", [(300,), (300, 3), (140, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_more_codes_than_a_block(kernel, kind, shape):
    check(Problem(kind, torch.bfloat16, num=5, width=3, shapes={"a": shape}, seed=3), from_hidden, 3e-2)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    num=st.integers(1, 7),
    width=st.integers(1, 5),
    codes=st.integers(1, 40),
    size=st.one_of(st.just(1), st.integers(2, 20)),
    chunk=st.sampled_from([1, 2, 5, "auto"]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 0.9]),
    seed=st.integers(0, 1000),
)
def test_any_sizes(kernel, kind, num, width, codes, size, chunk, bias, softcap, seed):
    shapes = {"a": (codes, size)}
    problem = Problem(
        kind, torch.bfloat16, num=num, width=width, shapes=shapes, bias=bias, softcap=softcap, seed=seed
    )
    check(problem, lambda problem: from_hidden(problem, chunk), 5e-2)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_weight_0_leave_no_trace(kernel, kind, size):
    p = problem_of(kind, size=size)
    usual = gpu.expectation(p)
    counted = p.row_weights != 0
    assert not bool(usual.grad_hidden[~counted].any())
    fewer = replace(p, hidden=p.hidden[counted], targets=p.targets[counted], row_weights=p.row_weights[counted])
    without = gpu.expectation(fewer)
    torch.testing.assert_close(usual.losses[counted], without.losses)
    torch.testing.assert_close(usual.grad_hidden[counted], without.grad_hidden)
    torch.testing.assert_close(usual.grad_weight, without.grad_weight, rtol=0, atol=1e-2)
    torch.testing.assert_close(usual.grad_bias, without.grad_bias)
    again = gpu.expectation(replace(p, targets=torch.where(counted, p.targets, 6)))
    assert all(torch.equal(a, b) for a, b in zip(usual[2:], again[2:], strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy, of what is not finite
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_seen_and_spoils_no_other(kernel, kind, size):
    p = problem_of(kind, size=size)
    p.hidden[4] = float("nan")
    result = gpu.expectation(p)
    bad = torch.arange(9) == 4
    assert torch.equal(result.losses.isnan(), bad)
    assert torch.equal(result.squared_errors.isnan(), bad)
    assert torch.equal(result.grad_hidden.isnan().any(1), bad)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_asked_for_is_not_computed(kernel, kind, size):
    p = problem_of(kind, size=size)
    usual = gpu.expectation(p)
    none = gpu.expectation(replace(p, want_hidden=False, want_weight=False, want_bias=False))
    assert none[2:] == (None, None, None)
    assert torch.equal(none.losses, usual.losses)
    assert torch.equal(none.squared_errors, usual.squared_errors)
    one = gpu.expectation(replace(p, want_hidden=False, want_bias=False))
    assert (one.grad_hidden, one.grad_bias) == (None, None)
    assert torch.equal(one.grad_weight, usual.grad_weight)


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("kind", ["mse", "huber", "wasserstein"])
def test_mass_at_the_truth_leaves_no_error_of_rounding(kernel, kind, size):
    """Probabilities are rounded to bfloat16; divided by the sum of the rounded ones, the expected value stays put."""
    options = {"bias": None, "weight": torch.eye(7, 4).bfloat16(), "targets": torch.zeros(9, dtype=torch.long)}
    p = problem_of(kind, size=size, **options)
    p.hidden.zero_()[:, 0] = 12.0  # mass of 4e-5 elsewhere
    exact = chunked_expectation(in_float64(p))
    assert 0 < float(exact.losses.amin()) <= float(exact.losses.amax()) < (1e-3 if kind == "wasserstein" else 1e-7)
    found = gpu.expectation(p)
    torch.testing.assert_close(found.losses.double(), exact.losses, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.squared_errors.double(), exact.squared_errors, rtol=1e-2, atol=0)


@pytest.mark.parametrize("size", [2, 40])
def test_products_for_distances_have_the_digits_of_float32(size):
    values = torch.randn(50, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, right, norms = VectorTable(values - values.mean(0)).factors()
    values -= values.mean(0)
    products = left.double() @ right.double().t()
    error = (products - values @ values.t()).abs().amax() / norms.amax()
    assert float(error) < 2e-7


# ------------------------------------------------------------------------------------------ where it is used


def others():
    class Mine(MeanSquaredError):
        pass

    p = problem_of()
    yield "float64", in_float64(p)
    yield "float32", replace(p, hidden=p.hidden.float(), weight=p.weight.float())
    yield "own kind", replace(p, reconstruction=Mine(p.reconstruction.values).on(torch.device("cpu"), torch.float32))
    yield "no rows", replace(p, hidden=p.hidden[:0], targets=p.targets[:0], row_weights=p.row_weights[:0])


@pytest.mark.parametrize(("name", "problem"), list(others()))
def test_what_the_kernels_do_not_know_is_computed_in_chunks(monkeypatch, name, problem):
    seen = []
    monkeypatch.setattr(gpu, "chunked_expectation", lambda p: seen.append(p) or chunked_expectation(p))
    gpu.expectation(problem)
    assert seen == [problem]


def test_without_triton_chunks_are_taken_quietly(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "etude.multimodal.loss.triton_kernels", raising=False)
    monkeypatch.delattr("etude.multimodal.loss.triton_kernels", raising=False)
    p = problem_of()
    for found, expected in zip(gpu.expectation(p), chunked_expectation(p), strict=True):
        assert torch.equal(found, expected)


def test_a_kernel_that_fails_is_said_once_and_chunks_take_its_place(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("etude.multimodal.loss.triton_kernels", None, raising=False)
    monkeypatch.setattr(gpu, "_failed", False)
    monkeypatch.setattr(gpu, "_solve", fail)
    p = problem_of()
    with pytest.warns(RuntimeWarning, match="no compiler"):
        first = gpu.expectation(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = gpu.expectation(p)
    expected = chunked_expectation(p)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, first, second, strict=True))


def test_an_error_of_the_device_is_none_of_the_compiler(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("etude.multimodal.loss.triton_kernels", None, raising=False)
    monkeypatch.setattr(gpu, "_solve", fail)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.expectation(problem_of())


def test_importing_the_loss_imports_no_kernel():
    code = (
        "import sys, etude, etude.multimodal.loss;"
        "print(any(name.endswith(('triton_kernels', 'loss.gpu')) for name in sys.modules))"
    )
    found = run_python("-c", code)
    assert found.stdout.strip() == "False", found.stderr


def test_cuda_has_the_kernels(monkeypatch):
    seen = []
    monkeypatch.setattr(gpu, "expectation", seen.append)
    p = problem_of()
    fused.KERNELS["cuda"](p)
    assert seen == [p]


def test_the_same_call_gives_the_same_bits(kernel):
    problem = Problem("mse", torch.bfloat16, num=12, shapes={"a": (9, 5), "b": (8,)})

    def once():
        losses, squares = from_hidden(problem, 5)
        return [*losses, *squares, *torch.autograd.grad(total_of(losses), problem.inputs)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))
