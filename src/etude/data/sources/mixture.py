"""Mixtures: batches drawn from several sources in given proportions."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import DOCUMENT_STARTS
from etude.core.errors import DataError
from etude.data.order.mixed import MixtureOrder
from etude.data.order.permutation import Indices, Order, SequentialOrder, ShuffledOrder
from etude.data.sources.base import BatchSource, MeasuredSource, ResizableSource

PADDING = {"labels": -100, "document_ids": -1, DOCUMENT_STARTS: 2**31 - 1}
"""Padding values by key; 0 for other keys."""


class TokenMixture:
    """Several sources as one, drawn in proportion to their weights: `DataLoader(TokenMixture({...}), batch_size=32)`.

    Proportions are always exact to within about one draw, and the position in all sources is still one integer (see
    `MixtureOrder`). An epoch is `size` draws, by default the number of samples. Sources are drawn without
    replacement: an exhausted one starts again in another order. Without weights every sample of every source occurs
    once per epoch. Samples of different lengths are padded on the right.
    """

    def __init__(
        self, sources: Mapping[str, BatchSource], weights: Mapping[str, float] | None = None, size: int | None = None
    ) -> None:
        if not sources:
            raise DataError("a mixture needs at least one source; add one")
        if weights is not None and set(weights) != set(sources):
            raise DataError(
                f"the mixture has the sources {', '.join(sources)}, but weights for {', '.join(weights) or 'none'}; "
                "pass one weight per source"
            )
        if size is not None and (size < 1 or weights is None):
            raise DataError(f"size {size}: it must be at least 1, and can be set only with weights")
        self.names, self.sources = tuple(sources), tuple(sources.values())
        self.weights = None if weights is None else tuple(weights[name] for name in self.names)
        self.size = size
        self._starts = np.cumsum([0, *(len(source) for source in self.sources)])
        self.order(shuffle=True, seed=0)  # raises early if the weights are invalid

    def __len__(self) -> int:
        return int(self._starts[-1])

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """Return the order in which samples are drawn."""
        if self.weights is None:
            return ShuffledOrder(len(self), seed) if shuffle else SequentialOrder(len(self))
        sizes = [len(source) for source in self.sources]
        return MixtureOrder(sizes, self.weights, seed=seed, size=self.size, shuffle=shuffle)

    def source_of(self, indices: Indices) -> Indices:
        """Return the index of the source of each sample."""
        return np.searchsorted(self._starts, indices, side="right") - 1

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:
        """Return the samples at `indices`: each source is read once, then its rows are put in place."""
        which = self.source_of(indices)
        places, batches = [], []
        for number, (source, start) in enumerate(zip(self.sources, self._starts, strict=False)):
            here = np.flatnonzero(which == number)
            if here.size:
                places.append(torch.from_numpy(here))
                batches.append((self.names[number], source.gather(indices[here] - start, epoch=epoch, seed=seed)))
        if len(batches) == 1:
            return dict(batches[0][1])
        if not batches:
            return dict(self.sources[0].gather(indices, epoch=epoch, seed=seed))
        _check_alike(batches)
        return {key: _merged(key, [batch[key] for _, batch in batches], places) for key in batches[0][1]}

    @property
    def longest(self) -> int | None:
        """Maximum tokens per sample; None if a source has no limit."""
        known = [source.longest if isinstance(source, ResizableSource) else None for source in self.sources]
        lengths = [length for length in known if length is not None]
        return max(lengths) if len(lengths) == len(known) else None

    def with_length(self, length: int) -> "TokenMixture":
        """Return a mixture of the same sources with samples of another length; DataError if not supported."""
        changed = {}
        for name, source in zip(self.names, self.sources, strict=True):
            if not isinstance(source, ResizableSource):
                raise DataError(
                    f"the samples of {name}, a {type(source).__name__}, do not support another length; "
                    "remove sequence_length"
                )
            changed[name] = source.with_length(length)
        weights = None if self.weights is None else dict(zip(self.names, self.weights, strict=True))
        return TokenMixture(changed, weights, self.size)

    def lengths(self, indices: Indices) -> Indices:
        """Return the lengths of samples; raises DataError if a source does not know them."""
        which, lengths = self.source_of(indices), np.empty(len(indices), np.int64)
        for number, source in enumerate(self.sources):
            if not isinstance(source, MeasuredSource):
                raise DataError(
                    f"{self.names[number]} does not know the lengths of its samples; set bucket_batches to 0"
                )
            here = which == number
            lengths[here] = source.lengths(indices[here] - self._starts[number])
        return lengths


def _check_alike(batches: list[tuple[str, dict[str, Tensor]]]) -> None:
    (first, expected), *others = batches
    for name, batch in others:
        if set(batch) != set(expected):
            raise DataError(
                f"the sources of a mixture must have the same keys: {first} has {', '.join(expected)}, "
                f"{name} has {', '.join(batch)}"
            )


def _merged(key: str, parts: list[Tensor], places: list[Tensor]) -> Tensor:
    """Put the rows of all parts in place; dimensions after the first are padded to the longest."""
    try:
        shape = [sum(map(len, parts)), *(max(sizes) for sizes in zip(*(p.shape[1:] for p in parts), strict=True))]
    except ValueError as error:
        raise DataError(f"'{key}' has a different number of dimensions in the sources of a mixture") from error
    whole = parts[0].new_full(shape, PADDING.get(key, 0))
    for part, place in zip(parts, places, strict=True):
        window = whole[(slice(None), *(slice(size) for size in part.shape[1:]))]
        window[place] = part
    return whole
