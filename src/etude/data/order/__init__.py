"""Order: which sample is at a position, as arithmetic: permutations, samplers, buckets and mixtures."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.data.order.mixed import BucketOrder, MixtureOrder
    from etude.data.order.permutation import Indices, KeyedPermutation, Order, SequentialOrder, ShuffledOrder
    from etude.data.order.sampler import BatchSampler

__all__ = [
    "BatchSampler",
    "BucketOrder",
    "Indices",
    "KeyedPermutation",
    "MixtureOrder",
    "Order",
    "SequentialOrder",
    "ShuffledOrder",
]

__getattr__ = load_late(__name__, __file__)
