"""The batch sampler: every sample once, the same batches for any number of ranks, exact from any position."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from etude.core.errors import DataError
from etude.data import BatchSampler

sizes = st.integers(1, 200)
batch_sizes = st.integers(1, 50)


def flat(lists):
    return list(chain.from_iterable(lists))


def walk(sampler, epoch=0, position=0):
    """(position, indices) of every batch from `position` on."""
    while sampler.has_batch(position):
        yield position, sampler.batch(epoch, position).tolist()
        position = sampler.next_position(position)


@settings(deadline=None)
@given(n=sizes, size=batch_sizes, shuffle=st.booleans(), epoch=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_an_epoch_has_every_sample_once(n, size, shuffle, epoch, seed):
    sampler = BatchSampler(n, size, shuffle=shuffle, seed=seed)
    batches = [indices for _, indices in walk(sampler, epoch)]
    assert sorted(flat(batches)) == list(range(n))
    assert len(batches) == len(sampler) == sampler.num_batches == -(-n // size)
    assert all(len(batch) == size for batch in batches[:-1])
    if not shuffle:
        assert flat(batches) == list(range(n))


@settings(deadline=None)
@given(n=sizes, size=batch_sizes, epoch=st.integers(0, 9), world=st.integers(1, 9), drop=st.booleans())
def test_ranks_share_the_same_global_batches(n, size, epoch, world, drop):
    if drop and size > n:
        return
    alone = dict(walk(BatchSampler(n, size, drop_last=drop), epoch))
    ranks = [
        dict(walk(BatchSampler(n, size, drop_last=drop, rank=rank, world_size=world), epoch)) for rank in range(world)
    ]
    for position, expected in alone.items():
        shares = [rank[position] for rank in ranks]
        assert flat(shares) == expected
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(rank.keys() == alone.keys() for rank in ranks)


def test_a_ragged_batch_may_be_empty_on_a_rank():
    shares = [BatchSampler(9, 4, rank=rank, world_size=4).batch(0, 8) for rank in range(4)]
    assert sorted(len(share) for share in shares) == [0, 0, 0, 1]
    empty = next(share for share in shares if len(share) == 0)
    assert empty.shape == (0,)
    assert empty.dtype == np.int64


@settings(deadline=None)
@given(n=sizes, size=batch_sizes, epoch=st.integers(0, 5))
def test_from_any_position_on_the_rest_is_the_same(n, size, epoch):
    whole = list(walk(BatchSampler(n, size), epoch))
    for i, (position, _) in enumerate(whole):
        assert list(walk(BatchSampler(n, size), epoch, position)) == whole[i:]


def test_a_position_of_another_batch_size_continues_without_loss():
    first = BatchSampler(100, 8).batch(2, 0).tolist()
    rest = [indices for _, indices in walk(BatchSampler(100, 30), 2, 8)]
    assert sorted(first + flat(rest)) == list(range(100))


def test_drop_last_leaves_out_what_fills_no_batch():
    sampler = BatchSampler(10, 4, drop_last=True)
    assert (sampler.epoch_samples, len(sampler)) == (8, 2)
    assert [len(batch) for batch in sampler] == [4, 4]
    # From an odd position, too, only full batches come.
    assert [len(batch) for _, batch in walk(sampler, position=2)] == [4]
    # Over the epochs, which samples are left out changes.
    left_out = {tuple(sorted(set(range(10)) - set(flat(b for _, b in walk(sampler, e))))) for e in range(20)}
    assert len(left_out) > 5


def test_epochs_and_seeds_give_different_orders_and_each_is_repeated():
    def order(seed, epoch):
        return flat(indices for _, indices in walk(BatchSampler(50, 7, seed=seed), epoch))

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_epochs_in_turn_do_not_disturb_each_other():
    sampler = BatchSampler(100_000, 10)
    expected = {(e, p): BatchSampler(100_000, 10).batch(e, p).tolist() for e in (0, 1) for p in (0, 4090, 8000)}
    for key in [(0, 0), (1, 0), (0, 4090), (1, 8000), (0, 8000), (1, 4090)]:
        assert sampler.batch(*key).tolist() == expected[key]


def test_it_serves_torchs_loader():
    sampler = BatchSampler(10, 4, seed=3)
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    for epoch in (0, 5):
        sampler.set_epoch(epoch)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        assert len(loader) == 3
        assert [x.tolist() for (x,) in loader] == [indices for _, indices in walk(sampler, epoch)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_pass_is_the_next_epoch(num_workers):
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    sampler, loaded = BatchSampler(10, 4, seed=3), BatchSampler(10, 4, seed=3)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=loaded, num_workers=num_workers)
    for start in (0, 7):
        sampler.set_epoch(start)
        loaded.set_epoch(start)
        for epoch in (start, start + 1):
            expected = [indices for _, indices in walk(BatchSampler(10, 4, seed=3), epoch)]
            assert list(sampler) == expected
            assert [x.tolist() for (x,) in loader] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "batch_size": 4}, "the data is empty"),
        ({"num_samples": 5, "batch_size": 0}, "batch_size is 0"),
        ({"num_samples": 5, "batch_size": -1}, "batch_size is -1"),
        ({"num_samples": 5, "batch_size": 6, "drop_last": True}, "batch_size 6 is larger than the 5 samples.*lower"),
        ({"num_samples": 5, "batch_size": 2, "rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"num_samples": 5, "batch_size": 2, "rank": -1, "world_size": 2}, "rank -1"),
        ({"num_samples": 5, "batch_size": 2, "world_size": 0}, "world_size 0"),
    ],
)
def test_bad_arguments_are_explained_in_one_line(arguments, message):
    with pytest.raises(DataError, match=message) as caught:
        BatchSampler(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("position", [-1, 10, 11])
def test_a_position_outside_the_epoch_is_refused(position):
    with pytest.raises(DataError, match=f"position {position} .* 10 samples"):
        BatchSampler(10, 4).batch(0, position)
