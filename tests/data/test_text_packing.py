"""Packed documents: every token once, labels and positions within documents, and models that cannot tell."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from token_samples import document_lengths, everything, numbered, opened_documents, stream_values

from etude.core.errors import DataError
from etude.core.model import ModelCall
from etude.data import DataLoader, PackedDocuments, TokenMixture, document_mask
from etude.data.text.layouts import best_fit

lengths_of_blocks = st.integers(1, 25)


def rows(source, **options):
    """All blocks, one by one, as dicts of arrays."""
    for batch in everything(source, **options):
        for number in range(len(batch["input_ids"])):
            yield {key: value[number].numpy() for key, value in batch.items()}


def pieces_of(block):
    """The pieces of a block as lists of ids, in the order of their numbers."""
    documents = block["document_ids"]
    return [block["input_ids"][documents == number].tolist() for number in range(documents.max() + 1)]


def check_block(block, documents, length):
    """All that is said of a block, by plain Python; ids are unique, so a token tells its document and place."""
    home = {token: (number, place) for number, ids in enumerate(documents) for place, token in enumerate(ids)}
    follower = {a: b for ids in documents for a, b in pairwise(ids)}
    real = int((block["document_ids"] >= 0).sum())
    assert len(block["input_ids"]) == length
    for at in range(length):
        token, label = int(block["input_ids"][at]), int(block["labels"][at])
        if at >= real:
            assert (token, label) == (0, -100)
            assert (block["document_ids"][at], block["position_ids"][at]) == (-1, 0)
            continue
        assert label == follower.get(token, -100)
        same = at > 0 and home[int(block["input_ids"][at - 1])][0] == home[token][0]
        assert block["position_ids"][at] == (block["position_ids"][at - 1] + 1 if same else 0)
        before = int(block["document_ids"][at - 1]) if at else -1
        assert block["document_ids"][at] == (before if same else before + 1)
    assert "attention_mask" not in block


@given(document_lengths, lengths_of_blocks, st.booleans())
def test_split_is_the_file_cut_into_blocks(lengths, length, pad):
    documents = numbered(lengths)
    tokens = [token for ids in documents for token in ids]
    file = opened_documents(documents)
    if len(tokens) < length and not pad:
        with pytest.raises(DataError, match="too few for a block"):
            PackedDocuments(file, length)
        return
    source = PackedDocuments(file, length, last="pad" if pad else "drop")
    found = []
    for block in rows(source):
        check_block(block, documents, length)
        found += [token for piece in pieces_of(block) for token in piece]
    expected = tokens if pad else tokens[: len(tokens) // length * length]
    assert found == expected
    assert source.fill == pytest.approx(len(expected) / (len(source) * length))


@given(document_lengths, lengths_of_blocks, st.integers(0, 3))
def test_fit_keeps_documents_whole(lengths, length, seed):
    documents = numbered(lengths)
    source = PackedDocuments(opened_documents(documents), length, "fit", seed=seed)
    found = []
    for block in rows(source):
        check_block(block, documents, length)
        found += pieces_of(block)
    cut = [ids[at : at + length] for ids in documents for at in range(0, len(ids), length)]
    assert sorted(found) == sorted(cut)
    assert source.fill == pytest.approx(sum(lengths) / (len(source) * length))


@given(document_lengths, st.sampled_from(["split", "fit"]), st.data())
def test_a_block_is_a_function_of_its_index_alone(lengths, strategy, data):
    file = opened_documents(numbered(lengths))
    source = PackedDocuments(file, 8, strategy, last="pad", attention="starts")
    blocks = list(rows(source))
    chosen = data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=6))
    again = PackedDocuments(file, 8, strategy, last="pad", attention="starts")
    batch = again.gather(np.array(chosen), epoch=3, seed=9)
    for key, value in batch.items():
        assert value.tolist() == [blocks[i][key].tolist() for i in chosen]


@given(document_lengths, lengths_of_blocks, st.sampled_from(["split", "fit"]))
def test_starts_are_where_document_ids_change(lengths, length, strategy):
    file = opened_documents(numbered(lengths))
    plain, source = (PackedDocuments(file, length, strategy, last="pad", attention=how) for how in ("ids", "starts"))
    for block, same in zip(rows(source), rows(plain), strict=True):
        starts, ids = block.pop("document_starts"), same["document_ids"].tolist()
        expected = [at for at in range(length) if at == 0 or ids[at] != ids[at - 1]]
        assert starts.tolist() == expected + [length] * (len(starts) - len(expected))
        assert len(starts) > len(expected)
        assert len(starts).bit_count() == 1
        assert starts.dtype == np.int32
        assert block.keys() == same.keys()
        assert all((block[key] == same[key]).all() for key in same)


@given(document_lengths, lengths_of_blocks, lengths_of_blocks)
def test_mixtures_of_lengths_keep_starts_in_order(lengths, one, two):
    file = opened_documents(numbered(lengths))
    sources = {str(n): PackedDocuments(file, n, last="pad", attention="starts") for n in {one, two}}
    mixture = TokenMixture(sources)
    batch = mixture.gather(np.arange(len(mixture)), epoch=0, seed=0)
    for row, starts in zip(batch["document_starts"], batch["position_ids"], strict=True):
        assert row.tolist() == sorted(row.tolist())
        assert row[0] == 0
        real = batch["labels"].shape[1]
        assert {int(at) for at in row if at < real} <= {n for n, place in enumerate(starts) if place == 0}


@given(document_lengths, lengths_of_blocks, lengths_of_blocks)
def test_mixtures_of_lengths_pad_as_by_hand_and_keep_padding_out_of_documents(lengths, one, two):
    file = opened_documents(numbered(lengths))
    sources = [PackedDocuments(file, n, last="pad", attention="ids") for n in sorted({one, two})]
    mixture = TokenMixture({str(source.length): source for source in sources})
    batch = mixture.gather(np.arange(len(mixture)), epoch=0, seed=0)
    fills = {"input_ids": 0, "labels": -100, "position_ids": 0, "document_ids": -1}
    assert batch.keys() == fills.keys()
    for key, fill in fills.items():
        padded = [
            np.pad(block[key], (0, sources[-1].length - source.length), constant_values=fill)
            for source in sources
            for block in rows(source)
        ]
        assert batch[key].tolist() == np.array(padded).tolist()
    is_padding = batch["document_ids"] < 0
    seen = document_mask(batch["document_ids"], causal=False)[:, 0]
    assert not (seen & (is_padding[:, :, None] != is_padding[:, None, :])).any()


def best_fit_by_hand(lengths, capacity):
    """One piece after the other into the fullest block that has room."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting, key=lambda i: room[i])] -= length
        else:
            room.append(capacity - length)
    return sorted(room)


