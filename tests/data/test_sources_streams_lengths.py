"""Streams of token files: other lengths of the same text, bucketing, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from token_samples import document_lengths, everything, numbered, opened_documents

from etude.core.errors import DataError
from etude.data import (
    LoaderData,
    MaskedTokens,
    PackedDocuments,
    ResizableSource,
    StreamLoader,
    TensorData,
    TokenBlocks,
    TokenDocuments,
    TokenMixture,
)


def text(lengths=(40, 7, 90, 33, 61, 5, 120)):
    return opened_documents(numbered(lengths), streams=("roles",), labels={"quality": np.arange(len(lengths))})


SOURCES = {
    "blocks": lambda file, length: TokenBlocks(file, length),
    "moving": lambda file, length: TokenBlocks(file, length, moving=True),
    "cut": lambda file, length: TokenDocuments(file, length, pad_id=3, pad_multiple=8, labels="next"),
    "split": lambda file, length: TokenDocuments(file, length, long="split", labels="roles"),
    "packed": lambda file, length: PackedDocuments(file, length, last="pad", attention="full", causal=False),
    "fit": lambda file, length: PackedDocuments(file, length, "fit", pad_id=2, labels="none", seed=5),
    "masked": lambda file, length: MaskedTokens(
        TokenDocuments(file, length, long="split"), mask_id=1, vocab_size=1000, rate=0.4, special_ids=[2, 3]
    ),
    "mixture": lambda file, length: TokenMixture(
        {"x": TokenBlocks(file, length), "y": TokenBlocks(file, length)}, {"x": 1, "y": 2}, 30
    ),
    "masked mixture": lambda file, length: MaskedTokens(
        TokenMixture({"x": TokenBlocks(file, length), "y": TokenBlocks(file, length)}), 1, 1000
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_with_another_length_is_the_one_made_with_it(kind):
    file, make = text(), SOURCES[kind]
    resized, expected = make(file, 24).with_length(10), make(file, 10)
    assert isinstance(resized, type(expected))
    assert isinstance(resized, ResizableSource)
    assert resized.longest == 10
    assert len(resized) == len(expected)
    for one, other in zip(everything(resized, epoch=3, seed=9), everything(expected, epoch=3, seed=9), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    if "mixture" in kind and kind != "masked mixture":
        assert resized.order(shuffle=True, seed=2).indices(1, 0, 30).tolist() == (
            expected.order(shuffle=True, seed=2).indices(1, 0, 30).tolist()
        )


def test_masked_samples_of_a_source_without_lengths_cannot_be_resized():
    class Plain:
        def __len__(self):
            return 3

        def gather(self, indices, *, epoch, seed):
            return {"input_ids": torch.zeros(len(indices), 4, dtype=torch.int64)}

    masked = MaskedTokens(Plain(), mask_id=1, vocab_size=10)
    assert not isinstance(masked, ResizableSource)
    with pytest.raises(DataError, match="samples of x, a Plain, do not support another length"):
        TokenMixture({"x": Plain()}).with_length(3)


def widths(loader, epoch=0):
    return {(batch["stream"], batch["input_ids"].shape[1]) for batch in loader.iterate(epoch)}


def test_choosing_a_length_changes_samples_and_not_the_length_of_an_epoch():
    file = text()
    loader = StreamLoader({"a": TokenBlocks(file, 24), "b": PackedDocuments(file, 32)}, 4)
    length = len(loader)
    assert widths(loader) == {("a", 24), ("b", 32)}
    before = [batch["input_ids"].tolist() for batch in loader.iterate(0)]
    assert loader.choose(sequence_length=8)
    assert widths(loader) == {("a", 8), ("b", 8)}
    assert len(loader) == length == len(list(loader.iterate(1)))
    short = StreamLoader(
        {"a": TokenBlocks(file, 8), "b": PackedDocuments(file, 8)}, 4, epoch_samples=length * 4, weights=None
    )
    # Proportions stay those of the data section: the same weights give the same batches.
    weights = {"a": len(TokenBlocks(file, 24)), "b": len(PackedDocuments(file, 32))}
    short.choose(weights)
    for one, other in zip(loader.iterate(2), short.iterate(2), strict=True):
        assert one["stream"] == other["stream"]
        assert torch.equal(one["input_ids"], other["input_ids"])
    assert not loader.choose(sequence_length=8)
    assert loader.choose()
    assert [batch["input_ids"].tolist() for batch in loader.iterate(0)] == before


def test_streams_that_are_not_read_need_not_fit_the_length():
    file = text()
    data = {"a": TokenBlocks(file, 24), "b": TensorData(torch.arange(9))}
    loader = StreamLoader(data, 4)
    with pytest.raises(DataError, match="stream 'b' has no token sequences"):
        loader.choose(sequence_length=8)
    assert loader.choose(sequence_length=8, only=["a"])
    assert widths(loader) == {("a", 8)}


@pytest.mark.parametrize(("length", "message"), [(25, "25 is more than the 24 tokens .* 'a'"), (0, "less than 1")])
def test_lengths_that_do_not_fit_are_refused_by_name(length, message):
    loader = StreamLoader({"a": TokenBlocks(text(), 24)}, 4)
    with pytest.raises(DataError, match=message):
        loader.choose(sequence_length=length)


def test_documents_without_a_limit_take_any_length():
    loader = StreamLoader({"a": TokenDocuments(text())}, 7, training=False)
    assert max(width for _, width in widths(loader)) == 120
    loader.choose(sequence_length=500)
    loader.choose(sequence_length=20)
    assert max(width for _, width in widths(loader)) == 20


def test_evaluation_with_another_length_covers_the_text_once():
    file = text()
    loader = StreamLoader({"a": PackedDocuments(file, 32, last="pad"), "b": TokenBlocks(file, 16)}, 3, training=False)
    loader.choose(sequence_length=8)
    seen = {"a": [], "b": []}
    for batch in loader.iterate(0):
        seen[batch["stream"]].extend(batch["input_ids"].flatten().tolist())
    assert [token for token in seen["a"] if token] == list(range(1, file.num_tokens + 1))
    assert seen["b"] == list(range(1, len(seen["b"]) + 1))


@given(document_lengths, st.integers(1, 6), st.integers(1, 20), st.booleans())
def test_bucketing_gives_the_same_samples_with_less_padding(lengths, batch_size, pool, training):
    source = TokenDocuments(opened_documents(numbered([length + 1 for length in lengths])))

    def drawn(options, rank=0, world_size=1):
        loader = StreamLoader(
            {"a": LoaderData(source, options)},
            batch_size,
            training=training,
            shuffle=training,
            rank=rank,
            world_size=world_size,
        )
        return [batch for epoch in range(4 if training else 1) for batch in loader.iterate(epoch)]

    def firsts(batches):
        return [first for batch in batches for first in batch["input_ids"][:, 0].tolist()]

    sorted_ones, plain_ones = drawn({"bucket_batches": pool}), drawn({})
    if training:
        # A pool is sorted within itself: whole pools have the same samples.
        size = min(pool, len(source) // (2 * batch_size))
        if size < 2:
            assert firsts(sorted_ones) == firsts(plain_ones)
            return
        until = len(plain_ones) // size * size
        sorted_ones, plain_ones = sorted_ones[:until], plain_ones[:until]
    assert sorted(firsts(sorted_ones)) == sorted(firsts(plain_ones))
    if not training:
        assert len(set(firsts(sorted_ones))) == len(source)


@pytest.mark.parametrize(("size", "sorts"), [(15, False), (16, True)])
def test_pools_hold_at_most_half_a_pass(size, sorts):
    source = TokenDocuments(opened_documents(numbered([1 + number * 7 % 16 for number in range(size)])))
    plain, bucketed = (
        [
            batch["input_ids"][:, 0].tolist()
            for batch in StreamLoader({"a": LoaderData(source, {"bucket_batches": pool})}, 4).iterate(0)
        ]
        for pool in (0, 100)
    )
    assert (plain != bucketed) == sorts


@pytest.mark.parametrize("draw", ["alternate", "together"])
def test_bucketing_saves_padding_and_is_the_same_for_ranks(draw):
    rng = np.random.default_rng(0)
    source = TokenDocuments(opened_documents(numbered(rng.integers(1, 60, 400).tolist())))

    def batches(bucket, **rank):
        part = LoaderData(source, {"bucket_batches": bucket})
        loader = StreamLoader({"a": part, "b": part}, 8 if draw == "alternate" else 16, draw=draw, **rank)
        found = list(loader.iterate(0))
        return found if draw == "alternate" else [part for batch in found for part in batch]

    def padding(found):
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in found)

    assert padding(batches(20)) < padding(batches(0)) / 3
    for whole, *mine in zip(batches(20), *(batches(20, rank=r, world_size=2) for r in range(2)), strict=True):
        assert torch.equal(torch.cat([one["input_ids"][:, 0] for one in mine]), whole["input_ids"][:, 0])


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_seeks_and_gives_empty_shares(kind):
    source = SOURCES[kind](text(), 24)
    loader = StreamLoader({"a": source, "b": TokenBlocks(text(), 8)}, 3, prefetch=1)
    for epoch in (0, 4):
        whole = list(loader.iterate(epoch))
        rest = list(loader.iterate(epoch, 6))
        for one, other in zip(rest, whole[2:], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one if key != "stream")
    keys = {batch["stream"]: batch.keys() for batch in whole}
    for batch in StreamLoader({"a": source, "b": TokenBlocks(text(), 8)}, 3, rank=0, world_size=4).iterate(0):
        assert batch.keys() == keys[batch["stream"]]
        assert all(len(value) == 0 for key, value in batch.items() if key != "stream")


def test_masks_and_moving_blocks_change_from_pass_to_pass():
    file = text()
    masked = MaskedTokens(TokenBlocks(file, 30), mask_id=1, vocab_size=1000, rate=0.5)
    for source, key in ((masked, "labels"), (TokenBlocks(file, 30, moving=True), "input_ids")):
        loader = StreamLoader({"a": source}, len(source), shuffle=False)
        first, second = (next(loader.iterate(epoch))[key] for epoch in (0, 1))
        assert not torch.equal(first, second)
        assert torch.equal(first, next(loader.iterate(0))[key])
