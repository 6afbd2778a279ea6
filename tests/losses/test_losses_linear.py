"""Linear layer and cross entropy in one, against the plain formula in float64: values, gradients, metrics, memory."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from etude.core import LossTerm
from etude.core.errors import DataError, TrainingError
from etude.losses import linear_autograd, linear_cross_entropy, linear_cross_entropy_terms, mean_of
from etude.losses.chunked import chunked
from etude.losses.functional import cross_entropy_term
from etude.losses.products import chunk_rows_for
from forked_python import run_python
from grids import sampled
from largest_tensor import Largest
from linear_formula import MASKS, TOLERANCES, assert_near, compare, doubled, formula, make, masked


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_types_and_masks(dtype, mask_kind, smoothing, bias):
    hidden, weight, offset, targets, g = make((3, 7), 11, dtype=dtype, bias=bias)
    targets, mask, element = masked(mask_kind, targets, g)
    compare(hidden, weight, offset, targets, mask, element, TOLERANCES[dtype], smoothing, chunk=4)


SHAPES = [(1,), (0,), (17,), (2, 1), (2, 3, 5)]


@pytest.mark.parametrize(
    ("shape", "num_classes", "smoothing", "softcap"), sampled(2, SHAPES, [1, 2, 13, 97], [0.0, 0.2, 1.0], [None, 2.0])
)
def test_odd_shapes(shape, num_classes, smoothing, softcap):
    for chunk in (1, 4, 10**6, "auto"):
        hidden, weight, bias, targets, _ = make(shape, num_classes, width=3)
        element = torch.ones(shape, dtype=torch.float64)
        compare(hidden, weight, bias, targets, None, element, 3e-6, smoothing, softcap, chunk)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    num_classes=st.integers(1, 60),
    width=st.integers(1, 9),
    chunk=st.integers(1, 45),
    kind=st.sampled_from(MASKS),
    smoothing=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 1000),
)
def test_any_sizes_in_float64(rows, num_classes, width, chunk, kind, smoothing, softcap, seed):
    hidden, weight, bias, targets, g = make((rows,), num_classes, width, torch.float64, seed=seed)
    targets, mask, element = masked(kind, targets, g)
    compare(hidden, weight, bias, targets, mask, element, 1e-6, smoothing, softcap, chunk)


def test_gradcheck():
    hidden, weight, bias, targets, _ = make((2, 4), 7, 3, torch.float64)
    targets[0, 1] = -100
    for smoothing, softcap in itertools.product([0.0, 0.2], [None, 1.5]):

        def loss(h, w, b, smoothing=smoothing, softcap=softcap):
            options = {"label_smoothing": smoothing, "softcap": softcap, "chunk_tokens": 3}
            return linear_cross_entropy(h, w, targets, b, **options).sum

        assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_logits_stay_finite(dtype, size):
    hidden, weight, bias, targets, _ = make((19,), 23, dtype=dtype, scale=size)
    term = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=5)
    grads = torch.autograd.grad(term.sum, (hidden, weight, bias))
    assert all(bool(one.isfinite().all()) for one in (term.sum, *grads))
    if dtype is torch.float32:
        expected = formula(*doubled(hidden, weight, bias), targets, torch.ones(19).double())[0]
        assert term.sum.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_tiny_loss_is_exact():
    """The label has nearly all of the probability: what is left must not be lost in the largest logit."""
    hidden = torch.tensor([[20.0]])
    term = linear_cross_entropy(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0]))
    expected = F.cross_entropy(torch.tensor([[20.0, 0.0]]).double(), torch.tensor([0]))
    assert float(term.sum) == pytest.approx(float(expected), abs=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_to_one_batch(dtype):
    hidden, weight, bias, targets, g = make((12, 5), 31, dtype=dtype)
    targets, mask, _ = masked("ignored and float", targets, g)

    def term(rows):
        return linear_cross_entropy(hidden[rows], weight, targets[rows], bias, mask=mask[rows])

    whole = term(slice(None))
    parts = [term(slice(start, start + 5)) for start in (0, 5, 10)]
    both = LossTerm(sum(one.sum for one in parts), sum(one.count for one in parts))
    torch.testing.assert_close(mean_of(both), mean_of(whole))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, theirs in zip(
        torch.autograd.grad(both.sum, (hidden, weight, bias)),
        torch.autograd.grad(whole.sum, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_the_same_call_gives_the_same_bits():
    hidden, weight, bias, targets, _ = make((50,), 37)

    def once():
        term = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=7)
        return [term.sum, *torch.autograd.grad(term.sum, (hidden, weight, bias))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_the_count_is_that_of_cross_entropy():
    hidden, weight, _, targets, g = make((4, 5), 7)
    logits = hidden @ weight.T
    ignored, mask, _ = masked("ignored and float", targets, g)
    for labels, given_mask, skip in [
        (targets, None, None),
        (targets, None, -100),
        (targets, None, 3),
        (ignored, None, -100),
        (ignored, mask, -100),
        (targets, mask > 0, None),
        (targets, (mask > 0).int(), 3),
    ]:
        mine = linear_cross_entropy(hidden, weight, labels, mask=given_mask, ignore_index=skip)
        theirs = cross_entropy_term(logits, labels, given_mask, 0.0, skip)
        assert type(mine.count) is type(theirs.count)
        assert float(mine.count) == pytest.approx(float(theirs.count))
        torch.testing.assert_close(mine.sum, theirs.sum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_products_in_its_type_and_keeps_float32_gradients(dtype):
    hidden, weight, bias, targets, _ = make((64,), 301, 32)
    with torch.autocast("cpu", dtype):
        term = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=16)
    found = torch.autograd.grad(term.sum, (hidden, weight, bias))
    assert [one.dtype for one in (term.sum, *found)] == [torch.float32] * 4
    exact = doubled(hidden, weight, bias)
    loss = formula(*exact, targets, torch.ones(64).double())[0]
    assert_near(term.sum, loss, 1e-3)
    for mine, theirs in zip(found, torch.autograd.grad(loss, exact), strict=True):
        assert_near(mine, theirs, 2e-2)
    with torch.autocast("cpu", torch.bfloat16):  # hidden states come in bfloat16 from the layers before
        term = linear_cross_entropy(hidden.bfloat16(), weight, targets, bias)
    assert_near(term.sum, loss, 1e-3)
    # float64 is left alone, as autocast does
    with torch.autocast("cpu", torch.bfloat16):
        term = linear_cross_entropy(*exact[:2], targets, exact[2])
    assert_near(term.sum, loss, 1e-12)


def test_bfloat16_adds_up_the_weights_gradient_in_float32():
    """One class gets the same small push from 4,096 rows: added up in bfloat16 it would stop growing at 256 of them."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    term = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64), chunk_tokens=1)
    assert torch.autograd.grad(term.sum, weight)[0].flatten().tolist() == [-2048.0, 2048.0]


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1), (1, 2)])
def test_only_the_gradients_asked_for_are_computed(wanted, monkeypatch):
    hidden, weight, bias, targets, _ = make((9,), 5)
    for place, tensor in enumerate((hidden, weight, bias)):
        tensor.requires_grad_(place in wanted)
    seen = []
    monkeypatch.setitem(linear_autograd.KERNELS, "cpu", lambda problem: seen.append(problem) or chunked(problem))
    term = linear_cross_entropy(hidden, weight, targets, bias)
    assert term.sum.requires_grad == bool(wanted)
    (problem,) = seen
    asked = (problem.want_hidden, problem.want_weight, problem.want_bias)
    assert asked == tuple(place in wanted for place in range(3))
    result = chunked(problem)
    found = (result.grad_hidden, result.grad_weight, result.grad_bias)
    assert tuple(one is not None for one in found) == asked
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias).sum, term.sum.detach())
    assert not seen[-1].want_gradients


