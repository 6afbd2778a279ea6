"""ScalarTokenizer: real numbers as codes of bins, and back as bin centres."""

import logging
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.multimodal.tokenizers.base import MISSING, Tokenizer, as_floats

logger = logging.getLogger("etude")


class ScalarTokenizer(Tokenizer):
    """Bins of a scalar: `edges` (V + 1,), strictly increasing, and a centre for each bin in `values` (V,), float32.

    Bin i holds values from `edges[i]` up to, but not including, `edges[i + 1]`; the last bin includes its upper edge.
    Its centre is inside, so that encode(decode(codes)) gives the same codes. Values are converted to float32:
    subtract an offset first from values that are too close for float32, such as Julian dates. Without `values` the
    centres are midpoints.

    >>> tokenizer = ScalarTokenizer.fit(torch.arange(100.0), bins=4)
    >>> tokenizer.edges
    tensor([ 0.0000, 24.7500, 49.5000, 74.2500, 99.0000])
    >>> tokenizer.encode([3.0, 60.0, 1000.0, float("nan")])
    tensor([ 0,  2,  3, -1])
    >>> tokenizer.decode([0, 2, 3, -1])
    tensor([12., 62., 87., nan])
    """

    kind = "scalar"
    tensors: ClassVar = {"centers": "values", "edges": "edges"}

    def __init__(self, edges: Any, values: Any = None) -> None:
        self.edges = as_floats(edges, "edges").cpu().clone()
        increases = self.edges.dim() == 1 and len(self.edges) > 1 and bool((self.edges.diff() > 0).all())
        if not increases or not bool(self.edges.isfinite().all()):
            first = self.edges.flatten()[:8].tolist()
            raise DataError(f"edges must be two or more finite, increasing numbers in float32; found {first} …")
        self.values = midpoints(self.edges) if values is None else as_floats(values, "centres").cpu().clone()
        bins = len(self.edges) - 1
        if self.values.shape != (bins,):
            raise DataError(f"{bins + 1} edges need {bins} centres, found shape {tuple(self.values.shape)}")
        inside = lie_inside(self.values, self.edges)
        if not bool(inside.all()):
            place = int((~inside).nonzero()[0])
            low, high = self.edges[place : place + 2].tolist()
            found = float(self.values[place])
            raise DataError(f"the centre of bin {place} is {found}; it must lie in the bin, {low} … {high}")

    @classmethod
    def fit(
        cls,
        values: Any,
        bins: int = 256,
        strategy: Literal["quantile", "uniform"] = "quantile",
    ) -> Self:
        """Return bins for values of any shape; NaN and infinite ones are ignored.

        strategy: "quantile" puts equally many values in each bin, and its centre is their mean (the middle, if no
            value is in it); "uniform" makes bins of equal width, and their centres are the middles.

        There are fewer than `bins`, with a warning, if several quantiles fall on one value, which then has its own
        bin, or if edges are equal in float32. Raises DataError if there are no values to fit.
        """
        if bins < 1:
            raise DataError(f"bins is {bins}; there must be at least 1")
        if strategy not in ("quantile", "uniform"):
            raise DataError(f"strategy is {strategy!r}; it must be 'quantile' or 'uniform'")
        used = _used(as_floats(values).flatten().cpu())
        if strategy == "uniform":
            tokenizer = cls(uniform_edges(float(used[0]), float(used[-1]), bins))
        else:
            edges = quantile_edges(used, bins)
            tokenizer = cls(edges, bin_means(used, edges))
        if tokenizer.size < bins:
            logger.warning(
                "%d bins instead of %d: the others would be empty, because values are equal (as float32)",
                tokenizer.size,
                bins,
            )
        return tokenizer

    def encode(self, values: Any) -> Tensor:
        """Return the codes of values, int64 of the same shape; -1 for NaN.

        Values below the first edge go to the first bin, those above the last edge to the last one.
        """
        numbers = as_floats(values)
        codes = bin_of(numbers, self.edges.to(numbers.device))
        return codes.masked_fill_(numbers.isnan(), MISSING)

    def __repr__(self) -> str:
        return f"ScalarTokenizer({self.size} bins, {float(self.edges[0]):g} … {float(self.edges[-1]):g})"


def _used(numbers: Tensor) -> Tensor:
    """The values to fit, sorted."""
    if infinite := int(numbers.isinf().sum()):
        logger.warning("%d values are infinite (or beyond float32) and not used for fitting", infinite)
    used = numbers[numbers.isfinite()]
    if not used.numel():
        raise DataError(f"there are no finite values to fit bins to, among {numbers.numel()}; check the values")
    return used.sort().values


INFINITY = torch.tensor(torch.inf)


