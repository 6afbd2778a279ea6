"""Expected values straight from hidden states, against formulas in float64 that are written here: values, gradients,
memory, types, and what a device is asked while it runs."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import Largest
from torch.utils._python_dispatch import TorchDispatchMode

from etude.core import HeadOutput, TrainingError, build_vocab_spec
from etude.losses.meaningful import fused, make_reconstruction, meaningful_terms
from etude.losses.meaningful.blocks import logits_sums, squared_error_sums
from etude.losses.meaningful.fused import ExpectationProblem, Part, chunked_expectation, expected_value_sums

KINDS = ["mse", "huber", "wasserstein", "hl_gauss"]
DELTA, SIGMA = 0.7, 0.6
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 2e-3}
"""Relative to the largest value. On a CPU logits in bfloat16 are rounded to it, and gradients to the type of inputs."""
CODEBOOKS = {"vector": (7, 3), "number": (5,), "one": (1,), "one_vector": (1, 4), "empty": (4,), "wide": (6, 1)}
"""Shapes of values by modality; no position has a token of the one called empty."""


# ------------------------------------------------------------------------------------------ formulas of their own


def formula(kind, logits, values, targets):
    """The losses of rows in the type of the logits, and squared errors; values are (V,) or (V, D)."""
    values = values.double().reshape(len(values), -1)
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    expected, true = probs @ values, values[targets]
    squared = F.mse_loss(expected, true, reduction="none").mean(1)
    if kind == "mse":
        return squared, squared
    if kind == "huber":
        return F.huber_loss(expected, true, reduction="none", delta=DELTA).mean(1), squared
    gaps = (values[None] - true[:, None]).square().mean(2).sqrt()
    if kind == "wasserstein":
        return (probs * gaps).sum(1), squared
    return -(soft_targets(values, targets, gaps) * probs.log()).sum(1), squared


def soft_targets(values, targets, gaps):
    """The Gaussian around the true value: its mass in bins, or for vectors its density at the values."""
    if values.shape[1] > 1:
        others = (values[None] - values[:, None]).square().mean(2).sqrt()
        others[others == 0] = float("inf")
        near = others.amin(1)
        near[near.isinf()] = 1.0
        return torch.softmax(-0.5 * (gaps / (SIGMA * near[targets][:, None])).square(), 1)
    centres = values[:, 0]
    if len(centres) == 1:
        return torch.ones(len(targets), 1, dtype=torch.float64)
    inner = (centres[1:] + centres[:-1]) / 2
    edges = torch.cat([2 * centres[:1] - inner[:1], inner, 2 * centres[-1:] - inner[-1:]])
    rows = []
    for target in targets.tolist():
        normal = torch.distributions.Normal(centres[target], SIGMA * (edges[target + 1] - edges[target]))
        mass = normal.cdf(edges).diff()
        rows.append(mass / mass.sum())
    return torch.stack(rows) if rows else torch.zeros(0, len(centres), dtype=torch.float64)


def logits_of(hidden, weight, bias, softcap):
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


# ------------------------------------------------------------------------------------------ problems


def values_of(shape, g):
    values = torch.randn(shape, generator=g, dtype=torch.float64)
    return values.sort().values if len(shape) == 1 else values.sort(0).values if shape[1] == 1 else values


class Problem:
    """A head, tokens of several modalities, and a weight for every position."""

    def __init__(self, kind, dtype=torch.float64, *, num=29, width=4, shapes=None, bias=True, softcap=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.kind, self.softcap = kind, softcap
        shapes = CODEBOOKS if shapes is None else shapes
        self.vocab = build_vocab_spec(modalities={name: shape[0] for name, shape in shapes.items()})
        self.values = {name: values_of(shape, g) for name, shape in shapes.items()}
        total = self.vocab.vocab_size

        def draw(*size):
            return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

        self.hidden, self.weight = draw(num, width), draw(total, width)
        self.bias = draw(total) if bias else None
        self.targets = torch.randint(total, (num,), generator=g)
        if "empty" in shapes:
            own = self.vocab.decode("empty", self.targets) >= 0
            self.targets[own] = self.vocab.miss_id
        self.row_weights = 0.5 + torch.rand(num, generator=g)

    @property
    def head(self):
        return HeadOutput(self.hidden, self.weight, self.bias, self.softcap)

    @property
    def inputs(self):
        return [one for one in (self.hidden, self.weight, self.bias) if one is not None]

    def parts(self):
        found = []
        for name, modality in self.vocab.modalities.items():
            codes = self.vocab.decode(name, self.targets)
            rows = (codes >= 0).nonzero()[:, 0]
            options = {"huber_delta": DELTA, "hl_sigma": SIGMA}
            own = make_reconstruction(self.kind, self.values[name], **options)
            everywhere = len(rows) == len(codes)
            found.append(Part(own, modality.slice, None if everywhere else rows, codes[rows], self.row_weights[rows]))
        return found

    def exact(self):
        """Sums of losses and squared errors of every part in float64, and the leaves they come from."""
        leaves = [None if one is None else one.detach().double().requires_grad_() for one in self._all()]
        logits = logits_of(*leaves, self.softcap)
        losses, squares = [], []
        for name, modality in self.vocab.modalities.items():
            codes = self.vocab.decode(name, self.targets)
            rows = codes >= 0
            found = formula(self.kind, logits[rows][:, modality.slice], self.values[name], codes[rows])
            weights = self.row_weights[rows].double()
            losses.append((found[0] * weights).sum())
            squares.append((found[1] * weights).sum())
        return losses, squares, [one for one in leaves if one is not None]

    def _all(self):
        return self.hidden, self.weight, self.bias


def total_of(losses):
    """Every part flows back with a factor of its own."""
    return sum(factor * loss for factor, loss in zip([0.25, -1.5, 3.0, 0.5, 2.0, 0.125], losses, strict=False))


def assert_near(found, expected, tolerance, least=0.1):
    scale = max(float(expected.detach().abs().max()), least) if expected.numel() else least
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * scale)


def check(problem, way, tolerance):
    losses, squares = way(problem)
    exact_losses, exact_squares, leaves = problem.exact()
    for found, expected in zip([*losses, *squares], [*exact_losses, *exact_squares], strict=True):
        assert_near(found, expected, tolerance, least=1.0)
    assert not any(square.requires_grad for square in squares)
    mine = torch.autograd.grad(total_of(losses), problem.inputs)
    theirs = torch.autograd.grad(total_of(exact_losses), leaves)
    for found, expected, given_ in zip(mine, theirs, problem.inputs, strict=True):
        assert found.dtype == given_.dtype
        assert_near(found, expected, tolerance)


def from_hidden(problem, chunk="auto"):
    return expected_value_sums(problem.head, problem.parts(), chunk)


def sums_of(logits, parts):
    """Return sums of losses and of squared errors by the plain formula."""
    return logits_sums(logits, parts), squared_error_sums(logits, parts)


def from_logits(problem):
    return sums_of(problem.head.logits, problem.parts())


# ------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
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
    assert torch.equal(flat.row_losses(logits, targets), column.row_losses(logits, targets))
    assert torch.equal(flat.expected(logits), column.expected(logits))


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
    with pytest.raises(TrainingError, match="no second derivative: give it logits"):
        torch.autograd.grad(total_of(losses), problem.inputs, create_graph=True)
    parts = problem.parts()
    logits = problem.head.logits.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda logits: tuple(logits_sums(logits, parts)), (logits,))


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
    part = Part(
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
        logits_sums(problem.head.logits, parts)
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
