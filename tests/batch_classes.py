"""Classes that batches are made of in other people's libraries."""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class GraphBatch:
    """Behaves as `torch_geometric.data.Batch` does: one large graph of several, which moves itself in place."""

    def __init__(self, x, edge_index, batch, y):
        self.store = {"x": x, "edge_index": edge_index, "batch": batch, "y": y}

    def __getattr__(self, name):
        store = self.__dict__.get("store", {})
        if name not in store:
            raise AttributeError(name)
        return store[name]

    @property
    def num_graphs(self):
        return int(self.batch.max()) + 1 if len(self.batch) else 0

    def to(self, device, *args, non_blocking=False):
        self.store = {name: value.to(device, non_blocking=non_blocking) for name, value in self.store.items()}
        return self

    def pin_memory(self):
        self.store = {name: value.pin_memory() for name, value in self.store.items()}
        return self


def graphs(sizes, seed=0):
    """Return a batch of graphs with so many nodes, each of them a ring, with the label whether it has many."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 4, generator=generator)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    edges = [
        [start + node, start + (node + 1) % size]
        for start, size in zip(starts, sizes, strict=True)
        for node in range(size)
    ]
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return GraphBatch(x, torch.tensor(edges).T, batch, torch.tensor([int(size > 3) for size in sizes]))


class OneGraph:
    """Tells nobody how many samples it has."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return OneGraph(self.x.to(device), self.y.to(device))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: str = "frozen"


@dataclass(frozen=True)
class Derived:
    """Has a tensor that is no field, and one field that the constructor does not take."""

    x: Any
    twice: Any = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.x)
        object.__setattr__(self, "thrice", self.x)


class Lookup(Mapping):
    """A mapping that is no dict, and cannot be written to."""

    def __init__(self, values):
        self.values_by_key = dict(values)

    def __getitem__(self, key):
        return self.values_by_key[key]

    def __iter__(self):
        return iter(self.values_by_key)

    def __len__(self):
        return len(self.values_by_key)


class Bag(UserDict):
    """A mapping of its own, with settings that are no items."""

    colour = "red"
