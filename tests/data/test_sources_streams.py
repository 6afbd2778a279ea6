"""Loaders over streams: exact order from any position, in proportion, for any number of ranks and any mixture."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from stream_parts import by_stream, epochs, parts, plain

from etude.core.batch import num_samples
from etude.core.random import mix
from etude.data import DataLoader, StreamLoader
from etude.data.order.streams import apportioned, stable_number

sizes_of_streams = st.lists(st.integers(1, 40), min_size=1, max_size=4)
weights_of_streams = st.lists(st.sampled_from([0.1, 0.5, 1, 2, 3.7, 9]), min_size=4, max_size=4)


@given(sizes_of_streams, weights_of_streams, st.integers(4, 9), st.sampled_from(["alternate", "together"]))
def test_each_stream_is_what_a_loader_of_its_own_gives_epoch_after_epoch(sizes, weights, batch_size, draw):
    data = parts(sizes)
    loader = StreamLoader(
        data, batch_size, weights=dict(zip(data, weights, strict=False)), draw=draw, epoch_samples=60, seed=3
    )
    for name, drawn in by_stream(epochs(loader, 4)).items():
        alone = DataLoader(data[name].data, batch_size=7, seed=mix(3, stable_number(name)))
        expected = [
            value
            for epoch in range(len(drawn) // len(data[name]) + 1)
            for batch in alone.iterate(epoch)
            for value in batch.data.tolist()
        ]
        assert drawn == expected[: len(drawn)]


def test_every_pass_has_every_sample_once_in_a_new_order():
    drawn = by_stream(epochs(StreamLoader(parts([30, 11]), 4, weights={"a": 1, "b": 1}), 12))
    for start, size, values in ((0, 30, drawn["a"]), (1000, 11, drawn["b"])):
        passes = [tuple(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
        assert len(passes) > 3
        assert len(set(passes)) == len(passes)
        assert all(sorted(one) == list(range(start, start + size)) for one in passes)


@given(weights_of_streams, st.integers(0, 10), st.integers(2, 4))
def test_proportions_are_exact_at_every_moment(weights, seed, number):
    data = parts([5] * number)
    weights = dict(zip(data, weights, strict=False))
    loader = StreamLoader(data, 2, weights=weights, epoch_samples=500, seed=seed)
    counts = dict.fromkeys(data, 0)
    for done, batch in enumerate(epochs(loader, 3), start=1):
        counts[batch["stream"]] += 1
        for name, weight in weights.items():
            assert abs(counts[name] - weight / sum(weights.values()) * done) <= number


def test_streams_count_by_their_sizes_by_default():
    loader = StreamLoader(parts([60, 20]), 4)
    assert len(loader) == 20
    names = [batch["stream"] for batch in epochs(loader, 1)]
    assert abs(names.count("a") - 15) <= 1
    drawn = by_stream(epochs(StreamLoader(parts([60, 20]), 4, draw="together"), 1))
    assert sorted(drawn["a"]) == list(range(60))
    assert sorted(drawn["b"]) == list(range(1000, 1020))


@given(
    sizes=sizes_of_streams,
    batch_size=st.integers(4, 7),
    draw=st.sampled_from(["alternate", "together"]),
    training=st.booleans(),
    prefetch=st.sampled_from([0, 2]),
    shuffle=st.booleans(),
)
def test_seeking_gives_the_rest_of_the_epoch(sizes, batch_size, draw, training, prefetch, shuffle):
    def loader(ahead):
        return StreamLoader(
            parts(sizes),
            batch_size,
            draw=draw,
            training=training,
            prefetch=ahead,
            shuffle=shuffle,
            weights=dict.fromkeys(parts(sizes), 1),
        )

    for epoch in (0, 5):
        whole, places = [], [0]
        running = loader(0).iterate(epoch)
        for batch in running:
            whole.append(plain(batch))
            places.append(running.position)
            assert places[-1] - places[-2] == num_samples(batch)
        assert len(whole) == len(loader(0))
        for number in {0, 1, len(whole) // 2, len(whole) - 1, len(whole)}:
            rest = loader(prefetch).iterate(epoch, places[number])
            assert rest.position == places[number]
            for batch, expected in zip(rest, whole[number:], strict=True):
                assert plain(batch) == expected
            assert rest.position == places[-1]
            rest.close()
            rest.close()


@pytest.mark.parametrize("draw", ["alternate", "together"])
def test_a_position_within_a_batch_gives_the_rest_of_it(draw):
    loader = StreamLoader(parts([9, 30]), 6, draw=draw, weights={"a": 1, "b": 2})
    whole, rest = (by_stream(map(plain, loader.iterate(2, position))) for position in (0, 4))
    lost = [value for name in whole for value in whole[name][: len(whole[name]) - len(rest[name])]]
    assert len(lost) == 4
    assert all(whole[name][-len(rest[name]) :] == rest[name] for name in whole)


@given(
    sizes_of_streams,
    st.integers(4, 9),
    st.integers(2, 6),
    st.sampled_from(["alternate", "together"]),
    st.booleans(),
    st.booleans(),
)
def test_ranks_part_the_same_batches(sizes, batch_size, world_size, draw, training, copied):
    def loader(**rank):
        return StreamLoader(parts(sizes), batch_size, draw=draw, training=training, **rank)

    alone = epochs(loader(), 2)
    shares = [
        epochs(loader().shared(r, world_size) if copied else loader(rank=r, world_size=world_size), 2)
        for r in range(world_size)
    ]
    for expected, *found in zip(alone, *shares, strict=True):
        joint = isinstance(expected, list)
        for number, part in enumerate(expected if joint else [expected]):
            mine = [one[number] if joint else one for one in found]
            assert {one["stream"] for one in mine} == {part["stream"]}
            for key in ("input", "labels"):
                assert [value for one in mine for value in one[key]] == part[key]
            lengths = [len(one["input"]) for one in mine]
            assert max(lengths) - min(lengths) <= 1


def test_choosing_is_undone_by_choosing_back_and_leaves_the_length_alone():
    loader = StreamLoader(parts([20, 30, 10]), 5, weights={"a": 1, "b": 2, "c": 0})
    before, length = epochs(loader, 2), len(loader)
    assert "c" not in by_stream(before)
    assert loader.choose({"a": 1, "c": 3})
    chosen = epochs(loader, 2)
    assert not loader.choose({"a": 2, "c": 6}), "the same proportions"
    assert len(loader) == length == len(chosen) / 2
    assert set(by_stream(chosen)) == {"a", "c"}
    assert loader.choose(only={"b"})
    assert set(by_stream(epochs(loader, 2))) == {"b"}
    assert loader.choose()
    assert not loader.choose()
    assert epochs(loader, 2) == before
    fresh = StreamLoader(parts([20, 30, 10]), 5, weights={"a": 1, "b": 2, "c": 0})
    fresh.choose({"a": 1, "c": 3})
    assert epochs(fresh, 2) == chosen, "what was chosen before does not matter"


def test_only_keeps_the_proportions_of_the_others():
    loader = StreamLoader(parts([20, 30, 10]), 1, weights={"a": 1, "b": 2, "c": 5}, epoch_samples=300)
    loader.choose(only=["a", "b"])
    names = [batch["stream"] for batch in epochs(loader, 1)]
    assert abs(names.count("a") - 100) <= 2
    assert abs(names.count("b") - 200) <= 2


def test_an_epoch_under_way_is_not_changed():
    loader = StreamLoader(parts([20, 30]), 5)
    expected = epochs(loader, 1)
    for prefetch in (0, 2):
        loader = StreamLoader(parts([20, 30]), 5, prefetch=prefetch)
        running = loader.iterate(0)
        loader.choose(only=["a"])
        assert [plain(batch) for batch in running] == expected


@pytest.mark.parametrize("draw", ["alternate", "together"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_under_way_goes_on_with_what_is_chosen_whoever_else_reads_the_loader(prefetch, draw):
    """Another iterator that came later, at its end, closed or forgotten, changes nothing."""

    def rest(disturb):
        loader = StreamLoader(parts([20, 30]), 5, draw=draw, prefetch=prefetch, epoch_samples=50)
        running = loader.iterate(1)
        first = [plain(next(running)) for _ in range(3)]
        kept = disturb(loader)
        assert loader.choose({"a": 3, "b": 1}, position=10)
        assert running.position == 10
        found = [plain(batch) for batch in running]
        running.close()
        if kept is not None:
            kept.close()
        return first, found

    def evaluates(loader):
        batches = loader.iterate(0)
        list(batches)
        batches.close()

    changed = StreamLoader(parts([20, 30]), 5, draw=draw, epoch_samples=50)
    changed.choose({"a": 3, "b": 1})
    expected = [plain(batch) for batch in changed.iterate(1, 10)]
    undisturbed = rest(lambda loader: None)
    assert undisturbed[1] == expected
    assert rest(evaluates) == undisturbed
    assert rest(lambda loader: next(loader.iterate(0)) and None) == undisturbed
    assert rest(lambda loader: loader.iterate(0)) == undisturbed


@pytest.mark.parametrize("draw", ["alternate", "together"])
def test_other_streams_and_their_order_in_the_file_do_not_matter(draw):
    data = parts([20, 30, 10])
    two = by_stream(epochs(StreamLoader({"a": data["a"], "b": data["b"]}, 6, draw=draw, epoch_samples=60), 2))
    three = by_stream(epochs(StreamLoader(data, 6, draw=draw, epoch_samples=60), 2))
    for name in ("a", "b"):
        common = min(len(two[name]), len(three[name]))
        assert common > 10
        assert two[name][:common] == three[name][:common]
    turned = {name: data[name] for name in reversed(data)}
    if draw == "alternate":
        assert epochs(StreamLoader(turned, 6), 2) == epochs(StreamLoader(data, 6), 2)


def test_seeds_and_names_give_different_orders():
    data = {"a": torch.arange(40), "b": torch.arange(40)}
    drawn = by_stream(epochs(StreamLoader(data, 4), 1))
    assert drawn["a"][:12] != drawn["b"][:12]
    assert epochs(StreamLoader(data, 4, seed=1), 1) != epochs(StreamLoader(data, 4, seed=2), 1)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 9))
def test_shares_are_the_nearest_whole_numbers(weights, more):
    total = len(weights) + more
    counts = apportioned(weights, total)
    assert sum(counts) == total
    assert min(counts) >= 1

    def error(numbers):
        return sum(
            (number - weight / sum(weights) * total) ** 2 for number, weight in zip(numbers, weights, strict=True)
        )

    others = (one for one in product(range(1, total + 1), repeat=len(weights)) if sum(one) == total)
    assert error(counts) <= min(map(error, others)) + 1e-9
