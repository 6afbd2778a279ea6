"""Loaders over streams: exact order from any position, in proportion, for any number of ranks and any mixture."""

import threading
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from etude.core import Loader
from etude.core.batch import JointBatch, num_samples
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data import DataLoader, LoaderData, StreamLoader, Streams, TensorData
from etude.data.order.streams import apportioned, stable_number

sizes_of_streams = st.lists(st.integers(1, 40), min_size=1, max_size=4)
weights_of_streams = st.lists(st.sampled_from([0.1, 0.5, 1, 2, 3.7, 9]), min_size=4, max_size=4)


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


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=40)
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


@settings(deadline=None, max_examples=40)
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


def test_joint_batches_have_a_part_of_each_stream():
    loader = StreamLoader(parts([20, 30, 10]), 8, draw="together", weights={"a": 5, "b": 2.9, "c": 0.1})
    for batch in loader.iterate(0):
        assert isinstance(batch, JointBatch)
        assert [(part["stream"], len(part["input"]), len(part["labels"])) for part in batch] == [
            ("a", 5, 5),
            ("b", 2, 2),
            ("c", 1, 1),
        ]
    loader.choose(only=["c", "b"])
    assert [part["stream"] for part in next(loader.iterate(0))] == ["b", "c"]


def test_evaluation_gives_every_sample_once_stream_after_stream():
    loader = StreamLoader(parts([10, 7]), 4, training=False, draw="together")
    batches = epochs(loader, 1)
    assert [(batch["stream"], batch["input"]) for batch in batches] == [
        ("a", [0, 1, 2, 3]),
        ("a", [4, 5, 6, 7]),
        ("a", [8, 9]),
        ("b", [1000, 1001, 1002, 1003]),
        ("b", [1004, 1005, 1006]),
    ]
    assert len(loader) == 5
    assert loader.choose({"a": 1}, only=["b"]), "weights are for training"
    assert by_stream(epochs(loader, 1)) == {"b": list(range(1000, 1007))}
    assert len(loader) == 2


def test_streams_that_a_part_lacks_are_known_to_it():
    loader = StreamLoader(Streams(parts([10, 7]), absent=frozenset("c")), 4, training=False)
    loader.choose({"c": 1, "a": 1}, only=["a", "c"])
    assert set(by_stream(epochs(loader, 1))) == {"a"}
    loader.choose(only=["c"])
    assert epochs(loader, 1) == []
    with pytest.raises(DataError, match="did you mean"):
        loader.choose(only=["aa"])


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_is_whole_batches(drop_last):
    loader = StreamLoader(parts([10, 7]), 4, drop_last=drop_last)
    assert len(loader) == (4 if drop_last else 5)
    assert all(len(batch["input"]) == 4 for batch in epochs(loader, 3))
    assert len(StreamLoader(parts([2]), 4, drop_last=drop_last)) == 1


def test_it_is_a_loader_that_plain_loops_can_use():
    loader = StreamLoader(parts([10, 7]), 4)
    assert isinstance(loader, Loader)
    first, second = list(map(plain, loader)), list(map(plain, loader))
    assert first != second
    loader.set_epoch(1)
    assert list(map(plain, loader)) == second == epochs(loader, 1, start=1)


# What streams are made of.