@pytest.mark.parametrize("training", [True, False])
def test_the_logits_are_never_held_together(training):
    hidden, weight, bias, targets, _ = make((400,), 211, 4)
    with Largest() as largest, torch.set_grad_enabled(training):
        term = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=10)
        if training:
            term.sum.backward()
    assert largest.numel == max(10 * 211, 400 * 4)
    with Largest() as largest:
        F.cross_entropy(F.linear(hidden, weight, bias), targets)
    assert largest.numel == 400 * 211


def test_rows_without_a_label_cost_nothing_on_the_cpu(monkeypatch):
    """Also if their hidden states are not finite, as those of padding may be."""
    hidden, weight, bias, targets, _ = make((40,), 5)
    targets[10:] = -100
    broken = hidden.detach().clone()
    broken[10:] = float("nan")
    broken.requires_grad_()
    seen = []
    monkeypatch.setitem(linear_autograd.KERNELS, "cpu", lambda problem: seen.append(problem) or chunked(problem))
    term = linear_cross_entropy(broken, weight, targets, bias)
    assert seen[0].hidden.shape == (10, 6)
    found = torch.autograd.grad(term.sum, (broken, weight, bias))
    expected = torch.autograd.grad(linear_cross_entropy(hidden[:10], weight, targets[:10], bias).sum, (weight, bias))
    assert torch.equal(found[0][10:], torch.zeros(30, 6))
    assert bool(found[0][:10].any())
    for mine, theirs in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_row_without_a_label_may_be_anything():
    hidden, weight, bias, targets, _ = make((40,), 5)
    targets[3] = -100
    expected = linear_cross_entropy_terms(hidden, weight, targets, bias, metrics=True, label_smoothing=0.1)
    hidden.data[3] = float("nan")
    found = linear_cross_entropy_terms(hidden, weight, targets, bias, metrics=True, label_smoothing=0.1)
    for name in ("loss", "accuracy", "nll"):
        torch.testing.assert_close(found[name].sum, expected[name].sum)


