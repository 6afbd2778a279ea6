"""Data: the keyed permutation, the sampler, loaders, prefetching and data sets."""

from etude.data.foreign import ForeignLoader, as_loader
from etude.data.idx import read_idx
from etude.data.loader import DataLoader, EpochIterator
from etude.data.mnist import fetch_mnist, load_mnist
from etude.data.normalize import Normalize
from etude.data.permutation import KeyedPermutation
from etude.data.prefetch import PrefetchStream, prefetch_stream
from etude.data.sampler import BatchSampler
from etude.data.splits import DataSplits, TensorData, check_labels, make_loader

__all__ = [
    "BatchSampler",
    "DataLoader",
    "DataSplits",
    "EpochIterator",
    "ForeignLoader",
    "KeyedPermutation",
    "Normalize",
    "PrefetchStream",
    "TensorData",
    "as_loader",
    "check_labels",
    "fetch_mnist",
    "load_mnist",
    "make_loader",
    "prefetch_stream",
    "read_idx",
]