class Recorded:
    """A source that keeps what it is asked for."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def gather(self, indices, *, epoch, seed):
        self.asked.append((indices.tolist(), epoch, seed))
        return {"x": torch.from_numpy(indices)}


def test_sources_are_told_the_pass_as_the_epoch():
    source = Recorded(10)
    list(StreamLoader({"a": source}, 4, epoch_samples=40, seed=5).iterate(0))
    assert [epoch for _, epoch, _ in source.asked] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert {seed for _, _, seed in source.asked} == {mix(5, stable_number("a"))}
    evaluated = Recorded(10)
    list(StreamLoader({"a": evaluated}, 4, training=False).iterate(6))
    assert [epoch for _, epoch, _ in evaluated.asked] == [6, 6, 6]


def test_all_ranks_are_told_the_same_pass():
    sources = [Recorded(10) for _ in range(2)]
    for rank, source in enumerate(sources):
        list(StreamLoader({"a": source}, 4, epoch_samples=40, rank=rank, world_size=2).iterate(0))
    assert [epoch for _, epoch, _ in sources[0].asked] == [epoch for _, epoch, _ in sources[1].asked]


def test_an_empty_share_has_all_keys():
    loader = StreamLoader(parts([20, 30]), 4, weights={"a": 3, "b": 1}, draw="together", rank=0, world_size=4)
    shapes = [{key: len(value) for key, value in part.items() if key != "stream"} for part in next(iter(loader))]
    assert shapes == [{"input": 0, "labels": 0}] * 2
    whole = StreamLoader({"a": Recorded(10)}, 1, rank=0, world_size=2)
    assert next(iter(whole))["x"].shape == (0,)


def test_datasets_draw_the_same_random_numbers_for_any_number_of_ranks(random_dataset):
    def values(**options):
        return [
            batch["input"]
            for epoch in range(3)
            for batch in StreamLoader({"a": random_dataset}, 11, seed=1, **options).iterate(epoch)
        ]

    torch.manual_seed(4)
    expected_next = torch.rand(1)
    torch.manual_seed(4)
    alone = values()
    assert torch.equal(torch.rand(1), expected_next), "the caller's generator is left as it was"
    assert alone[0].shape == (11, 4)
    shares = [values(rank=rank, world_size=3, prefetch=2) for rank in range(3)]
    for whole, *mine in zip(alone, *shares, strict=True):
        assert torch.equal(torch.cat(mine), whole)
    assert len({tuple(row[1:].tolist()) for batch in alone for row in batch}) == 66, "new in every pass"


def test_datasets_are_fetched_where_their_batches_are_used():
    threads = set()

    class Telling(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            threads.add(threading.current_thread())
            return torch.tensor(index)

    list(StreamLoader({"a": Telling(), "b": torch.arange(8)}, 2, prefetch=2).iterate(0))
    assert threads == {threading.current_thread()}, "generators are shared with the thread that trains"


def test_transforms_are_applied_and_seeded_by_place():
    def noisy(data, generator):
        return data + torch.rand(len(data), generator=generator)

    data = {"a": TensorData(torch.zeros(10), torch.arange(10), noisy), "b": LoaderData(torch.zeros(4))}
    loader = StreamLoader(data, 5)
    first = [batch["input"] for batch in loader.iterate(0) if batch["stream"] == "a"]
    again = [batch["input"] for batch in loader.iterate(0) if batch["stream"] == "a"]
    assert all(map(torch.equal, first, again))
    assert len({value for batch in first for value in batch.tolist()}) == 5 * len(first)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_delivered_to_a_device(prefetch):
    def doubled(data):
        return data * 2

    data = {"a": TensorData(torch.arange(10), torch.arange(10), doubled), "b": {"x": torch.arange(6)}}
    there = StreamLoader(data, 4, device="cpu", pin_memory=False, prefetch=prefetch)
    assert epochs(there, 2) == epochs(StreamLoader(data, 4), 2)
    assert all(batch["input"].sum() == 2 * batch["labels"].sum() for batch in there.iterate(0) if "labels" in batch)


def test_mappings_and_single_tensors_become_named_dicts():
    data = {"a": {"x": torch.arange(4), "y": np.arange(4)}, "b": torch.arange(4), "c": [(1.0, 2), (3.0, 4)]}
    found = {batch["stream"]: set(batch) for batch in StreamLoader(data, 1, training=False).iterate(0)}
    assert found == {"a": {"x", "y", "stream"}, "b": {"input", "stream"}, "c": {"input", "labels", "stream"}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": {"stream": torch.arange(4)}}, "have a 'stream' already"),
        ({"a": [(1, 2, 3)]}, "tuple of 3|list of 3"),
        ({"a": 5}, "data is a int"),
        ({"a": torch.empty(0)}, "'a' is empty"),
        ({"a": LoaderData(torch.arange(4), {"num_workers": 2})}, "'a' sets num_workers"),
        ({"a": LoaderData(torch.arange(4), {"bucket_batches": 2})}, "'a': bucket_batches is 2"),
        ({"a": LoaderData(torch.arange(4), {"collate_fn": len})}, "'a': collate_fn"),
        ({}, "no streams"),
        ({"all": torch.arange(4)}, "called 'all'"),
        ({"a.b": torch.arange(4)}, "called 'a.b'"),
        ({"a": Streams({"b": torch.arange(4)})}, "made of streams itself"),
    ],
)
def test_streams_that_cannot_be(data, message):
    with pytest.raises(DataError, match=message) as error:
        list(StreamLoader(data, 2))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"a": 1, "bee": 1, "code": 1}}, "unknown stream 'bee'"),
        ({"weights": {"a": 1, "b": 1, "cod": 1}}, "did you mean 'code'"),
        ({"weights": {"a": 1, "b": -1, "code": 1}}, "weight of stream 'b' is -1"),
        ({"weights": {"a": 1, "b": float("nan"), "code": 1}}, "weight of stream 'b' is nan"),
        ({"weights": {"a": 1, "b": float("inf"), "code": 1}}, "weight of stream 'b' is inf"),
        ({"weights": {"a": 1, "b": "2", "code": 1}}, "weight of stream 'b' is '2'"),
        ({"weights": {"a": 0, "b": 0, "code": 0}}, "all 0"),
        ({"weights": {"a": 1, "b": 1}}, "leave out code"),
        ({"weights": {"a": 1, "b": 1e-9, "code": 1}}, "too small"),
        ({"draw": "both"}, "draw is 'both'"),
        ({"draw": "together", "batch_size": 2}, "each of 3 streams"),
        ({"epoch_samples": 0}, "epoch_samples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
    ],
)
def test_settings_that_cannot_be(options, message):
    data = {name: torch.arange(4) for name in ("a", "b", "code")}
    with pytest.raises(DataError, match=message) as error:
        StreamLoader(data, **{"batch_size": 4, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"weights": {"aa": 1}}, "stream 'aa'.*there are: "),
        ({"weights": {"a": -1}}, "-1"),
        ({"weights": {"a": 0}}, "all 0"),
        ({"only": ["x"]}, "only: unknown stream 'x'"),
        ({"only": ["c"]}, "their weights are 0"),
        ({"weights": {"a": 1}, "only": ["b"]}, "their weights are 0"),
        ({"only": []}, "streams to be read are none"),
        ({"sequence_length": 4}, "stream 'a' has no token sequences"),
    ],
)
def test_choices_that_cannot_be_change_nothing(choice, message):
    loader = StreamLoader(parts([8, 8, 8]), 4, weights={"a": 1, "b": 1, "c": 0})
    before = epochs(loader, 1)
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            loader.choose(**choice)
    assert not loader.choose()
    assert epochs(loader, 1) == before


def test_positions_outside_the_epoch_are_refused():
    with pytest.raises(DataError, match="cannot start at sample 21"):
        StreamLoader(parts([8, 12]), 4).iterate(0, 21)
