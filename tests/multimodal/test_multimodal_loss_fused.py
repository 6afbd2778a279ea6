"""Expected values straight from hidden states, against formulas in float64: values, gradients, what autograd asks."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from meaningful_problem import (
    KINDS,
    TOLERANCES,
    Problem,
    assert_near,
    check,
    from_hidden,
    from_logits,
    sums_of,
    total_of,
    values_of,
)

from etude.core import HeadOutput, TrainingError
from etude.multimodal.loss import fused, make_reconstruction, meaningful_terms
from etude.multimodal.loss.fused import chunked_expectation, expected_value_sums
from etude.multimodal.loss.terms import logits_sums
from grids import sampled

# ------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize(
    ("kind", "dtype", "bias", "softcap"), sampled(2, KINDS, TOLERANCES, [True, False], [None, 1.5])
)
def test_every_kind_and_type(kind, dtype, bias, softcap):
    problem = Problem(kind, dtype, bias=bias, softcap=softcap)
    for chunk in (1, 2, 7, 1000, "auto"):
        check(problem, lambda problem, chunk=chunk: from_hidden(problem, chunk), TOLERANCES[dtype])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_twin_that_takes_logits(kind, dtype, softcap):
    check(Problem(kind, dtype, softcap=softcap), from_logits, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_half_precision_are_worth_what_they_are(kind, dtype):
    problem = Problem(kind, dtype)
    logits = problem.head.logits.detach().requires_grad_()
    losses, squares = sums_of(logits, problem.parts())
    exact = logits.detach().double().requires_grad_()
    more, squares_more = sums_of(exact, problem.parts())
    for found, expected in zip([*losses, *squares], [*more, *squares_more], strict=True):
        assert found.dtype is torch.float32
        assert_near(found, expected, 1e-5, least=1.0)
    mine = torch.autograd.grad(total_of(losses), logits)[0]
    assert mine.dtype is dtype
    assert_near(mine, torch.autograd.grad(total_of(more), exact)[0], 1e-2 if dtype is torch.bfloat16 else 1e-3)


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num=st.integers(0, 23),
    width=st.integers(1, 6),
    shapes=st.lists(
        st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 5))),
        min_size=1,
        max_size=4,
    ),
    chunk=st.sampled_from([1, 2, 3, 5, 11, 100, "auto"]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 0.9]),
    seed=st.integers(0, 1000),
)
def test_any_sizes_in_float64(kind, num, width, shapes, chunk, bias, softcap, seed):
    named = {f"m{place}": shape for place, shape in enumerate(shapes)}
    problem = Problem(kind, num=num, width=width, shapes=named, bias=bias, softcap=softcap, seed=seed)
    check(problem, lambda problem: from_hidden(problem, chunk), 1e-10)
    check(problem, from_logits, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_one_modality(kind):
    problem = Problem(kind, shapes={"a": (5, 2)})
    problem.targets = 6 + torch.randint(5, (29,), generator=torch.Generator().manual_seed(0))
    assert problem.parts()[0].rows is None
    for chunk in (1, 4, "auto"):
        check(problem, lambda problem, chunk=chunk: from_hidden(problem, chunk), 1e-12)
    check(problem, from_logits, 1e-12)


@pytest.mark.parametrize("softcap", [None, 1.2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, softcap):
    problem = Problem(kind, num=6, width=2, shapes={"a": (4, 2), "b": (3,), "c": (1,)}, softcap=softcap, seed=4)
    parts = problem.parts()
    assert sum(len(part.targets) for part in parts) >= 3

    def loss(hidden, weight, bias):
        return tuple(expected_value_sums(HeadOutput(hidden, weight, bias, softcap), parts, 2)[0])

    assert torch.autograd.gradcheck(loss, (problem.hidden, problem.weight, problem.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_vectors_of_one_number_are_the_same(kind):
    """Apart from hl_gauss with edges, which only numbers have, (V,) and (V, 1) mean one thing."""
    values = values_of((6,), torch.Generator().manual_seed(1)).float()
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(6)
    flat, column = (make_reconstruction(kind, one) for one in (values, values[:, None]))
    torch.testing.assert_close(flat.row_losses(logits, targets), column.row_losses(logits, targets))
    torch.testing.assert_close(flat.expected(logits), column.expected(logits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filled_with", ["PAD", "MISS", -100])
@pytest.mark.parametrize("as_head", [True, False])
def test_batches_without_any_value(kind, filled_with, as_head):
    problem = Problem(kind, torch.float32)
    token = filled_with if isinstance(filled_with, int) else problem.vocab.special[filled_with]
    recon = {name: make_reconstruction(kind, values) for name, values in problem.values.items()}
    terms = meaningful_terms(
        problem.head if as_head else problem.head.logits,
        torch.full((29,), token),
        problem.vocab,
        recon,
        dict.fromkeys(recon, 1.0),
        sample_k=5,
        metrics=True,
    )
    assert len(terms) == len(recon) * (1 if kind == "mse" else 2)  # the squared error is the loss itself
    assert all(float(term.sum.detach()) == 0.0 and float(term.count) == 0.0 for term in terms.values())
    grads = torch.autograd.grad(sum(terms[f"loss_{name}"].sum for name in ("one", "number")), problem.inputs)
    assert not any(bool(grad.any()) for grad in grads)


# ------------------------------------------------------------------------------------------ what autograd asks


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_only_the_gradients_asked_for_are_computed(wanted, monkeypatch):
    problem = Problem("mse", shapes={"a": (5,), "b": (3, 2)})
    losses, _, leaves = problem.exact()
    expected = torch.autograd.grad(total_of(losses), leaves)
    for place, tensor in enumerate(problem.inputs):
        tensor.requires_grad_(place in wanted)
    seen = []
    monkeypatch.setitem(
        fused.KERNELS, "cpu", lambda given_: seen.append((given_, chunked_expectation(given_))) or seen[-1][1]
    )
    losses, _ = from_hidden(problem)
    assert len(seen) == 2
    for one, result in seen:
        asked = (one.want_hidden, one.want_weight, one.want_bias)
        # A head counts as computed from its weights: its hidden states have a gradient if anything has.
        assert asked == (bool(wanted), 1 in wanted, 2 in wanted)
        assert tuple(found is not None for found in result[2:]) == asked
    assert all(loss.requires_grad == bool(wanted) for loss in losses)
    if wanted:
        total_of(losses).backward()
    for place, tensor in enumerate(problem.inputs):
        assert (tensor.grad is not None) == (place in wanted)
        if tensor.grad is not None:
            assert_near(tensor.grad, expected[place], 1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_none_are_computed(kind, mode, monkeypatch):
    problem = Problem(kind, torch.float32)
    expected = [float(one.detach()) for one in (*problem.exact()[0], *problem.exact()[1])]
    seen = []
    monkeypatch.setitem(fused.KERNELS, "cpu", lambda given_: seen.append(given_) or chunked_expectation(given_))
    with mode():
        for losses, squares in (from_hidden(problem), from_logits(problem)):
            assert not any(one.requires_grad for one in (*losses, *squares))
            assert [float(one) for one in (*losses, *squares)] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert not any(one.want_hidden or one.want_weight or one.want_bias for one in seen)


def test_a_kernel_for_a_device_takes_the_place_of_the_chunks(monkeypatch):
    def doubled(given_):
        result = chunked_expectation(given_)
        return result._replace(
            losses=2 * result.losses,
            **{key: 2 * getattr(result, key) for key in ("grad_hidden", "grad_weight", "grad_bias")},
        )

    problem = Problem("huber")
    usual = torch.autograd.grad(total_of(from_hidden(problem)[0]), problem.inputs)
    monkeypatch.setitem(fused.KERNELS, "cpu", doubled)
    losses, squares = from_hidden(problem)
    assert_near(total_of(losses), 2 * total_of(problem.exact()[0]), 1e-12)
    assert_near(total_of(squares), total_of(problem.exact()[1]), 1e-12)
    for mine, theirs in zip(torch.autograd.grad(total_of(losses), problem.inputs), usual, strict=True):
        torch.testing.assert_close(mine, 2 * theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(dtype):
    problem = Problem("wasserstein", dtype)
    losses, _ = from_hidden(problem)
    runs = [torch.autograd.grad(total_of(losses), problem.inputs, retain_graph=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    single = torch.autograd.grad(losses[0], problem.inputs, retain_graph=True)
    exact, _, leaves = problem.exact()
    for mine, theirs in zip(single, torch.autograd.grad(exact[0], leaves), strict=True):
        assert_near(mine, theirs, TOLERANCES[dtype])


def test_no_second_derivative_of_hidden_states_but_of_logits():
    problem = Problem("huber", num=5, width=2, shapes={"a": (4, 2), "b": (3,)}, seed=4)
    losses, _ = from_hidden(problem)
    with pytest.raises(TrainingError, match="no second derivative: pass logits"):
        torch.autograd.grad(total_of(losses), problem.inputs, create_graph=True)
    parts = problem.parts()
    logits = problem.head.logits.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda logits: tuple(logits_sums(logits, parts, metrics=False)[0]), (logits,))


def test_the_same_call_gives_the_same_bits():
    problem = Problem("hl_gauss", torch.float32)

    def once():
        losses, squares = from_hidden(problem, 5)
        return [*losses, *squares, *torch.autograd.grad(total_of(losses), problem.inputs)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_in_any_layout(kind):
    problem = Problem(kind, torch.float32, num=24)
    usual = torch.autograd.grad(total_of(from_hidden(problem)[0]), problem.inputs)
    lying = problem.hidden.detach().t().contiguous().t().requires_grad_()  # columns one after the other
    assert not lying.is_contiguous()
    layered = problem.hidden.detach().reshape(4, 6, 4).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not layered.is_contiguous()
    apart = problem.weight.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    for hidden, weight in itertools.product((lying, layered), (problem.weight, apart)):
        losses, _ = expected_value_sums(HeadOutput(hidden, weight, problem.bias), problem.parts())
        found = torch.autograd.grad(total_of(losses), (hidden, weight, problem.bias))
        for mine, theirs in zip(found, usual, strict=True):
            torch.testing.assert_close(mine.reshape(theirs.shape), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_products_in_its_type_and_everything_else_in_float32(kind, dtype, monkeypatch):
    problem = Problem(kind, torch.float32, num=64, width=32)
    with torch.no_grad():
        problem.weight.mul_(0.2)
    seen = []
    monkeypatch.setitem(fused.KERNELS, "cpu", lambda given_: seen.append(given_) or chunked_expectation(given_))
    with torch.autocast("cpu", dtype):
        losses, squares = from_hidden(problem, 16)
    kinds = {(one.hidden.dtype, one.weight.dtype, one.row_weights.dtype, one.bias.dtype) for one in seen}
    products = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32  # a CPU has no others for float16
    assert kinds == {(products, products, torch.float32, torch.float32)}
    exact_losses, exact_squares, leaves = problem.exact()
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for found, expected in zip([*losses, *squares], [*exact_losses, *exact_squares], strict=True):
        assert found.dtype is torch.float32
        assert_near(found, expected, tolerance, least=1.0)
    found = torch.autograd.grad(total_of(losses), problem.inputs)
    for mine, theirs in zip(found, torch.autograd.grad(total_of(exact_losses), leaves), strict=True):
        assert mine.dtype is torch.float32
        assert_near(mine, theirs, 3 * tolerance)


def test_autocast_leaves_float64_alone_and_takes_mixed_types():
    problem = Problem("mse")
    with torch.autocast("cpu", torch.bfloat16):
        check(problem, from_hidden, 1e-12)
        half = problem.hidden.detach().bfloat16()  # from layers before, while the weights are float32
        losses, _ = expected_value_sums(
            HeadOutput(half, problem.weight.float(), problem.bias.float()), problem.parts()
        )
    assert_near(total_of(losses), total_of(problem.exact()[0]), 3e-2, least=1.0)


def test_the_compiler_leaves_the_chunks_alone(monkeypatch):
    problem, is_compiled = Problem("mse", torch.float32), []

    def kernel(given_):
        is_compiled.append(torch.compiler.is_compiling())
        return chunked_expectation(given_)

    monkeypatch.setitem(fused.KERNELS, "cpu", kernel)
    for tensor in problem.inputs:
        tensor.requires_grad_(False)
    parts, head = problem.parts(), problem.head

    def loss(scale):
        return scale * total_of(expected_value_sums(head, parts)[0])

    torch._dynamo.reset()
    scale = torch.tensor(2.0)
    torch.testing.assert_close(torch.compile(loss, backend="eager")(scale), loss(scale))
    torch._dynamo.reset()
    assert is_compiled == [False] * 2 * len(parts)