def test_the_graph_can_be_kept():
    hidden, weight, bias, targets, _ = make((9,), 5)
    loss = linear_cross_entropy(hidden, weight, targets, bias).sum
    first = torch.autograd.grad(loss * 3, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    for three, one in zip(first, second, strict=True):
        torch.testing.assert_close(three, 3 * one)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate_and_tied_weights_get_both_parts():
    table = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.tensor([1, 3, 3]), torch.tensor([3, 0, 10])
    expected = torch.autograd.grad(F.cross_entropy(table[ids] @ table.T, targets, reduction="sum"), table)[0]
    for times in (1, 2):
        linear_cross_entropy(table[ids], table, targets).sum.backward()
        torch.testing.assert_close(table.grad, times * expected)


def test_no_second_derivative():
    hidden, weight, bias, targets, _ = make((9,), 5)
    loss = linear_cross_entropy(hidden, weight, targets, bias).sum
    with pytest.raises(TrainingError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(("wanted", "backend"), sampled(2, [(0, 1, 2), (0,), (1,)], ["aot_eager", "eager"]))
def test_torch_compile_keeps_the_graph_whole(backend, wanted):
    hidden, weight, bias, targets, _ = make((9,), 5)
    targets[2] = -100
    for place, tensor in enumerate((hidden, weight, bias)):
        tensor.requires_grad_(place in wanted)
    inputs = [(hidden, weight, bias)[place] for place in wanted]

    def loss(h, w, b, dtype=None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            terms = linear_cross_entropy_terms(
                h * 2, w, targets, b, label_smoothing=0.1, chunk_tokens=4, metrics=True
            )
        return [terms["loss"].sum * 3, terms["loss"].count, terms["nll"].sum, terms["accuracy"].sum]

    for dtype in (None, torch.bfloat16):
        expected = loss(hidden, weight, bias, dtype)
        torch._dynamo.reset()
        found = torch.compile(loss, backend=backend, fullgraph=True)(hidden, weight, bias, dtype)
        assert [one.requires_grad for one in found] == [True, False, False, False]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found[0], inputs), torch.autograd.grad(expected[0], inputs))


def test_compiled_without_gradients():
    hidden, weight, bias, targets, _ = make((9,), 5)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(lambda *given: linear_cross_entropy(*given).sum, backend="aot_eager", fullgraph=True)(
            hidden, weight, targets, bias
        )
        torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, targets, bias).sum)


def test_without_triton_chunks_are_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "etude.losses.linear_gpu", None)
    monkeypatch.delattr("etude.losses.linear_gpu", raising=False)
    monkeypatch.setitem(linear_autograd.KERNELS, "cuda", linear_autograd.KERNELS["cuda"])
    monkeypatch.setitem(linear_autograd.KERNELS, "cpu", linear_autograd.KERNELS["cuda"])
    hidden, weight, bias, targets, _ = make((9,), 5)
    compare(hidden, weight, bias, targets, None, torch.ones(9, dtype=torch.float64), 3e-6)
    assert linear_autograd.KERNELS["cuda"] is chunked


def test_importing_needs_neither_triton_nor_the_compiler():
    code = "import sys, etude.losses.linear; print({'triton', 'torch._dynamo'} & set(sys.modules))"
    found = run_python("-c", code)
    assert found.stdout.strip() == "set()", found.stderr


def test_chunks_are_even_and_bounded():
    for rows, classes in itertools.product([1, 63, 64, 1000, 32_768], [1, 100, 50_257, 256_000, 10**7]):
        size = chunk_rows_for(rows, classes, (64 << 20) // 4)
        assert 1 <= size <= rows
        assert size <= 64 or size * classes * 4 <= 64 << 20
        last = rows - size * (-(-rows // size) - 1)
        assert size - last < -(-rows // size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 7)}, r"\(9, 6\) do not fit weights of shape \(5, 7\)"),
        ({"weight": torch.zeros(5)}, "do not fit weights"),
        ({"targets": torch.zeros(8, dtype=torch.int64)}, r"expected integers of shape \(9,\)"),
        ({"targets": torch.zeros(9)}, "expected integers"),
        ({"bias": torch.zeros(4)}, "does not fit 5 classes"),
        ({"weight": torch.zeros(5, 6, dtype=torch.bfloat16)}, "torch.float32, weights torch.bfloat16"),
        ({"mask": torch.ones(8)}, "mask of shape"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    hidden, weight, bias, targets, _ = make((9,), 5)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, "mask": None} | change
    with pytest.raises(TrainingError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("label", [5, -1, 10**9])
def test_labels_out_of_range(label):
    hidden, weight, bias, targets, _ = make((9,), 5)
    targets[4] = label
    with pytest.raises(DataError, match=rf"found {label}, but there are 5 classes \(0 … 4\)"):
        linear_cross_entropy(hidden, weight, targets, bias)
