"""Thousands of ranks, simulated: the shares of all of them are the batches of one, nothing lost and nothing twice."""

import time

import pytest
import torch
from hypothesis import given, strategies as st
from token_samples import numbered, opened_documents

from etude.core.batch import DataBatch, JointBatch
from etude.data import DataLoader, PackedDocuments, StreamLoader, TokenBlocks, TokenMixture

RANKS = 4096
SAMPLES = 10_007
"""A prime: no size divides it."""
BATCH = 5_000
"""Two full batches and one with fewer samples than ranks; none is a multiple of the ranks."""


def tensors():
    return DataLoader(torch.arange(SAMPLES), batch_size=BATCH)


def dataset():
    return DataLoader(Items(), batch_size=BATCH, num_workers=0)


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def token_blocks():
    return DataLoader(TokenBlocks(opened_documents(numbered([SAMPLES * 2 + 1])), 2), batch_size=BATCH)


def packed_documents():
    return DataLoader(PackedDocuments(opened_documents(numbered([1, 2, 3, 5, 7] * 2000)), 8), batch_size=2_001)


def mixture():
    parts = {name: TokenBlocks(opened_documents(numbered([size])), 2) for name, size in (("a", 9000), ("b", 12_000))}
    return DataLoader(TokenMixture(parts, {"a": 0.3, "b": 0.7}), batch_size=BATCH)


def streams(**options):
    parts = {"a": torch.arange(SAMPLES), "b": torch.arange(SAMPLES, 2 * SAMPLES)}
    return StreamLoader(parts, BATCH, weights={"a": 2, "b": 1}, **options)


LOADERS = {
    "tensors": tensors,
    "dataset": dataset,
    "token blocks": token_blocks,
    "packed documents": packed_documents,
    "mixture": mixture,
    "streams": streams,
    "streams together": lambda: streams(draw="together"),
    "streams once": lambda: streams(training=False),
}


def parts(batch):
    """Return the samples of a batch, stream by stream."""
    match batch:
        case JointBatch():
            return [samples for one in batch for samples in parts(one)]
        case DataBatch():
            return [batch.data]
        case torch.Tensor():
            return [batch]
    return [batch["input_ids" if "input_ids" in batch else "input"]]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_shares_of_4096_ranks_are_the_batches_of_one(kind):
    loader = LOADERS[kind]()
    last = loader.epoch_samples - 1 - (loader.epoch_samples - 1) % loader.batch_size  # the last batch, ragged or not
    whole = [parts(batch) for batch in loader.iterate(3, last)]
    spent = -time.process_time()
    shares = [[parts(batch) for batch in loader.shared(rank, RANKS).iterate(3, last)] for rank in range(RANKS)]
    spent += time.process_time()
    for number, batch in enumerate(whole):
        for place, expected in enumerate(batch):
            mine = [one[number][place] for one in shares]
            assert torch.equal(torch.cat(mine), expected)
            assert max(map(len, mine)) - min(map(len, mine)) <= 1
    assert spent < 2, f"{spent:.1f} s of CPU for {RANKS} ranks"  # 0.1 to 0.8 s where it was measured


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 70), st.booleans())
def test_an_epoch_of_any_size_has_every_sample_once_over_any_number_of_ranks(samples, batch_size, ranks, drop_last):
    drop_last = drop_last and batch_size <= samples
    loader = DataLoader(torch.arange(samples), batch_size=batch_size, drop_last=drop_last)
    shares = [list(loader.shared(rank, ranks).iterate(1)) for rank in range(ranks)]
    seen = torch.cat([batch.data for one in shares for batch in one]).tolist()
    assert len(set(seen)) == len(seen) == samples - (samples % batch_size if drop_last else 0)
    assert {len(one) for one in shares} == {len(loader)}  # an empty share is a batch too: no rank skips a step
