"""Problems for the fused expected-value loss, and formulas in float64 to compare it with."""

import torch
import torch.nn.functional as F

from etude.core import HeadOutput
from etude.multimodal import build_vocab_spec
from etude.multimodal.loss import make_reconstruction
from etude.multimodal.loss.fused import LossPart, expected_value_sums
from etude.multimodal.loss.terms import logits_sums

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
            found.append(
                LossPart(own, modality.slice, None if everywhere else rows, codes[rows], self.row_weights[rows])
            )
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
    return logits_sums(logits, parts, metrics=True)


def from_logits(problem):
    return sums_of(problem.head.logits, problem.parts())
