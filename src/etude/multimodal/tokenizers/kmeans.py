"""k-means: greedy k-means++ initialisation, then Lloyd iterations, in chunks of distances."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**21  # distances in memory at a time
_START_ROWS, _START_ROWS_PER_CENTROID = 16384, 8


class Assignment(NamedTuple):
    """The nearest centroid of each row, and the squared distance to it."""

    labels: Tensor
    distances: Tensor


def kmeans(rows: Tensor, size: int, *, seed: int, iterations: int, tolerance: float) -> tuple[Tensor, float]:
    """Return centroids (at most `size`, D) of float32 rows (N, D), and the inertia: the sum of squared distances.

    There are fewer centroids if there are fewer distinct rows. The same numbers, seed and thread count give the same
    bits on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, scale = _frame(rows)
    # Centred and scaled to size 1: squares would overflow, underflow, or lose small distances far from the origin.
    moved = torch.cat([((part.double() - mean) / scale).to(torch.float32) for part in _parts(rows)])
    centroids = _start(moved, size, generator)
    if centroids.shape[0] > 1:
        variance = float(moved.var(0, correction=0).mean())
        centroids = _lloyd(moved, centroids, iterations, tolerance * variance)
    return _finished(rows, (centroids.double() * scale + mean).to(torch.float32))


def _finished(rows: Tensor, centroids: Tensor) -> tuple[Tensor, float]:
    """Recompute the means of the rows in float64, and measure the distances to them."""
    sums, counts = _totals(rows, nearest_exactly(rows, centroids).labels, centroids.shape[0])
    means = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centroids.double())
    rounded = torch.unique(means.to(torch.float32), dim=0)
    return rounded, float(nearest_exactly(rows, rounded).distances.sum())


def nearest(rows: Tensor, centroids: Tensor) -> Assignment:
    """Return the nearest centroid of every row, the first of equally near ones.

    >>> nearest(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([[1.0], [8.0]])).labels
    tensor([0, 0, 1])
    """
    labels, distances, norms = [], [], centroids.square().sum(1)
    for chunk in torch.split(rows, max(1, _CHUNK // centroids.shape[0])):
        # Squared distances without the norms of the rows, which do not change which centroid is nearest.
        least = torch.addmm(norms, chunk, centroids.T, alpha=-2).min(1)
        labels.append(least.indices)
        distances.append((least.values + chunk.square().sum(1)).clamp_(min=0))
    return Assignment(torch.cat(labels), torch.cat(distances))


def nearest_exactly(rows: Tensor, centroids: Tensor) -> Assignment:
    """Return the same without rounding errors, for float32 rows and centroids.

    Computed in float64, and from differences if products are not accurate enough, so every centroid is its own nearest.

    >>> nearest_exactly(torch.tensor([[4e8], [1e-5], [0.0]]), torch.tensor([[0.0], [1e-5], [4e8]])).labels
    tensor([2, 1, 0])
    """
    middle = centroids.double().mean(0)
    centers = centroids.double() - middle
    norms = centers.square().sum(1)
    doubt = 4 * (centers.shape[1] + 4) * torch.finfo(torch.float64).eps
    labels, distances = [], []
    for part in torch.split(rows, max(1, _CHUNK // (centers.shape[0] + centers.shape[1]))):
        moved = part.double() - middle
        own = moved.square().sum(1)
        squared = torch.addmm(norms, moved, centers.T, alpha=-2)
        least = squared.min(1)
        nearly = squared <= (least.values + doubt * (own + norms.max()))[:, None]
        unsure = (nearly.sum(1) > 1).nonzero()[:, 0]
        found = Assignment(least.indices, (least.values + own).clamp_(min=0))
        if len(unsure):
            closer = _exact(part[unsure].double(), centroids.double()).min(1)
            found.labels[unsure], found.distances[unsure] = closer.indices, closer.values
        labels.append(found.labels)
        distances.append(found.distances)
    return Assignment(torch.cat(labels), torch.cat(distances))


def _frame(rows: Tensor) -> tuple[Tensor, float]:
    """The midpoint of the rows, and a power of two bounding their distance from it; float64."""
    mean = torch.stack([part.double().sum(0) for part in _parts(rows)]).sum(0) / rows.shape[0]
    reach = max(float((part.double() - mean).abs().max()) for part in _parts(rows))
    return mean, 2.0 ** math.frexp(reach)[1]


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows into parts that are small enough to copy."""
    return torch.split(rows, max(1, _CHUNK // rows.shape[1]))


def _start(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Choose the initial centroids among the rows, or among a sample of very many rows."""
    number = max(_START_ROWS, _START_ROWS_PER_CENTROID * size)
    if rows.shape[0] > number:
        chosen = torch.randperm(rows.shape[0], generator=generator)[:number]
        centroids = _spread(rows[chosen.to(rows.device)], size, generator)
        if centroids.shape[0] == size:
            return centroids
    return _spread(rows, size, generator)


def _spread(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++: of several rows drawn by squared distance, choose the one that lowers the sum most.

    Ends early when every row is a centroid already.
    """
    trials = 2 + int(math.log(size))
    first = int(torch.randint(rows.shape[0], (1,), generator=generator))
    chosen = [first]
    closest = _exact(rows, rows[first : first + 1])[:, 0]
    for _ in range(size - 1):
        sums = closest.cumsum(0, dtype=torch.float64)
        total = float(sums[-1])
        if total <= 0:
            break
        drawn = torch.rand(trials, generator=generator, dtype=torch.float64).to(rows.device) * total
        candidates = torch.searchsorted(sums, drawn, right=True).clamp_(max=rows.shape[0] - 1)
        lowered = torch.minimum(closest[:, None], _exact(rows, rows[candidates]))
        best = int(lowered.sum(0, dtype=torch.float64).argmin())
        closest = lowered[:, best].contiguous()
        chosen.append(int(candidates[best]))
    return rows[torch.tensor(chosen, device=rows.device)]


def _exact(rows: Tensor, others: Tensor) -> Tensor:
    """Squared distances from differences: exactly 0 for equal rows, unlike products of large numbers."""
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist").square_()


def _lloyd(rows: Tensor, centroids: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Move centroids to the means of their rows until the squared movement is small."""
    for _ in range(iterations):
        labels, distances = nearest(rows, centroids)
        sums, counts = _totals(rows, labels, centroids.shape[0])
        _fill_empty(rows, labels, distances, sums, counts)
        moved = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centroids.double())
        shift = float((moved - centroids).square().sum())
        centroids = moved.to(torch.float32)
        if shift <= tolerance:
            break
    return centroids


def _totals(rows: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums and counts of the rows of every centroid, in float64."""
    sums = torch.zeros(size, rows.shape[1], dtype=torch.float64, device=rows.device)
    for part, own in zip(_parts(rows), torch.split(labels, len(_parts(rows)[0])), strict=True):
        sums.index_add_(0, own, part.double())
    return sums, torch.bincount(labels, minlength=size).double()


def _fill_empty(rows: Tensor, labels: Tensor, distances: Tensor, sums: Tensor, counts: Tensor) -> None:
    """Assign to each centroid without rows one of the farthest rows of the others."""
    empty = (counts == 0).nonzero()[:, 0]
    if not len(empty):
        return
    farthest = distances.topk(min(len(empty), len(distances))).indices
    empty = empty[: len(farthest)]
    taken = rows[farthest].double()
    sums.index_add_(0, labels[farthest], -taken)
    counts.index_add_(0, labels[farthest], -torch.ones_like(counts[: len(farthest)]))
    sums[empty], counts[empty] = taken, 1.0
