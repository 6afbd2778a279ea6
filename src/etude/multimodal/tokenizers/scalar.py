"""ScalarTokenizer: real numbers as codes of bins, and back as bin centres."""

import logging
import math
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.multimodal.tokenizers.arrays import MISSING, as_floats
from etude.multimodal.tokenizers.base import Tokenizer
from etude.multimodal.tokenizers.binning import (
    bin_means,
    bin_of,
    lie_inside,
    midpoints,
    quantile_edges,
    uniform_edges,
)

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
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> Self:
        """Return bins for values of any shape; NaN and infinite ones are ignored.

        strategy: "quantile" puts equally many values in each bin, and its centre is their mean (the middle, if no
            value is in it); "uniform" makes bins of equal width, and their centres are the middles.
        low, high: where bins begin and end, instead of the smallest and the largest value. Values outside are not
            used for fitting; `encode` puts them in the first and the last bin.

        There are fewer than `bins`, with a warning, if several quantiles fall on one value, which then has its own
        bin, or if edges are equal in float32. Raises DataError if there are no values to fit.
        """
        if bins < 1:
            raise DataError(f"bins is {bins}; there must be at least 1")
        if strategy not in ("quantile", "uniform"):
            raise DataError(f"strategy is {strategy!r}; it must be 'quantile' or 'uniform'")
        low, high = _bound("low", low), _bound("high", high)
        if low is not None and high is not None and not low < high:
            raise DataError(f"low is {low} and high is {high} (as float32); low must be less")
        used = _used(as_floats(values).flatten().cpu(), low, high)
        if strategy == "uniform":
            first, last = (float(used[0]) if low is None else low), (float(used[-1]) if high is None else high)
            tokenizer = cls(uniform_edges(first, last, bins))
        else:
            edges = _widened(quantile_edges(used, bins), low, high)
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


def _bound(name: str, bound: float | None) -> float | None:
    """Return a bound rounded to float32, as values are."""
    if bound is None:
        return None
    rounded = float(as_floats(bound, name))
    if not math.isfinite(rounded):
        raise DataError(f"{name} is {bound}; it must be a finite number within float32")
    return rounded


def _used(numbers: Tensor, low: float | None, high: float | None) -> Tensor:
    """The values to fit, sorted."""
    if infinite := int(numbers.isinf().sum()):
        logger.warning("%d values are infinite (or beyond float32) and not used for fitting", infinite)
    used = numbers[numbers.isfinite()]
    used = used if low is None else used[used >= low]
    used = used if high is None else used[used <= high]
    if not used.numel():
        where = "" if low is None and high is None else " between low and high"
        raise DataError(
            f"there are no finite values{where} to fit bins to, among {numbers.numel()}; check the values"
        )
    return used.sort().values


def _widened(edges: Tensor, low: float | None, high: float | None) -> Tensor:
    """Set the start of the first bin to `low` and the end of the last one to `high`."""
    first = edges[:1] if low is None else torch.tensor([low])
    last = edges[-1:] if high is None else torch.tensor([high])
    return torch.cat((first, edges[1:-1], last))
