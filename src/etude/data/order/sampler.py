"""The samples of each batch: the same batches for any number of ranks."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import TypeVar

from etude.core.arguments import as_whole
from etude.core.errors import DataError
from etude.data.order.permutation import Indices, Order, SequentialOrder, ShuffledOrder

Rank = TypeVar("Rank", int, Indices)


def share(start: int, count: int, rank: Rank, world_size: int) -> tuple[Rank, Rank]:
    """Return the begin and end of a rank's share of `count` samples from `start` on; for an array of ranks, of each.

    >>> import numpy as np
    >>> [share(10, 5, rank, 2) for rank in (0, 1)]
    [(10, 12), (12, 15)]
    >>> share(10, 5, np.arange(2), 2)
    (array([10, 12]), array([12, 15]))
    """
    return start + count * rank // world_size, start + count * (rank + 1) // world_size


def check_rank(rank: int, world_size: int) -> None:
    """Raise DataError for an invalid rank."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise DataError(f"rank {rank} of world_size {world_size}: rank must be in 0 … world_size-1")


class BatchSampler:
    """Batches of sample indices, with a new shuffle every epoch.

    `batch_size` is global. A position counts the samples of the epoch consumed over all ranks; the batch at a
    position covers the next `batch_size` samples, and rank r takes the r-th of `world_size` even slices. So the
    global batches do not depend on the number of ranks. A smaller last batch may be empty on some rank.

    It can be used as `batch_sampler` of a torch DataLoader. Each plain iteration is the next epoch, starting with
    that of `set_epoch`.

    >>> sampler = BatchSampler(10, 4, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> sampler.epoch
    1
    >>> [BatchSampler(10, 4, shuffle=False, rank=r, world_size=2).batch(0, 4).tolist() for r in (0, 1)]
    [[4, 5], [6, 7]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
    ) -> None:
        """Set the options of every epoch; a given `order` replaces the one from `shuffle` and `seed`."""
        if order is not None:
            num_samples = order.size
        if num_samples < 1:
            raise DataError("the data is empty; add samples")
        batch_size = as_whole("batch_size", batch_size, least=1, error=DataError)
        check_rank(rank, world_size)
        if drop_last and batch_size > num_samples:
            raise DataError(
                f"batch_size {batch_size} is larger than the {num_samples} samples, so drop_last leaves no batch; "
                f"lower batch_size to {num_samples} or less, or set drop_last to false"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.epoch_samples = num_samples - num_samples % batch_size if drop_last else num_samples
        """Samples per epoch over all ranks."""
        self.num_batches = -(-self.epoch_samples // batch_size)
        if order is None:
            order = ShuffledOrder(num_samples, seed) if shuffle else SequentialOrder(num_samples)
        self.order: Order = order

    def batch(self, epoch: int, position: int) -> Indices:
        """Return this rank's indices of the batch that begins at `position`."""
        count = min(self.batch_size, self.epoch_samples - position)
        if position < 0 or count <= 0:
            raise DataError(
                f"position {position} is not within the {self.epoch_samples} samples of an epoch; use the data of "
                "the checkpoint"
            )
        if self.world_size == 1:
            return self.order.indices(epoch, position, position + count)
        return self.order.indices(epoch, *share(position, count, self.rank, self.world_size))

    def chunks(self, epoch: int, position: int, count: int) -> Iterator[tuple[Indices, int]]:
        """Return this rank's indices from `position` on, up to `count` equal batches at once, and their number.

        >>> sampler = BatchSampler(10, 4, shuffle=False)
        >>> [(indices.tolist(), number) for indices, number in sampler.chunks(0, 0, 2)]
        [([0, 1, 2, 3, 4, 5, 6, 7], 2), ([8, 9], 1)]
        """
        step = self.batch_size
        while self.has_batch(position):
            # A smaller last batch comes alone. With several ranks the shares of consecutive batches are not adjacent.
            number = max(1, min(count, (self.epoch_samples - position) // step)) if self.world_size == 1 else 1
            if number == 1:
                yield self.batch(epoch, position), 1
                position = self.next_position(position)
            else:
                yield self.order.indices(epoch, position, position + number * step), number
                position += number * step

    def next_position(self, position: int) -> int:
        """Return the position after the batch that begins at `position`."""
        return min(position + self.batch_size, self.epoch_samples)

    def positions(self, position: int) -> Iterator[int]:
        """Return the position after each batch, starting with the one at `position`."""
        step, left = self.batch_size, self.epoch_samples - position
        number = left // step if self.drop_last else -(-left // step)
        if number <= 0:
            return iter(())
        last = position + number * step
        return chain(range(position + step, last, step), (min(last, self.epoch_samples),))

    def has_batch(self, position: int) -> bool:
        """Whether a batch begins at `position`; with `drop_last` only a full one counts."""
        return position + (self.batch_size if self.drop_last else 1) <= self.epoch_samples

    def shared(self, rank: int, world_size: int) -> "BatchSampler":
        """Return a sampler of the same batches that gives rank `rank` its share of each."""
        mine = copy.copy(self)
        mine.rank, mine.world_size = rank, world_size
        return mine

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        # Not before the first batch is requested: torch creates two iterators of a sampler and uses one.
        epoch, position = self.epoch, 0
        self.epoch += 1
        while self.has_batch(position):
            yield self.batch(epoch, position).tolist()
            position = self.next_position(position)