@given(st.integers(1, 30).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(1, top), max_size=60))))
def test_groups_are_packed_as_single_pieces_would_be(case):
    capacity, lengths = case
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    blocks, number = best_fit(counts, capacity)
    used = np.bincount(blocks, np.array(sorted(lengths, reverse=True)), number)
    assert sorted((capacity - used).tolist()) == best_fit_by_hand(lengths, capacity)


def test_fit_leaves_almost_no_padding():
    lengths = np.random.default_rng(0).integers(16, 513, 5000)
    file = opened_documents([[1] * length for length in lengths.tolist()])
    assert PackedDocuments(file, 1024, "fit").fill > 0.99


def test_fit_parts_neighbours_and_other_seeds_part_them_otherwise():
    documents = numbered([4] * 400)
    file = opened_documents(documents)
    together = 0
    partners = []
    for seed in (0, 1):
        blocks = [pieces_of(block) for block in rows(PackedDocuments(file, 8, "fit", seed=seed))]
        assert all(len(pieces) == 2 for pieces in blocks)
        together += sum(abs(first[0] - second[0]) == 4 for first, second in blocks)
        partners.append({frozenset(ids[0] for ids in pieces) for pieces in blocks})
    assert together < 20
    assert len(partners[0] & partners[1]) < 20


@pytest.mark.parametrize("strategy", ["split", "fit"])
def test_streams_come_along(strategy):
    documents = numbered([5, 3, 9, 2])
    file = opened_documents(documents, streams=["labels", "types"], labels={"label": np.arange(4)})
    for block in rows(PackedDocuments(file, 7, strategy, last="pad")):
        real = int((block["document_ids"] >= 0).sum())
        ids = block["input_ids"][:real].tolist()
        assert block["labels"].tolist() == stream_values("labels", ids) + [-100] * (7 - real)
        assert block["types"].tolist() == stream_values("types", ids) + [0] * (7 - real)
        assert "label" not in block
    assert "labels" not in next(rows(PackedDocuments(file, 7, strategy, labels="none")))
    with pytest.raises(DataError, match="labels is 'label'"):
        PackedDocuments(file, 7, strategy, labels="label")


