"""Edges and centres of bins for scalar values, in float32: quantiles of the values, or equal widths.

A bin includes its lower edge but not the next edge; the last bin also includes its upper edge.
"""

import torch
from torch import Tensor

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