def quantile_edges(values: Tensor, bins: int) -> Tensor:
    """Return strictly increasing edges with equally many values between them (without ties), to within one.

    `values` are sorted, finite float32. Edges are the linearly interpolated quantiles. If several quantiles fall on
    one frequent value, it gets its own bin, and the other edges are dropped.

    >>> quantile_edges(torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0]), 2)
    tensor([ 0.,  2., 10.])
    >>> quantile_edges(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 2.0]), 4)
    tensor([0.0000, 0.7500, 2.0000])
    """
    lowest, highest, last = values[:1], values[-1:], values.numel() - 1
    if torch.equal(lowest, highest):
        return around(lowest)
    # In integers, so that a quantile that falls on a value equals it exactly.
    steps = torch.arange(bins + 1)
    left, rest = steps * last // bins, steps * last % bins
    edges = _between(values[left], values[(left + 1).clamp(max=last)], rest.double() / bins)
    distinct, copies = torch.unique_consecutive(edges, return_counts=True)
    lone = _own_bins(values, distinct, copies)
    return _distinct(torch.cat((distinct, lone)))


def _own_bins(values: Tensor, edges: Tensor, copies: Tensor) -> Tensor:
    """Add edges so that every value on which several quantiles fall has its own bin."""
    several = edges[:-1][copies[:-1] > 1]
    above = values[torch.searchsorted(values, several, right=True)]
    # The bin from such an edge to the next also holds larger values, and the last bin its upper edge.
    following = edges[1:][copies[:-1] > 1]
    shared = (above < following) | ((above == following) & (following == edges[-1]))
    parts = [_between(several, above, torch.tensor(0.5))[shared]]
    below = values[torch.searchsorted(values, edges[-1:]) - 1]
    if int(copies[-1]) > 1 and bool(edges[-2] <= below):
        parts.append(_between(below, edges[-1:], torch.tensor(0.5)))
    return torch.cat(parts)


def uniform_edges(low: float, high: float, bins: int) -> Tensor:
    """Return the edges of bins of equal width; fewer if they are equal in float32.

    >>> uniform_edges(-1.0, 1.0, 4)
    tensor([-1.0000, -0.5000,  0.0000,  0.5000,  1.0000])
    """
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64).to(torch.float32)
    edges[0], edges[-1] = low, high  # linspace may miss its end by rounding
    return around(edges[:1]) if edges[0] == edges[-1] else _distinct(edges)


def around(value: Tensor) -> Tensor:
    """Return the edges of one bin for one value (1,): half a unit on both sides, or more if float32 requires it.

    >>> around(torch.tensor([3.0]))
    tensor([2.5000, 3.5000])
    """
    low = torch.minimum(value - 0.5, torch.nextafter(value, -INFINITY))
    high = torch.maximum(value + 0.5, torch.nextafter(value, INFINITY))
    limits = torch.finfo(torch.float32)
    return torch.cat((low, high)).clamp(limits.min, limits.max)


def midpoints(edges: Tensor) -> Tensor:
    """Return the middle of every bin.

    >>> midpoints(torch.tensor([0.0, 1.0, 3.0]))
    tensor([0.5000, 2.0000])
    """
    wide = edges.double()
    return _inside((wide[:-1] + wide[1:]) / 2, edges)


def bin_means(values: Tensor, edges: Tensor) -> Tensor:
    """Return the mean of the values in every bin; the middle of an empty bin.

    >>> bin_means(torch.tensor([0.0, 0.2, 2.9]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    tensor([0.1000, 1.5000, 2.9000])
    """
    codes = bin_of(values, edges)
    bins = edges.numel() - 1
    counts = torch.bincount(codes, minlength=bins)
    sums = torch.bincount(codes, weights=values.double(), minlength=bins)
    means = _inside(sums / counts.clamp(min=1), edges)
    return torch.where(counts > 0, means, midpoints(edges))


def bin_of(values: Tensor, edges: Tensor) -> Tensor:
    """Return the bin of each value; values outside go to the first or the last one.

    >>> bin_of(torch.tensor([-9.0, 0.0, 0.99, 1.0, 3.0, 9.0]), torch.tensor([0.0, 1.0, 3.0]))
    tensor([0, 0, 0, 1, 1, 1])
    """
    return torch.bucketize(values, edges[1:-1].contiguous(), right=True)


def lie_inside(centers: Tensor, edges: Tensor) -> Tensor:
    """Return for each bin whether its centre is inside.

    >>> lie_inside(torch.tensor([0.5, 3.0, 4.0]), torch.tensor([0.0, 1.0, 3.0, 4.0]))
    tensor([ True, False,  True])
    """
    return bin_of(centers, edges).eq(torch.arange(centers.numel())) & (centers >= edges[0]) & (centers <= edges[-1])


def _inside(centers: Tensor, edges: Tensor) -> Tensor:
    """Round centres to float32 without leaving their bins."""
    highest = torch.nextafter(edges[1:], -INFINITY)
    highest[-1] = edges[-1]
    return torch.minimum(torch.maximum(centers.to(torch.float32), edges[:-1]), highest)


def _distinct(edges: Tensor) -> Tensor:
    increasing: Tensor = torch.unique(edges)
    return increasing


def _between(below: Tensor, above: Tensor, share: Tensor) -> Tensor:
    """Interpolate; a result above the lower value stays above it after rounding, so that both keep their bins."""
    between = torch.lerp(below.double(), above.double(), share.double()).to(torch.float32)
    return torch.where((share > 0) & (above > below), torch.maximum(between, torch.nextafter(below, INFINITY)), below)
