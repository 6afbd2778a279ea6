"""Thousands of ranks, simulated: the shares of all of them are the batches of one, nothing lost and nothing twice."""

import time
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from token_samples import numbered, opened_documents

from etude.core.batch import DataBatch, JointBatch
from etude.data import DataLoader, PackedDocuments, StreamLoader, TokenBlocks, TokenDocuments, TokenMixture
from etude.data.order.sampler import share

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


def packed_documents(strategy="split"):
    file = opened_documents(numbered([1, 2, 3, 5, 7] * 2000))
    return DataLoader(PackedDocuments(file, 8, strategy), batch_size=2_001)


def buckets():
    file = opened_documents(numbered([1, 2, 3, 5, 7] * 2000 + [4] * 7))
    return DataLoader(TokenDocuments(file), batch_size=BATCH // 2, bucket_batches=2)


def mixture(weights=None):
    parts = {name: TokenBlocks(opened_documents(numbered([size])), 2) for name, size in (("a", 9000), ("b", 12_000))}
    return DataLoader(TokenMixture(parts, weights), batch_size=BATCH)


def streams(**options):
    parts = {"a": torch.arange(SAMPLES), "b": torch.arange(SAMPLES, 2 * SAMPLES)}
    return StreamLoader(parts, BATCH, weights={"a": 2, "b": 1}, **options)


LOADERS = {
    "tensors": tensors,
    "dataset": dataset,
    "token blocks": token_blocks,
    "packed documents": packed_documents,
    "packed by best fit": lambda: packed_documents("fit"),
    "buckets": buckets,
    "several sources": mixture,
    "mixture": lambda: mixture({"a": 0.3, "b": 0.7}),
    "streams": streams,
    "streams together": lambda: streams(draw="together"),
    "streams once": lambda: streams(training=False),
}
REPEATED = ("mixture", "streams", "streams together")
"""Those that draw samples of a small data set again before all others have been drawn."""


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_of_4096_ranks_is_that_of_one_with_nothing_lost_and_nothing_twice(kind):
    """Every batch of the epoch: which samples each rank draws. That it reads them too is the next test."""
    loader = LOADERS[kind]()
    spent = -time.process_time()
    ranks = [loader.shared(rank, RANKS) for rank in range(RANKS)]
    position, epoch = 0, defaultdict(list)
    while position < loader.epoch_samples:
        shares = [one.drawn(0, position) for one in ranks]
        for stream, whole in loader.drawn(0, position).items():
            joined = np.concatenate([mine[stream] for mine in shares])
            assert np.array_equal(joined, whole)
            epoch[stream].append(joined)
            position += len(joined)
    counts = {stream: np.bincount(np.concatenate(batches)) for stream, batches in epoch.items()}
    spent += time.process_time()
    assert position == loader.epoch_samples
    if kind == "mixture":
        both, first = counts.pop(""), len(loader.data.sources[0])
        counts = {"a": both[:first], "b": both[first:]}
    for stream, often in counts.items():
        assert often.max() - often.min() <= 1, stream  # a second pass begins when the first one is complete
        assert kind in REPEATED or often.max() == 1, stream
    if kind not in REPEATED:
        assert sum(map(len, counts.values())) == loader.epoch_samples
    assert spent < 10, f"{spent:.1f} s of CPU for {RANKS} ranks"  # 0.05 to 0.15 s on an idle core


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(1, 300))
def test_the_shares_of_all_ranks_at_once_are_those_of_each(start, count, ranks):
    begins, ends = share(start, count, np.arange(ranks), ranks)
    assert [*zip(begins.tolist(), ends.tolist(), strict=True)] == [
        share(start, count, r, ranks) for r in range(ranks)
    ]
    assert begins[0] == start
    assert ends[-1] == start + count
    assert np.array_equal(begins[1:], ends[:-1])


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


def widened(samples, like):
    """Return documents padded to the longest of all ranks."""
    return samples if samples.dim() < 2 else F.pad(samples, (0, like.shape[1] - samples.shape[1]))


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
            mine = [widened(one[number][place], expected) for one in shares]
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
