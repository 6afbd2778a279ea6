"""Validation by a torch DataLoader with a DistributedSampler, without the samples that the sampler repeats.

The sampler gives all ranks the same number of samples: it repeats some of them, which would count twice.
"""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


class UnpaddedSampler(DistributedSampler[Any]):
    """The samples of a DistributedSampler, each of them on one rank only: the last ranks may have one less."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), len(self))

    def __len__(self) -> int:
        own = range(self.rank, min(self.total_size, len(self.dataset)), self.num_replicas)  # type: ignore[arg-type]
        return len(own)


def unpadded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of every sample once, over all ranks; the loader itself if nothing is repeated."""
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if type(sampler) is not DistributedSampler or type(batches) not in (BatchSampler, type(None)):
        return loader
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size <= size:
        return loader
    own, other = copy.copy(sampler), copy.copy(loader)
    own.__class__ = UnpaddedSampler
    changed: dict[str, Any] = {"sampler": own, "_iterator": None}
    if isinstance(batches, BatchSampler):
        changed["batch_sampler"] = BatchSampler(own, batches.batch_size, batches.drop_last)
    vars(other).update(changed)  # torch refuses plain assignments
    return other
