"""VectorTokenizer: vectors as codes of the nearest centroid of a codebook, and back as centroids."""

import logging
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.multimodal.tokenizers.base import MISSING, Tokenizer, as_floats
from etude.multimodal.tokenizers.kmeans import kmeans, nearest_exactly

logger = logging.getLogger("etude")


class VectorTokenizer(Tokenizer):
    """A codebook: `values` (V, D), float32, with distinct centroids. A vector's code is the nearest one.

    The nearest one is found without rounding errors, so that encode(decode(codes)) gives the same codes. A vector
    with NaN or infinity is missing.

    >>> vectors = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 9.0], [9.0, 10.0], [torch.nan, 0.0]])
    >>> tokenizer = VectorTokenizer.fit(vectors, size=2)
    >>> tokenizer.values
    tensor([[0.0000, 0.5000],
            [9.0000, 9.5000]])
    >>> tokenizer.encode(vectors)
    tensor([ 0,  0,  1,  1, -1])
    """

    kind = "vector"
    tensors: ClassVar = {"centroids": "values"}

    def __init__(self, values: Any, *, inertia: float | None = None) -> None:
        self.values = as_floats(values, "centroids").cpu().contiguous().clone()
        self.inertia = inertia
        """The sum of squared distances of the fitted vectors to their centroids; None if it was not fitted."""
        if self.values.dim() != 2 or not self.values.numel():
            raise DataError(f"centroids must have shape (size, width), found {tuple(self.values.shape)}")
        if not bool(self.values.isfinite().all()):
            raise DataError("centroids must be finite numbers within float32")
        if (distinct := torch.unique(self.values, dim=0).shape[0]) < self.size:
            raise DataError(f"centroids must be distinct: of {self.size}, {distinct} are")

    @classmethod
    def fit(
        cls,
        vectors: Any,
        size: int = 256,
        *,
        seed: int = 0,
        iterations: int = 50,
        tolerance: float = 1e-4,
    ) -> Self:
        """Return a codebook for vectors (N, D) by k-means; missing vectors are ignored.

        iterations: maximum number of passes. Fitting ends earlier when centroids move by less than `tolerance`
            (squared, in units of the mean variance).

        If there are fewer distinct vectors than `size`, there are fewer centroids, with a warning. The same vectors
        and seed give the same bits on the CPU for the same number of threads.
        """
        for name, number in (("size", size), ("iterations", iterations)):
            if number < 1:
                raise DataError(f"{name} is {number}; it must be at least 1")
        rows = as_floats(vectors, "vectors")
        if rows.dim() != 2 or not rows.shape[1]:
            raise DataError(f"vectors must have shape (number, width), found {tuple(rows.shape)}")
        present = rows.isfinite().all(1)
        rows = rows if bool(present.all()) else rows[present]
        if not len(rows):
            raise DataError(f"there are no finite vectors to fit, among {len(present)}; check the values")
        centroids, inertia = kmeans(rows, size, seed=seed, iterations=iterations, tolerance=tolerance)
        if len(centroids) < size:
            logger.warning(
                "%d centroids instead of %d: there are only that many distinct vectors", len(centroids), size
            )
        return cls(centroids, inertia=inertia)

    @property
    def width(self) -> int:
        """Dimension of a vector."""
        return self.values.shape[1]

    def encode(self, vectors: Any) -> Tensor:
        """Return the codes of vectors (…, D), int64 of shape (…); -1 for vectors with NaN or infinity."""
        rows = as_floats(vectors, "vectors")
        if not rows.dim() or rows.shape[-1] != self.width:
            raise DataError(f"vectors must have {self.width} numbers each, found shape {tuple(rows.shape)}")
        shape, rows = rows.shape[:-1], rows.reshape(-1, self.width)
        codes = nearest_exactly(rows, self.values.to(rows.device)).labels
        return codes.masked_fill_(~rows.isfinite().all(1), MISSING).reshape(shape)

    def facts(self) -> dict[str, Any]:
        """Return the inertia of a fitted tokenizer."""
        return {} if self.inertia is None else {"inertia": self.inertia}

    def __repr__(self) -> str:
        return f"VectorTokenizer({self.size} centroids of {self.width} numbers)"
