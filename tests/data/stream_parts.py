"""Small streams in which no two samples are alike, and batches as lists, to compare."""

import torch

from etude.core.batch import JointBatch
from etude.data import TensorData


def parts(sizes):
    """Streams a, b, c … in which no two samples are alike: sample i of the second is 1000 + i."""
    return {
        name: TensorData(torch.arange(size) + 1000 * number, torch.arange(size))
        for number, (name, size) in enumerate(zip("abcd", sizes, strict=False))
    }


def plain(batch):
    """A batch as nested lists, to compare."""
    if isinstance(batch, JointBatch):
        return [plain(part) for part in batch]
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def epochs(loader, number, start=0):
    return [plain(batch) for epoch in range(start, start + number) for batch in loader.iterate(epoch)]


def by_stream(batches):
    """What came of each stream, in order."""
    found = {}
    for batch in batches:
        for part in batch if isinstance(batch, list) else [batch]:
            found.setdefault(part["stream"], []).extend(part["input"])
    return found
