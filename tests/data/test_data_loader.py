"""The loader over tensors in memory: every door gives the same batches, exact from any position."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from batch_classes import GraphBatch, graphs
from etude.core import DataBatch, Loader
from etude.core.batch import tensors_in
from etude.core.errors import DataError
from etude.core.loader import BatchIterator
from etude.data import BatchSampler, DataLoader, DataLoaderFactory, LoaderData, Normalize, Streams, TensorData
from etude.data.sources.base import send
from etude.data.transfer.epoch import ahead


def tensors(n):
    data = torch.arange(n * 6).reshape(n, 2, 3)
    return data, torch.arange(n)


def values(batches):
    return [(batch.data.tolist(), batch.labels.tolist()) for batch in batches]


@settings(deadline=None)
@given(
    n=st.integers(1, 60),
    size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop=st.booleans(),
    prefetch=st.sampled_from([0, 1, 3]),
    epoch=st.integers(0, 4),
)
def test_batches_are_rows_of_the_data_in_the_samplers_order(n, size, shuffle, drop, prefetch, epoch):
    if drop and size > n:
        return
    data, labels = tensors(n)
    loader = DataLoader(data, labels, size, shuffle, drop, prefetch, seed=5)
    sampler = BatchSampler(n, size, shuffle=shuffle, drop_last=drop, seed=5)
    batches = loader.iterate(epoch)
    position = 0
    for batch in batches:
        indices = sampler.batch(epoch, position)
        position = sampler.next_position(position)
        assert isinstance(batch, DataBatch)
        assert torch.equal(batch.data, data[indices])
        assert torch.equal(batch.labels, labels[indices])
        # The position is that of the batch in hand, however far the thread is ahead.
        assert batches.position == position
    assert position == sampler.epoch_samples
    assert len(loader) == loader.num_batches == sampler.num_batches


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_at_every_position_gives_the_same_rest(prefetch):
    loader = DataLoader(*tensors(23), 4, prefetch=prefetch)
    for epoch in range(3):
        batches = loader.iterate(epoch)
        whole, positions = [], [0]
        for batch in batches:
            whole.append(batch)
            positions.append(batches.position)
        for i, position in enumerate(positions):
            rest = DataLoader(*tensors(23), 4, prefetch=prefetch).iterate(epoch, position)
            assert values(rest) == values(whole[i:])


def test_it_is_a_loader():
    loader = DataLoader(*tensors(4), 2)
    assert isinstance(loader, Loader)
    iterator: BatchIterator = loader.iterate(0)
    assert iter(iterator) is iterator


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_together_see_the_same_batches(world_size):
    data, labels = tensors(13)
    alone = list(DataLoader(data, labels, 6).iterate(1))
    ranks = [list(DataLoader(data, labels, 6, rank=r, world_size=world_size).iterate(1)) for r in range(world_size)]
    for whole, *shares in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([share.data for share in shares]), whole.data)
        assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)


def test_an_empty_share_keeps_the_shape():
    share = list(DataLoader(*tensors(9), 4, rank=0, world_size=4).iterate(0))[-1]
    assert share.data.shape == (0, 2, 3)
    assert share.labels.shape == (0,)


def test_no_labels():
    batch = next(DataLoader(torch.arange(4), batch_size=2, shuffle=False).iterate(0))
    assert batch.data.tolist() == [0, 1]
    assert batch.labels is None


def test_numpy_arrays_also_read_only(tmp_path):
    path = tmp_path / "data.npy"
    np.save(path, np.arange(12, dtype=np.float32).reshape(6, 2))
    data = np.load(path, mmap_mode="r")
    batch = next(DataLoader(data, np.arange(6), 3, shuffle=False).iterate(0))
    assert batch.data.tolist() == [[0, 1], [2, 3], [4, 5]]
    batch.data.zero_()  # a batch belongs to whoever holds it
    assert data[0, 1] == 1


@pytest.mark.parametrize(
    "together",
    [
        lambda x, y: (x, y),
        lambda x, y: (x.numpy(), y),
        TensorData,
        lambda x, y: TensorData(x - 1, y, lambda x: x + 1),
    ],
    ids=["pair", "array", "TensorData", "transform"],
)
def test_data_and_labels_in_one_are_the_same_as_apart(together):
    x, y = tensors(11)
    one, other = DataLoader(x, y, 4, seed=3), DataLoader(together(x, y), batch_size=4, seed=3)
    for batch, same in zip(one, other, strict=True):
        assert torch.equal(batch.data, same.data)
        assert torch.equal(batch.labels, same.labels)


def test_mappings_give_dicts():
    data = {"input_ids": torch.arange(10).reshape(5, 2), "labels": np.arange(5)}
    loader = DataLoader(data, batch_size=2, shuffle=False)
    batches = list(loader)
    assert [sorted(batch) for batch in batches] == [["input_ids", "labels"]] * 3
    assert batches[1]["input_ids"].tolist() == [[4, 5], [6, 7]]
    assert batches[2]["labels"].tolist() == [4]
    joined = next(DataLoader({"x": torch.arange(3)}, torch.arange(3), 2, shuffle=False).iterate(0))
    assert joined["labels"].tolist() == [0, 1]


def test_the_transform_sees_inputs_only():
    data = torch.randint(0, 256, (7, 1, 4, 4), dtype=torch.uint8)
    batch = next(DataLoader(data, torch.arange(7), 3, shuffle=False, transform=Normalize(0.5, 0.25)).iterate(0))
    assert batch.data.dtype == torch.float32
    assert torch.allclose(batch.data.double(), (data[:3].double() / 255 - 0.5) / 0.25, atol=1e-6)
    assert batch.labels.tolist() == [0, 1, 2]
    doubled = DataLoader({"x": torch.arange(4)}, batch_size=4, shuffle=False, transform=lambda d: {"x": d["x"] * 2})
    assert next(doubled.iterate(0))["x"].tolist() == [0, 2, 4, 6]


def test_a_random_transform_is_the_same_with_prefetching_and_on_resuming():
    def jitter(data, *, generator):
        return data + torch.rand(data.shape, generator=generator)

    def batches(prefetch, epoch, position=0):
        loader = DataLoader(torch.zeros(10, 3), torch.arange(10), 4, prefetch=prefetch, transform=jitter)
        return [batch.data for batch in loader.iterate(epoch, position)]

    plain = batches(0, epoch=0)
    before = torch.get_rng_state()
    for other in (batches(0, 0), batches(2, 0)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], batches(2, 0, position=4), strict=True))
    assert not torch.equal(plain[0], batches(0, epoch=1)[0])
    assert not torch.equal(plain[0], plain[1])


def test_each_for_begins_the_next_epoch():
    data, labels = tensors(12)
    loader = DataLoader(data, labels, 5)
    first, second = values(loader), values(loader)
    assert first == values(DataLoader(data, labels, 5).iterate(0))
    assert second == values(DataLoader(data, labels, 5).iterate(1))
    assert first != second
    loader.set_epoch(0)
    assert values(loader) == first


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stream_goes_on_epoch_after_epoch(prefetch):
    loader = DataLoader(*tensors(7), 3, prefetch=prefetch)
    stream = loader.stream()
    got = values(next(stream) for _ in range(8))
    expected = [batch for epoch in range(3) for batch in values(loader.iterate(epoch))]
    assert got == expected[:8]
    stream.close()


def test_by_hand_with_reset_has_next_and_next():
    data, labels = tensors(10)
    loader = DataLoader(data, labels, 4)
    assert (loader.batch_size, loader.shuffle, loader.num_batches, loader.current_index) == (4, True, 3, 0)
    for epoch in range(3):
        loader.reset()
        got, indices = [], []
        while loader.has_next():
            got.append(loader.next())
            indices.append(loader.current_index)
        assert values(got) == values(DataLoader(data, labels, 4).iterate(epoch))
        assert indices == [4, 8, 10]
        with pytest.raises(DataError, match="call reset"):
            loader.next()
    loader.reset()
    assert loader.current_index == 0
    loader.next()
    loader.reset()  # in the middle of an epoch
    assert values([loader.next()]) == values(loader.iterate(4))[:1]


def test_by_hand_without_reset_begins_at_once():
    loader = DataLoader(*tensors(4), 4)
    assert loader.has_next()
    assert values([loader.next()]) == values(loader.iterate(0))
    assert not loader.has_next()


def test_has_next_respects_drop_last():
    loader = DataLoader(*tensors(10), 4, drop_last=True)
    count = 0
    while loader.has_next():
        loader.next()
        count += 1
    assert count == 2


def prefetch_threads():
    return {thread for thread in threading.enumerate() if thread.name == "etude-prefetch"}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_ends_the_iteration(prefetch):
    before = prefetch_threads()
    iterator = DataLoader(*tensors(40), 4, prefetch=prefetch).iterate(0)
    next(iterator)
    iterator.close()
    assert list(iterator) == []
    assert iterator.position == 4
    iterator.close()
    assert prefetch_threads() <= before


def test_without_prefetch_there_is_no_thread():
    before = prefetch_threads()
    plain, threaded = (DataLoader(*tensors(40), 4, prefetch=prefetch).iterate(0) for prefetch in (0, 2))
    next(threaded)
    assert len(prefetch_threads() - before) == 1
    threaded.close()
    next(plain)
    assert prefetch_threads() <= before


def test_an_error_of_the_transform_reaches_the_consumer():
    def broken(data):
        raise RuntimeError("bad picture")

    for prefetch in (0, 2):
        with pytest.raises(RuntimeError, match="bad picture"):
            next(DataLoader(*tensors(4), 2, prefetch=prefetch, transform=broken).iterate(0))


def test_positions_beyond_the_data_are_refused():
    loader = DataLoader(*tensors(10), 4)
    assert list(loader.iterate(0, 10)) == []
    for position in (-1, 11):
        with pytest.raises(DataError, match=f"cannot start at sample {position}: an epoch has only 10"):
            loader.iterate(0, position)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(torch.zeros(0, 3), batch_size=2), "the data is empty"),
        (lambda: DataLoader({}, batch_size=2), "the data is empty"),
        (lambda: DataLoader(torch.zeros(4, 3), torch.zeros(5), 2), "data has 4, labels has 5"),
        (lambda: DataLoader({"x": torch.zeros(4), "y": torch.zeros(3)}), "x has 4, y has 3"),
        (lambda: DataLoader({"labels": torch.zeros(4)}, torch.zeros(4)), "labels are given twice"),
        (lambda: DataLoader((torch.zeros(4), torch.zeros(4)), 2), "labels are given twice.*batch_size"),
        (lambda: DataLoader((torch.zeros(4), torch.zeros(5))), "data has 4, labels has 5"),
        (lambda: DataLoader(LoaderData([1, 2, 3])), "LoaderData.*DataLoaderFactory"),
        (lambda: DataLoader(Streams({"a": [1, 2, 3]})), "Streams.*DataLoaderFactory"),
        (lambda: DataLoader(torch.zeros(4), batch_size=5, drop_last=True), "batch_size 5 is larger than the 4"),
        (lambda: DataLoader(torch.zeros(4), batch_size=0), "batch_size is 0"),
        (lambda: DataLoader(torch.tensor(4.0)), "data is a single number"),
        (lambda: DataLoader(torch.zeros(4), ["a"] * 4, 2), "labels: a list cannot become a tensor"),
        (lambda: DataLoader(torch.zeros(4), {1, 2, 3, 4}, 2), "labels is a set; pass a tensor"),
        (lambda: DataLoader(np.array(["a", "b"])), "cannot become a tensor"),
        (lambda: DataLoader(torch.zeros(4), prefetch=-1), "prefetch is -1"),
        (lambda: DataLoader("data/tokenized"), "data/tokenized: no such file"),
        (lambda: DataLoader(iter([1])), "data is a list_iterator"),
        (lambda: DataLoader([1, 2, 3], 2), "pass the batch size by name: batch_size=2"),
        (lambda: DataLoader([(1, 2), (3, 4)], torch.zeros(2)), "in the samples of a dataset"),
        (lambda: DataLoader([]), "the data is empty"),
    ],
)
def test_bad_data_is_explained_in_one_line(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_iterable_dataset_is_refused_with_the_remedy():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(DataError, match="wrap it in torch's DataLoader"):
        DataLoader(Endless())


def test_ahead_takes_items_before_they_are_wanted():
    begun = []

    def source():
        for item in range(5):
            begun.append(item)
            yield item

    items = ahead(source(), 2)
    assert next(items) == 0
    assert begun == [0, 1, 2]
    assert list(items) == [1, 2, 3, 4]


@pytest.mark.parametrize("data", [torch.arange(4), {"x": torch.arange(4)}])
def test_a_collate_fn_that_nothing_would_call_is_refused(data):
    with pytest.raises(DataError, match=r"collate_fn .* returns whole batches; use transform"):
        DataLoader(data, collate_fn=list)


def test_batches_of_a_source_travel_with_the_objects_in_them():
    ids = torch.arange(10).view(2, 5)
    sent = send(
        {"ids": ids[:, :-1], "labels": ids[:, 1:], "graph": graphs([3, 4])}, torch.device("meta"), pin_memory=False
    )
    assert all(tensor.is_meta for tensor in tensors_in(sent))
    assert sent["ids"].untyped_storage()._cdata == sent["labels"].untyped_storage()._cdata
    assert type(sent["graph"]) is GraphBatch


class Gathered:
    """A source of whole batches."""

    def __len__(self):
        return 7

    def gather(self, indices, *, epoch, seed):
        return {"x": torch.from_numpy(indices), "thread": threading.get_ident()}


@pytest.mark.parametrize(("data", "expected"), [(torch.arange(7), 0), (Gathered(), 2), (list(range(7)), 2)])
def test_batches_for_cuda_are_prefetched_by_default_where_that_is_no_slower(data, expected):
    assert DataLoader(data, batch_size=2).prefetch == DataLoaderFactory(batch_size=2).create(data).prefetch == 0
    assert DataLoader(data, batch_size=2, device="cuda").prefetch == expected
    loader = DataLoader(data, batch_size=2, prefetch=2)
    assert DataLoader(data, batch_size=2, prefetch=1).prefetch == 1
    if isinstance(data, Gathered):
        assert {batch["thread"] == threading.get_ident() for batch in loader} == {False}
        assert {batch["thread"] == threading.get_ident() for batch in DataLoader(data, prefetch=0)} == {True}
