"""Blocks, mixtures and gathered batches: every token in its place, from any position, however batches are gathered."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import etude.data.sources.base as source_module
from etude.core.errors import ConfigError, DataError
from etude.data import DataLoader, DataLoaderFactory, DataSplits, LoaderData, TensorData, TokenWriter, open_tokens
from etude.data.sources.base import send
from etude.data.sources.mixture import TokenMixture
from etude.data.text.blocks import TokenBlocks


def write(path, ids, lengths=None, *, streams=None, vocab_size=60_000):
    streams = streams or {}
    kinds = {name: values.dtype.name for name, values in streams.items()}
    with TokenWriter(path, streams=kinds, meta={"vocab_size": vocab_size}) as writer:
        writer.add_many(ids, [len(ids)] if lengths is None else lengths, streams=streams)
    return open_tokens(path)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    ids = np.random.default_rng(0).integers(0, 60_000, 2_007).astype(np.uint16)
    return write(tmp_path_factory.mktemp("blocks") / "train.bin", ids), ids.astype(np.int64)


@given(
    length=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    chunk_bytes=st.sampled_from([1, 2**14, 2**19]),
    data=st.data(),
)
def test_an_epoch_of_blocks_is_the_text_with_next_tokens(
    tokens, length, batch_size, shuffle, drop_last, chunk_bytes, data
):
    file, ids = tokens
    blocks = TokenBlocks(file, length)
    batch_size = min(batch_size, len(blocks))
    number = (len(ids) - 1) // length
    assert len(blocks) == number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "CHUNK_BYTES", chunk_bytes)
        loader = DataLoader(blocks, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=3)
        batches = list(loader.iterate(1))
        place = data.draw(st.integers(0, len(batches) - 1))
        resumed = loader.iterate(1, position=place * batch_size)
        again = list(resumed)
    assert len(batches) == len(loader)
    kept = number - number % batch_size if drop_last else number
    inputs = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (kept, length)
    starts = loader.sampler.order.indices(1, 0, kept) * length
    assert np.array_equal(inputs.numpy(), np.stack([ids[s : s + length] for s in starts]))
    assert np.array_equal(labels.numpy(), np.stack([ids[s + 1 : s + length + 1] for s in starts]))
    assert resumed.position == kept
    for one, other in zip(batches[place:], again, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])


def test_positions_count_batches_even_where_several_are_gathered_at_once(tokens):
    batches = DataLoader(TokenBlocks(tokens[0], 16), batch_size=8, shuffle=False).iterate(0)
    seen = []
    for _ in range(5):
        next(batches)
        seen.append(batches.position)
    assert seen == [8, 16, 24, 32, 40]


def test_a_batch_is_not_overwritten_by_later_ones(tokens):
    loader = DataLoader(TokenBlocks(tokens[0], 32), batch_size=4)
    stream = loader.stream()
    first = next(stream)
    before = {key: value.clone() for key, value in first.items()}
    for _ in range(100):
        next(stream)
    assert all(torch.equal(first[key], before[key]) for key in before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_the_batches_of_one(tokens, world_size):
    blocks = TokenBlocks(tokens[0], 64)
    whole = [b["input_ids"] for b in DataLoader(blocks, batch_size=10, seed=2)]
    shares = [
        [b["input_ids"] for b in DataLoader(blocks, batch_size=10, seed=2, rank=rank, world_size=world_size)]
        for rank in range(world_size)
    ]
    for parts in zip(whole, *shares, strict=True):
        assert torch.equal(parts[0], torch.cat(parts[1:]))


def test_moving_blocks_begin_elsewhere_every_epoch(tokens):
    file, ids = tokens
    blocks = TokenBlocks(file, 100, moving=True)
    firsts = []
    for epoch in range(5):
        loader = DataLoader(blocks, batch_size=len(blocks), shuffle=False, seed=1)
        batch = next(loader.iterate(epoch))
        flat = batch["input_ids"].flatten().numpy()
        (offset,) = [o for o in range(100) if np.array_equal(ids[o : o + len(flat)], flat)]
        firsts.append(offset)
        assert np.array_equal(batch["labels"].flatten().numpy(), ids[offset + 1 : offset + 1 + len(flat)])
    assert len(set(firsts)) > 1
    repeated = next(DataLoader(blocks, batch_size=2, shuffle=False, seed=1).iterate(3))["input_ids"]
    assert repeated[0, 0] == ids[firsts[3]]


def test_streams_come_along_and_labels_replace_next_tokens(tmp_path):
    ids = np.arange(1000, dtype=np.uint16)
    file = write(
        tmp_path / "a.bin", ids, streams={"labels": (ids % 7).astype(np.uint8), "types": (ids % 3).astype(np.uint16)}
    )
    batch = next(iter(DataLoader(TokenBlocks(file, 10), batch_size=4, shuffle=False)))
    assert set(batch) == {"input_ids", "labels", "types"}
    assert batch["labels"].tolist() == (batch["input_ids"] % 7).tolist()
    assert batch["types"].tolist() == (batch["input_ids"] % 3).tolist()
    assert batch["types"].dtype == torch.int64


@pytest.mark.parametrize(("length", "words"), [(0, "at least 1"), (10_007, "too few for a block")])
def test_wrong_lengths_are_explained(tokens, length, words):
    with pytest.raises(DataError, match=words):
        TokenBlocks(tokens[0], length)


def test_prefetching_changes_nothing(tokens):
    blocks = TokenBlocks(tokens[0], 48)
    plain = [b["labels"] for b in DataLoader(blocks, batch_size=7)]
    ahead = [b["labels"] for b in DataLoader(blocks, batch_size=7, prefetch=3)]
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))


def test_ids_and_labels_of_a_batch_to_be_sent_share_their_memory(tokens):
    batch = TokenBlocks(tokens[0], 8).gather(np.arange(3), epoch=0, seed=0)
    assert batch["input_ids"].untyped_storage().data_ptr() == batch["labels"].untyped_storage().data_ptr()


def test_views_of_one_memory_travel_together_and_stay_views():
    rows = torch.arange(40).view(4, 10)
    batch = send(
        {"a": rows[:, :-1], "b": rows[:, 1:], "c": rows[1:, 2].clone()}, torch.device("cpu"), pin_memory=False
    )
    assert torch.equal(batch["a"], rows[:, :-1])
    assert torch.equal(batch["b"], rows[:, 1:])
    assert torch.equal(batch["c"], rows[1:, 2])
    assert batch["a"].untyped_storage().data_ptr() == batch["b"].untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------- mixtures


def numbered(tmp_path, name, start, count, length=4):
    """Blocks whose tokens tell which source and block they come from."""
    ids = np.repeat(np.arange(start, start + count, dtype=np.uint16), length)
    return TokenBlocks(write(tmp_path / f"{name}.bin", np.append(ids, np.uint16(0))), length)


def test_a_mixture_draws_in_proportion_and_resumes(tmp_path):
    a, b = numbered(tmp_path, "a", 1000, 400), numbered(tmp_path, "b", 5000, 50)
    loader = DataLoader(TokenMixture({"a": a, "b": b}, {"a": 0.75, "b": 0.25}, size=600), batch_size=20, seed=4)
    epochs = [[batch["input_ids"][:, 0] for batch in loader.iterate(epoch)] for epoch in range(3)]
    drawn = torch.cat([one for epoch in epochs for one in epoch])
    assert len(drawn) == 1800
    assert abs(int((drawn >= 5000).sum()) - 450) <= 2
    for epoch in epochs:
        for batch in epoch:
            assert 3 <= int((batch >= 5000).sum()) <= 7  # a quarter of every batch, not only of the whole
    resumed = [batch["input_ids"][:, 0] for batch in loader.iterate(2, position=300)]
    assert all(torch.equal(x, y) for x, y in zip(resumed, epochs[2][15:], strict=True))


def test_a_mixture_without_weights_gives_every_sample_once(tmp_path):
    a, b = numbered(tmp_path, "a", 100, 33), numbered(tmp_path, "b", 200, 12)
    for shuffle in (True, False):
        loader = DataLoader(TokenMixture({"a": a, "b": b}), batch_size=7, shuffle=shuffle)
        seen = torch.cat([batch["input_ids"][:, 0] for batch in loader]).tolist()
        assert sorted(seen) == [*range(100, 133), *range(200, 212)]


def test_labels_of_a_mixture_are_padded_to_the_longest():
    class Source:
        def __init__(self, length, value):
            self.length, self.value = length, value

        def __len__(self):
            return 3

        def gather(self, indices, *, epoch, seed):
            shape = (len(indices), self.length)
            return {"input_ids": torch.full(shape, self.value), "labels": torch.full(shape, self.value)}

        def lengths(self, indices):
            return np.full(len(indices), self.length)

    mixture = TokenMixture({"short": Source(2, 7), "long": Source(4, 9)})
    batch = mixture.gather(np.array([4, 0, 5]), epoch=0, seed=0)
    assert batch["input_ids"].tolist() == [[9] * 4, [7, 7, 0, 0], [9] * 4]
    assert batch["labels"].tolist() == [[9] * 4, [7, 7, -100, -100], [9] * 4]
    assert mixture.lengths(np.array([4, 0, 5])).tolist() == [4, 2, 4]


@pytest.mark.parametrize(
    ("weights", "size", "words"),
    [
        ({"a": 1}, None, "one weight per source"),
        ({"a": 1, "b": -1}, None, "must be positive"),
        (None, 5, "only with"),
    ],
)
def test_wrong_mixtures_are_explained(tmp_path, weights, size, words):
    a, b = numbered(tmp_path, "a", 100, 3), numbered(tmp_path, "b", 200, 3)
    with pytest.raises(DataError, match=words):
        TokenMixture({"a": a, "b": b}, weights, size)


# ------------------------------------------------------------------------------------------------- factory


def test_the_factory_makes_training_and_evaluation_loaders(tokens):
    factory = DataLoaderFactory(batch_size=3, seed=9, drop_last=True)
    x, y = torch.arange(10), torch.arange(10) * 2
    train, evaluation = factory.create((x, y)), factory.create(TensorData(x, y), training=False)
    assert train.shuffle
    assert not evaluation.shuffle
    assert (len(train), len(evaluation)) == (3, 4)
    assert [b.labels.tolist() for b in evaluation][-1] == [18]
    assert [b.data.tolist() for b in train] == [b.data.tolist() for b in DataLoader(x, y, 3, True, True, seed=9)]
    blocks = factory.create(LoaderData(TokenBlocks(tokens[0], 8), {"prefetch": 2}), batch_size=5)
    assert (blocks.prefetch, blocks.batch_size) == (2, 5)


def test_the_factory_reads_configs():
    made = DataLoaderFactory.from_config({"batch_size": 5, "num_workers": 2, "epochs": 3}, seed=4)
    assert (made.batch_size, made.num_workers, made.seed) == (5, 2, 4)
    with pytest.raises(ConfigError, match="no setting bach_size"):
        DataLoaderFactory.from_config({}, bach_size=2)


def test_parts_of_a_data_set_may_be_sources(tokens):
    splits = DataSplits(TokenBlocks(tokens[0], 8), LoaderData(TokenBlocks(tokens[0], 16)), vocab_size=60_000)
    assert splits.make_loader("train", 4).shuffle
    assert next(iter(splits.make_loader("validation", 4)))["input_ids"].shape == (4, 16)


def test_bucketing_needs_lengths(tokens):
    with pytest.raises(DataError, match="does not know the lengths"):
        DataLoader(TokenBlocks(tokens[0], 8), batch_size=4, bucket_batches=10)
    with pytest.raises(DataError, match="must not be negative"):
        DataLoader(TokenBlocks(tokens[0], 8), batch_size=4, bucket_batches=-1)
