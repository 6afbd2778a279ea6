"""Orders: every epoch a rearrangement of the samples, reachable at any position; mixtures in exact proportions."""

from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from etude.core.errors import DataError
from etude.data import BatchSampler
from etude.data.order.mixed import BucketOrder, MixtureOrder
from etude.data.order.permutation import SequentialOrder, ShuffledOrder

seeds = st.integers(0, 2**40)


def bucketed(size, batch_size, pool_batches, seed=0, *, shuffle=True, lengths=None):
    lengths = np.random.default_rng(seed).integers(16, 513, size) if lengths is None else lengths
    base = ShuffledOrder(size, seed) if shuffle else SequentialOrder(size)
    return (
        BucketOrder(base, lambda i: lengths[i], batch_size=batch_size, pool_batches=pool_batches, seed=seed),
        lengths,
    )


@given(
    size=st.integers(1, 500),
    batch_size=st.integers(1, 40),
    pool=st.integers(1, 12),
    seed=seeds,
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_bucketing_rearranges_and_any_piece_equals_that_of_the_whole(size, batch_size, pool, seed, epoch, data):
    order, _ = bucketed(size, batch_size, pool, seed)
    whole = order.indices(epoch, 0, size)
    assert sorted(whole.tolist()) == list(range(size))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    fresh, _ = bucketed(size, batch_size, pool, seed)
    assert fresh.indices(epoch, start, stop).tolist() == whole[start:stop].tolist()


def test_bucketing_pads_little_and_still_shuffles():
    order, lengths = bucketed(64_000, 32, 100)

    def waste(indices):
        rows = lengths[indices].reshape(-1, 32)
        return 1 - rows.sum() / (rows.max(axis=1) * 32).sum()

    bucketed_epochs = [order.indices(epoch, 0, 64_000) for epoch in (0, 1)]
    assert waste(ShuffledOrder(64_000, 0).indices(0, 0, 64_000)) > 0.4
    for indices in bucketed_epochs:
        assert waste(indices) < 0.02
    assert not np.array_equal(*bucketed_epochs)
    # The batches of a pool do not come from short to long: their lengths tell nothing of their place in it.
    longest = lengths[bucketed_epochs[0]].reshape(-1, 32).max(axis=1)
    assert abs(np.corrcoef(longest, np.arange(len(longest)) % 100)[0, 1]) < 0.1
    # Within a batch, and so over the ranks that share it, they do not either.
    inside = lengths[bucketed_epochs[0]].reshape(-1, 32)
    first, second = inside[:, :16].mean(), inside[:, 16:].mean()
    assert abs(first - second) / first < 0.01


def test_orders_that_were_asked_for_one_epoch_answer_for_another():
    lengths = np.random.default_rng(1).integers(1, 50, 40)
    makers = [
        lambda: bucketed(40, 4, 10, 3, lengths=lengths)[0],
        lambda: ShuffledOrder(40, 3),
        lambda: MixtureOrder([30, 10], [1, 1], seed=3, size=40),
    ]
    for make in makers:
        used = make()
        for epoch in (0, 1, 0, 5, 1):
            assert used.indices(epoch, 0, 40).tolist() == make().indices(epoch, 0, 40).tolist()


@given(size=st.integers(1, 300), world_size=st.integers(1, 5), seed=seeds, drop_last=st.booleans())
def test_bucketed_batches_are_the_same_for_any_number_of_ranks(size, world_size, seed, drop_last):
    batch_size = min(8, size)
    order, _ = bucketed(size, batch_size, 4, seed)

    def batches(rank, ranks):
        sampler = BatchSampler(0, batch_size, drop_last=drop_last, rank=rank, world_size=ranks, order=order)
        return [sampler.batch(1, p).tolist() for p in range(0, sampler.epoch_samples, batch_size)]

    whole = batches(0, 1)
    shares = [batches(rank, world_size) for rank in range(world_size)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    if not drop_last:
        assert sorted(chain(*whole)) == list(range(size))


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    seed=seeds,
    size=st.integers(1, 5000),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_mixtures_keep_their_proportions_and_are_reached_anywhere(sizes, seed, size, shuffle, data):
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    order = MixtureOrder(sizes, weights, seed=seed, size=size, shuffle=shuffle)
    epochs = 3
    drawn = np.concatenate([order.indices(epoch, 0, size) for epoch in range(epochs)])
    which = np.searchsorted(np.cumsum(sizes), drawn, side="right")
    share = [Fraction(w).limit_denominator(10**6) for w in weights]
    for number, weight in enumerate(share):
        wanted = float(weight / sum(share)) * np.arange(1, len(drawn) + 1)
        assert np.abs(np.cumsum(which == number) - wanted).max() <= len(sizes) + 1
        mine = drawn[which == number] - (0, *np.cumsum(sizes))[number]
        counts = np.bincount(mine, minlength=sizes[number])
        # Without replacement: no sample a second time before all have come once. Draws of two passes may overlap
        # by one cycle, where they are spread among the others.
        whole = len(mine) // sizes[number]
        assert counts.max() <= whole + 2
        assert counts.sum() == len(mine)
    epoch = data.draw(st.integers(0, epochs - 1))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    fresh = MixtureOrder(sizes, weights, seed=seed, size=size, shuffle=shuffle)
    expected = drawn[epoch * size + start : epoch * size + stop]
    assert fresh.indices(epoch, start, stop).tolist() == expected.tolist()


def test_a_cycle_of_a_mixture_may_leave_out_a_data_set_of_small_weight():
    order = MixtureOrder([1] * 5, [1.0, 0.5, 0.01171875, 1.0, 7.5], size=683, shuffle=False)
    drawn = np.concatenate([order.indices(epoch, 0, 683) for epoch in range(30)])
    share = 0.01171875 / 10.01171875
    assert abs(int((drawn == 2).sum()) - share * len(drawn)) <= 5


def test_the_samples_of_a_mixture_come_once_before_any_comes_twice():
    order = MixtureOrder([700, 300], [7, 3], seed=3, size=1000)
    for epoch in range(3):
        drawn = np.concatenate([order.indices(epoch, 0, 1000)])
        # 1000 draws are not a whole cycle, so passes may overlap at their edges.
        assert np.bincount(drawn, minlength=1000).max() <= 2
    small = MixtureOrder([10, 10_000], [1, 1], seed=3, size=2048).indices(0, 0, 2048)
    often = np.bincount(small[small < 10], minlength=10)
    assert often.sum() == 1024
    assert often.max() - often.min() <= 2


def test_a_far_position_of_a_mixture_costs_no_more_than_a_near_one():
    order = MixtureOrder([10**9, 10**6], [0.3, 0.7], seed=1, size=10**12)
    assert len(set(order.indices(4, 10**11, 10**11 + 64).tolist())) == 64


@pytest.mark.parametrize(
    ("sizes", "weights", "words"),
    [
        ([10], [1, 2], "one weight per data set"),
        ([10, 10], [1, 0], "must be positive"),
        ([10, 10], [1, -2], "must be positive"),
        ([10, 10], [1, float("nan")], "must be positive"),
        ([10, 0], [1, 1], "empty"),
        ([10, 10], [1e9, 1e-9], "differ too much"),
    ],
)
def test_wrong_mixtures_are_explained(sizes, weights, words):
    with pytest.raises(DataError, match=words):
        MixtureOrder(sizes, weights)


def test_a_pool_needs_batches():
    with pytest.raises(DataError, match="at least 1"):
        bucketed(10, 2, 0)


@settings(deadline=None)
@given(
    size=st.integers(1, 400),
    batch_size=st.integers(1, 50),
    count=st.integers(1, 9),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_chunks_are_the_batches_put_together(size, batch_size, count, drop_last, data):
    batch_size = min(batch_size, size)
    sampler = BatchSampler(size, batch_size, seed=5, drop_last=drop_last)
    position = data.draw(st.integers(0, size))
    expected = []
    place = position
    while sampler.has_batch(place):
        expected.append(sampler.batch(2, place).tolist())
        place = sampler.next_position(place)
    after = [sampler.next_position(position + batch_size * number) for number in range(len(expected))]
    assert list(sampler.positions(position)) == after
    found = []
    for indices, number in sampler.chunks(2, position, count):
        assert 1 <= number <= count
        assert len(indices) % number == 0
        found += [part.tolist() for part in np.split(indices, number)]
    assert found == expected
