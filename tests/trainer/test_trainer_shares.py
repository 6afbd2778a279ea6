"""Validation over several ranks: every sample is counted once, whatever the remainder and the source."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, DistributedSampler
from torch.utils.data.dataset import Dataset

from etude import DataLoader
from etude.core.batch import is_empty
from etude.data import PackedDocuments, StreamLoader, TensorData, TokenBlocks, TokenMixture, TokenWriter, open_tokens
from etude.distributed import World
from etude.trainer import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine


class Numbers(Dataset):
    """The numbers from 0 on."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def column(count, first=0):
    return torch.arange(first, first + count, dtype=torch.float32)[:, None]


def by_sampler(count, world, **options):
    sampler = DistributedSampler(Numbers(count), world.size, world.rank, shuffle=count % 2 == 0)
    return TorchDataLoader(Numbers(count), 3, sampler=sampler, **options)


def by_batches(count, world):
    sampler = DistributedSampler(Numbers(count), world.size, world.rank, shuffle=False)
    return TorchDataLoader(Numbers(count), batch_sampler=BatchSampler(sampler, 2, drop_last=False))


SOURCES = {
    "tensors": lambda count, _: column(count),
    "dataset": lambda count, _: Numbers(count),
    "loader": lambda count, _: DataLoader(TensorData(column(count)), batch_size=7),
    "streams": lambda count, _: StreamLoader({"a": column(count), "b": column(2 * count, count)}, 5, training=False),
    "torch, padded": by_sampler,
    "torch, unbatched": lambda count, world: TorchDataLoader(
        Numbers(count), None, sampler=DistributedSampler(Numbers(count), world.size, world.rank)
    ),
    "torch, batches": by_batches,
}


def values(loader):
    for batch in loader.iterate(0):
        for one in batch if isinstance(batch, list) and not isinstance(batch[0], torch.Tensor) else [batch]:
            if not is_empty(one):
                found = (
                    one.get("input", one.get("input_ids"))
                    if isinstance(one, dict)
                    else one[0]
                    if isinstance(one, (tuple, list))
                    else one
                )
                yield from (found.flatten() if isinstance(found, torch.Tensor) else found.data.flatten()).tolist()


def shares(make, count, size, batch_size):
    for rank in range(size):
        world = World(rank, size)
        config = TrainerConfig(batch_size=batch_size, device="cpu")
        machine = Machine("cpu", world=world)
        yield from values(
            Loaders(None, make(count, world), config=config, machine=machine, model=nn.Linear(1, 1)).validation
        )


def tokens(count, folder):
    """A file of documents of 1 to 9 tokens, of which each occurs once."""
    with TokenWriter(folder / f"{count}.bin", dtype="uint16", meta={"vocab_size": 1000}) as out:
        first = 1
        for number in range(count):
            length = 1 + number % 9
            out.add(list(range(first, first + length)))
            first += length
    return open_tokens(folder / f"{count}.bin"), first - 1


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("count", [1, 4, 23])
def test_each_token_of_packed_documents_and_mixtures_once(tmp_path, count, size):
    file, total = tokens(count, tmp_path)
    packed = list(shares(lambda *_: PackedDocuments(file, 16, last="pad", labels="none"), count, size, 6))
    assert Counter(value for value in packed if value) == Counter(map(float, range(1, total + 1)))
    if total < 8:
        return
    two = TokenMixture({"a": TokenBlocks(file, 4), "b": TokenBlocks(file, 4)}, {"a": 1, "b": 2}, 9)
    alone = Counter(shares(lambda *_: two, count, 1, 6))
    assert Counter(shares(lambda *_: two, count, size, 6)) == alone


@pytest.mark.parametrize("source", SOURCES)
@given(count=st.integers(1, 40), size=st.integers(1, 5), batch_size=st.integers(5, 12))
@settings(deadline=None)
def test_each_sample_is_validated_once(source, count, size, batch_size):
    expected = 3 * count if source == "streams" else count
    assert Counter(shares(SOURCES[source], count, size, batch_size)) == Counter(map(float, range(expected)))