def test_padding_is_what_was_asked_for():
    source = PackedDocuments(opened_documents([[5, 6]]), 4, "fit", pad_id=9)
    assert source.gather(np.array([0]), epoch=0, seed=0)["input_ids"].tolist() == [[5, 6, 9, 9]]


@pytest.mark.parametrize("causal", [True, False])
def test_the_full_mask_follows_the_documents(causal):
    documents = numbered([5, 3, 9, 2])
    source = PackedDocuments(opened_documents(documents), 8, "fit", attention="full", causal=causal)
    for block in rows(source):
        ids, mask = block["document_ids"], block["attention_mask"]
        assert mask.shape == (1, 8, 8)
        for row in range(8):
            for column in range(8):
                assert mask[0, row, column] == (ids[row] == ids[column] and (column <= row or not causal))


def test_an_added_mask_hides_the_same():
    ids = torch.tensor([[0, 0, 1, 1, -1]])
    added = document_mask(ids, dtype=torch.float16)
    assert torch.equal(added == 0, document_mask(ids))
    assert set(added.unique().tolist()) == {0.0, torch.finfo(torch.float16).min}


def test_a_loader_stopped_in_the_middle_goes_on_with_the_same_blocks():
    source = PackedDocuments(opened_documents(numbered([7, 30, 9, 12, 50, 3])), 8, "fit")
    whole = [batch["input_ids"].tolist() for batch in DataLoader(source, batch_size=2, seed=1).iterate(4)]
    rest = [batch["input_ids"].tolist() for batch in DataLoader(source, batch_size=2, seed=1).iterate(4, position=6)]
    assert rest == whole[3:]
    assert len(whole) == -(-len(source) // 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length of blocks is 0"),
        ({"strategy": "best"}, "'split' or 'fit'"),
        ({"last": "keep"}, "'drop' or 'pad'"),
        ({"attention": "none"}, "'ids' or 'starts' or 'full'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        PackedDocuments(opened_documents([[1, 2, 3]]), **{"length": 2} | options)


@pytest.mark.parametrize("index", [-1, 2])
@pytest.mark.parametrize("strategy", ["split", "fit"])
def test_a_block_that_is_not_there_is_an_error(strategy, index):
    source = PackedDocuments(opened_documents([[1, 2, 3, 4]]), 2, strategy)
    with pytest.raises(DataError, match="not within 0 to 1"):
        source.gather(np.array([index]), epoch=0, seed=0)


def small_model(kind, attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2, attn_implementation=attention
        )
        return transformers.GPT2LMHeadModel(config).eval().double()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).eval().double()


@pytest.mark.parametrize("strategy", ["split", "fit"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_hugging_face_models_part_documents_in_batches_as_they_come(kind, strategy):
    documents = [[value % 97 for value in ids] for ids in numbered([5, 11, 3, 20, 9, 1])]
    source = PackedDocuments(opened_documents(documents), 24, strategy, last="pad")
    model = small_model(kind, "sdpa")
    batch = source.gather(np.arange(len(source)), epoch=0, seed=0)
    logits = ModelCall(model)(model, batch).logits
    assert torch.isfinite(logits).all()
    for row, numbers in enumerate(batch["document_ids"]):
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            alone = model(batch["input_ids"][row, here][None]).logits[0]
            torch.testing.assert_close(logits[row, here], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_a_model_sees_each_document_as_if_it_were_alone(kind, attention):
    documents = [[value % 97 for value in ids] for ids in numbered([5, 11, 3, 20, 9, 1])]
    source = PackedDocuments(opened_documents(documents), 24, "fit", attention="full")
    model = small_model(kind, attention)
    batch = source.gather(np.arange(len(source)), epoch=0, seed=0)
    mask = batch["attention_mask"]
    if attention == "eager":  # adds the mask to the scores
        mask = document_mask(batch["document_ids"], dtype=torch.float64)
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"]).logits
    compared = 0
    for row, numbers in enumerate(batch["document_ids"]):
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            alone = model(batch["input_ids"][row, here][None]).logits[0]
            torch.testing.assert_close(
                logits[row, here], alone, rtol=1e-6, atol=1e-6
            )  # Llama's softmax is in float32
            compared += 1
    assert compared == len(documents)
    wrong = model(
        batch["input_ids"], position_ids=batch["position_ids"], attention_mask=torch.ones_like(batch["input_ids"])
    )
    assert not torch.allclose(wrong.logits, logits, atol=1e-4)
