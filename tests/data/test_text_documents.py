"""Padded documents: compared with plain Python over the samples that the file gives one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from token_samples import document_lengths, numbered, opened_documents, stream_values, write_tokens
from torch.nn.utils.rnn import pad_sequence

from etude.core.errors import DataError
from etude.data import DataLoader, TokenDocuments, open_tokens


def gather(source, indices):
    return source.gather(np.asarray(indices), epoch=0, seed=0)


def next_tokens(ids):
    return [*ids[1:], -100] if ids else []


def padded(rows, fill, multiple=1):
    rows = [torch.tensor(row, dtype=torch.int64) for row in rows]
    result = pad_sequence(rows, batch_first=True, padding_value=fill)
    missing = -max(result.shape[1], 1) % multiple + (result.shape[1] == 0)
    return torch.nn.functional.pad(result, (0, missing), value=fill)


@given(document_lengths, st.integers(0, 3), st.sampled_from([1, 8]), st.data())
def test_batches_are_padded_documents(lengths, pad_id, multiple, data):
    documents = numbered(lengths)
    source = TokenDocuments(opened_documents(documents), pad_id=pad_id, pad_multiple=multiple)
    chosen = data.draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=9))
    batch = gather(source, chosen)
    rows = [documents[i] for i in chosen]
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert all(value.dtype == torch.int64 and value.is_contiguous() for value in batch.values())
    assert torch.equal(batch["input_ids"], padded(rows, pad_id, multiple))
    assert torch.equal(batch["attention_mask"], padded([[1] * len(row) for row in rows], 0, multiple))
    assert torch.equal(batch["labels"], padded([next_tokens(row) for row in rows], -100, multiple))
    assert source.lengths(np.array(chosen)).tolist() == [len(row) for row in rows]


@given(document_lengths, st.integers(1, 15), st.data())
def test_long_documents_are_split_into_samples(lengths, most, data):
    documents = numbered(lengths)
    source = TokenDocuments(opened_documents(documents), most, long="split")
    pieces = [
        (document[at : at + most], next_tokens(document)[at : at + most])
        for document in documents
        for at in range(0, max(len(document), 1), most)
    ]
    assert len(source) == len(pieces)
    chosen = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=9))
    batch = gather(source, chosen)
    assert torch.equal(batch["input_ids"], padded([pieces[i][0] for i in chosen], 0))
    assert torch.equal(batch["labels"], padded([pieces[i][1] for i in chosen], -100))
    assert source.lengths(np.array(chosen)).tolist() == [len(pieces[i][0]) for i in chosen]


def test_long_documents_are_cut_and_keep_the_token_that_follows():
    source = TokenDocuments(opened_documents([[1, 2, 3, 4], [5, 6], [7, 8, 9]]), max_length=3)
    batch = gather(source, [0, 1, 2])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 6, 0], [7, 8, 9]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, -100, -100], [8, 9, -100]]
    assert source.lengths(np.arange(3)).tolist() == [3, 2, 3]


def test_documents_beyond_sixteen_bits_of_length(tmp_path):
    documents = [list(np.arange(70_000) % 50_000), [1, 2]]
    batch = gather(TokenDocuments(write_tokens(tmp_path / "long.bin", documents)), [1, 0])
    assert batch["input_ids"].shape == (2, 70_000)
    assert batch["input_ids"][1].tolist() == documents[0]
    assert batch["attention_mask"].sum(1).tolist() == [2, 70_000]


def test_wide_rows_near_the_end_of_the_file_are_read_like_any_others():
    documents = numbered([100, 3, 1, 2, 1])
    source = TokenDocuments(opened_documents(documents * 3))
    for chosen in ([0, 14], [5, 13, 14], [14], [0, 1]):
        expected = padded([(documents * 3)[i] for i in chosen], 0)
        assert torch.equal(gather(source, chosen)["input_ids"], expected)


class TestLabels:
    documents = numbered([4, 2, 3])

    def test_a_stream_of_labels_comes_before_next_tokens(self):
        file = opened_documents(self.documents, streams=["labels", "types"])
        batch = gather(TokenDocuments(file, 3), [0, 1])
        rows = [self.documents[0][:3], self.documents[1]]
        assert torch.equal(batch["labels"], padded([stream_values("labels", row) for row in rows], -100))
        assert torch.equal(batch["types"], padded([stream_values("types", row) for row in rows], 0))

    @pytest.mark.parametrize("name", ["label", "labels"])
    def test_labels_of_samples_come_before_everything(self, name):
        streams = [] if name == "labels" else ["labels"]
        file = opened_documents(self.documents, streams=streams, labels={name: np.array([2, 0, 1], np.int8)})
        batch = gather(TokenDocuments(file), [2, 0])
        assert batch["labels"].tolist() == [1, 2]
        assert batch["labels"].dtype == torch.int64
        assert set(batch) == {"input_ids", "attention_mask", "labels"}

    def test_several_labels_per_sample_and_other_labels_by_name(self):
        flags = np.array([[0, 1], [1, 1], [1, 0]], np.uint8)
        score = np.array([0.5, 1.5, 2.5], np.float64)
        file = opened_documents(self.documents, labels={"labels": flags, "score": score})
        batch = gather(TokenDocuments(file), [1, 2])
        assert batch["labels"].tolist() == [[1, 1], [1, 0]]
        assert batch["score"].tolist() == [1.5, 2.5]
        assert batch["score"].dtype == torch.float32

    def test_pieces_of_a_document_carry_its_label(self):
        file = opened_documents(self.documents, labels={"label": np.array([7, 8, 9], np.int64)})
        assert gather(TokenDocuments(file, 2, long="split"), [0, 1, 2, 3, 4])["labels"].tolist() == [7, 7, 8, 9, 9]

    def test_the_choice_can_be_made_by_hand(self):
        labels = {"label": np.array([2, 0, 1], np.int8)}
        file = opened_documents(self.documents, streams=["labels", "roles"], labels=labels)
        batch = gather(TokenDocuments(file, labels="next"), [1])
        assert batch["labels"].tolist() == [[self.documents[1][1], -100]]
        assert batch["label"].tolist() == [0]
        roles = gather(TokenDocuments(file, labels="roles"), [1])
        assert roles["labels"].tolist() == [stream_values("roles", self.documents[1])]
        assert "roles" not in roles
        assert "labels" not in gather(TokenDocuments(file, labels="none"), [1])
        with pytest.raises(DataError, match=r"labels is 'rolls'; .* allows next, none, labels, roles, label"):
            TokenDocuments(file, labels="rolls")

    def test_a_stream_with_a_name_of_the_batch_is_refused(self):
        with pytest.raises(DataError, match="'position_ids', which batches use"):
            TokenDocuments(opened_documents(self.documents, streams=["position_ids"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"long": "split"}, "needs a max_length"),
        ({"long": "chop", "max_length": 3}, "'cut' or 'split'"),
        ({"pad_multiple": 0}, "pad_multiple is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        TokenDocuments(opened_documents([[1]]), **options)


@pytest.mark.parametrize("index", [-1, 5])
def test_a_sample_that_is_not_there_is_an_error(index):
    file = opened_documents(numbered([3, 5]))
    for source in (TokenDocuments(file), TokenDocuments(file, 2, long="split")):
        with pytest.raises(DataError, match=r"no sample|not within 0 to 4"):
            gather(source, [0, index])


def test_a_flat_file_without_documents_is_not_taken_for_one_long_document(tmp_path):
    path = tmp_path / "flat.bin"
    np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(path)
    with pytest.raises(DataError, match="the documents of"):
        TokenDocuments(open_tokens(path, dtype="uint16"), 4)
    assert len(TokenDocuments(open_tokens(path, dtype="uint16"), 4, long="split")) == 2
    documents = TokenDocuments(open_tokens(path, dtype="uint16", document_end=0))
    assert gather(documents, [0, 1])["input_ids"].tolist() == [[5, 6, 0, 0], [7, 8, 9, 0]]


def test_ids_of_32_bits():
    documents = [[2**31, 2**32 - 1, 5], [1]]
    batch = gather(TokenDocuments(opened_documents(documents * 40, dtype="uint32"), pad_id=3), [0, 1])
    assert batch["input_ids"].tolist() == [documents[0], [1, 3, 3]]


def test_a_loader_gives_every_document_once_whatever_the_ranks(tmp_path):
    documents = numbered([5, 9, 1, 7, 30, 2, 4, 4])
    path = write_tokens(tmp_path / "train.bin", documents)
    source = TokenDocuments(path)
    whole = [row for batch in DataLoader(source, batch_size=4, seed=3) for row in rows_of(batch)]
    assert sorted(whole) == sorted(documents)
    parts = [DataLoader(source, batch_size=4, seed=3, rank=rank, world_size=2).iterate(0) for rank in (0, 1)]
    both = [row for left, right in zip(*parts, strict=True) for row in rows_of(left) + rows_of(right)]
    assert both == whole
    assert len(TokenDocuments(open_tokens(path))) == len(documents)


def rows_of(batch):
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask == 1].tolist() for ids, mask in pairs]
