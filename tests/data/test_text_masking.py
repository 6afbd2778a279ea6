"""Masked language modelling: exact where it must be, right in the mean, and the same in any batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from token_samples import numbered, opened_documents

from etude.core.errors import DataError
from etude.data import (
    DataLoader,
    MaskedTokens,
    PackedDocuments,
    TokenBlocks,
    TokenDocuments,
    TokenMixture,
    mask_tokens,
)
from etude.data.sources.base import MeasuredSource, OrderedSource
from etude.data.text.masking import sample_keys

SPECIAL = [0, 1, 2, 50]
MASK = 3
VOCAB = 60


def keys(indices, epoch=0, seed=0):
    return sample_keys(np.asarray(indices), epoch=epoch, seed=seed)


def text(rows, length, seed=0):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def masked(ids, indices=None, *, epoch=0, seed=0, attention_mask=None, **options):
    indices = np.arange(len(ids)) if indices is None else indices
    options = {"mask_id": MASK, "vocab_size": VOCAB, "special_ids": SPECIAL} | options
    return mask_tokens(ids, sample_keys=keys(indices, epoch, seed), attention_mask=attention_mask, **options)


def plain(ids):
    return ~torch.isin(ids, torch.tensor([*SPECIAL, MASK]))


@given(st.integers(1, 6), st.integers(1, 60), st.floats(0.01, 1), st.integers(0, 99))
def test_labels_tell_what_was_hidden_and_nothing_else_changes(rows, length, rate, seed):
    ids = text(rows, length, seed)
    before = ids.clone()
    real = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    result, labels = masked(ids, rate=rate, attention_mask=real.long(), seed=seed)
    chosen = labels != -100
    assert torch.equal(ids, before)
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(result[~chosen], ids[~chosen])
    assert bool((chosen <= (plain(ids) & real)).all())
    assert bool((result[chosen] == MASK).logical_or(plain(result[chosen])).all())
    if rate == 1:
        assert torch.equal(chosen, plain(ids) & real)


def test_rate_one_takes_every_plain_token():
    ids = text(4, 500)
    _, labels = masked(ids, rate=1.0)
    assert torch.equal(labels != -100, plain(ids))


def test_fifteen_percent_and_eighty_ten_ten():
    ids = text(400, 1000)
    result, labels = masked(ids)
    chosen, countable = labels != -100, plain(ids)
    total, taken = int(countable.sum()), int(chosen.sum())
    assert stats.binomtest(taken, total, 0.15).pvalue > 1e-4
    hidden = int((result == MASK)[chosen].sum())
    # One in (plain ids) random replacements is the token itself and looks as if it had stayed.
    num_plain = VOCAB - len(SPECIAL) - 1
    other = int((result[chosen] != labels[chosen]).sum()) - hidden
    stayed = taken - hidden - other
    expected = np.array([0.8, 0.1 * (1 - 1 / num_plain), 0.1 + 0.1 / num_plain]) * taken
    assert stats.chisquare([hidden, other, stayed], expected).pvalue > 1e-4
    # The same in every column and row: no place is favoured.
    columns = chosen.sum(0).numpy() / countable.sum(0).numpy()
    assert stats.kstest((columns - 0.15) / np.sqrt(0.15 * 0.85 / countable.sum(0).numpy()), "norm").pvalue > 1e-4
    rows = chosen.sum(1).numpy() / countable.sum(1).numpy()
    assert stats.kstest((rows - 0.15) / np.sqrt(0.15 * 0.85 / countable.sum(1).numpy()), "norm").pvalue > 1e-4


def test_replacements_are_uniform_over_plain_ids():
    ids = torch.full((100, 1000), 7)
    result, labels = masked(ids, rate=1.0)
    assert bool((labels == 7).all())
    counts = np.bincount(result[(result != 7) & (result != MASK)].numpy(), minlength=VOCAB)
    allowed = plain(torch.arange(VOCAB)).numpy()
    assert counts[~allowed].sum() == 0
    allowed[7] = False
    assert stats.chisquare(counts[allowed]).pvalue > 1e-4


def test_neighbours_epochs_and_seeds_are_independent():
    ids = torch.full((200, 500), 7)
    first = (masked(ids)[1] != -100).numpy()
    others = {
        "next place": np.roll(first, 1, axis=1),
        "next sample": np.roll(first, 1, axis=0),
        "next epoch": (masked(ids, epoch=1)[1] != -100).numpy(),
        "next seed": (masked(ids, seed=1)[1] != -100).numpy(),
    }
    for name, other in others.items():
        both = int((first & other).sum())
        assert stats.binomtest(both, first.size, 0.15**2).pvalue > 1e-4, name


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_a_sample_is_masked_the_same_in_any_batch_and_padding(order, epoch, extra):
    ids = text(8, 30)
    whole = masked(ids, epoch=epoch)
    wider = torch.nn.functional.pad(ids, (0, extra), value=9)
    real = torch.nn.functional.pad(torch.ones_like(ids), (0, extra))
    part = masked(wider[order], np.array(order), epoch=epoch, attention_mask=real[order])
    for alone, together in zip(part, whole, strict=True):
        assert torch.equal(alone[:, :30], together[order])
    assert bool((part[1][:, 30:] == -100).all())


FILE = opened_documents([[value % 50 + 4 for value in row] for row in numbered([20, 3, 47, 11, 60, 8, 30])])
SOURCES = {
    "blocks": TokenBlocks(FILE, 16),
    "documents": TokenDocuments(FILE),
    "split": PackedDocuments(FILE, 16, last="pad"),
    "fit": PackedDocuments(FILE, 64, "fit"),
    "full": PackedDocuments(FILE, 64, "fit", attention="full", causal=False),
}


class TestMaskedTokens:
    @pytest.mark.parametrize("name", SOURCES)
    def test_it_wraps_any_source(self, name):
        source = SOURCES[name]
        wrapped = MaskedTokens(source, MASK, VOCAB, rate=0.5)
        assert len(wrapped) == len(source)
        indices = np.arange(len(source))[::-1].copy()
        before = source.gather(indices, epoch=2, seed=1)
        batch = wrapped.gather(indices, epoch=2, seed=1)
        assert batch.keys() == before.keys()
        unchanged = batch.keys() - {"input_ids", "labels"}
        assert all(torch.equal(batch[key], before[key]) for key in unchanged)
        chosen = batch["labels"] != -100
        assert torch.equal(batch["labels"][chosen], before["input_ids"][chosen])
        real = torch.ones_like(chosen)
        if name != "blocks":
            real = before["document_ids"] >= 0 if name != "documents" else before["attention_mask"] == 1
        assert not bool(chosen[~real].any())
        assert 0.3 < float(chosen[real].double().mean()) < 0.7
        again = wrapped.gather(indices[:1], epoch=2, seed=1)
        width = again["labels"].shape[1]
        assert torch.equal(again["labels"][0], batch["labels"][0, :width])
        assert not torch.equal(wrapped.gather(indices, epoch=3, seed=1)["labels"], batch["labels"])

    def test_it_has_what_its_source_has(self):
        blocks, documents = (MaskedTokens(SOURCES[name], MASK, VOCAB) for name in ("blocks", "documents"))
        assert not isinstance(blocks, MeasuredSource)
        assert isinstance(documents, MeasuredSource)
        assert not isinstance(documents, OrderedSource)
        mixture = MaskedTokens(TokenMixture({"a": SOURCES["documents"]}), MASK, VOCAB)
        assert isinstance(mixture, OrderedSource)

    def test_a_loader_masks_alike_for_any_number_of_ranks(self):
        source = MaskedTokens(SOURCES["blocks"], MASK, VOCAB)
        whole = next(DataLoader(source, batch_size=8, seed=5).iterate(1))
        parts = [next(DataLoader(source, batch_size=8, seed=5, rank=r, world_size=2).iterate(1)) for r in (0, 1)]
        for key in whole:
            assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": 1.5}, "rate is 1.5"),
        ({"mask_id": 60}, "ids must be 0 to 59"),
        ({"special_ids": range(60)}, "all 60 ids are special"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        masked(text(1, 4), **options)


def test_ids_of_a_wrong_shape_are_refused():
    with pytest.raises(DataError, match=r"shape \(4,\)"):
        mask_tokens(torch.arange(4), sample_keys=keys([0]), mask_id=1, vocab_size=9)
    with pytest.raises(DataError, match="3 keys for 2 samples"):
        masked(text(2, 4), np.arange(3))
