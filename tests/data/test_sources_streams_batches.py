"""Batches of loaders over streams: what is in them, how they are read, and a line for every mistake."""

import threading

import numpy as np
import pytest
import torch
from stream_parts import by_stream, epochs, parts, plain

from etude.core import Loader
from etude.core.batch import JointBatch
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data import LoaderData, StreamLoader, Streams, TensorData
from etude.data.order.streams import stable_number


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


def test_sources_are_reported_the_pass_as_the_epoch():
    source = Recorded(10)
    list(StreamLoader({"a": source}, 4, epoch_samples=40, seed=5).iterate(0))
    assert [epoch for _, epoch, _ in source.asked] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert {seed for _, _, seed in source.asked} == {mix(5, stable_number("a"))}
    evaluated = Recorded(10)
    list(StreamLoader({"a": evaluated}, 4, training=False).iterate(6))
    assert [epoch for _, epoch, _ in evaluated.asked] == [6, 6, 6]


def test_all_ranks_are_reported_the_same_pass():
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
        ({"all": torch.arange(4)}, "named 'all'"),
        ({"a.b": torch.arange(4)}, "named 'a.b'"),
        ({"a": Streams({"b": torch.arange(4)})}, "consists of streams itself"),
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
        ({"weights": {"a": 1, "b": 1}}, "no weight for code"),
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
        ({"only": []}, "selected streams are none"),
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
