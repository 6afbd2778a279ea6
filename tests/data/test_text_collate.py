"""Collating: compared with torch's pad_sequence and default_collate."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from token_samples import numbered, opened_documents
from torch.nn.utils.rnn import pad_sequence

from etude.core.errors import DataError
from etude.data import DataLoader, Sample, TokenDocuments, collate

KINDS = [list, np.array, lambda ids: np.array(ids, np.uint16), torch.tensor, lambda ids: torch.tensor(ids).int()]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=8), st.sampled_from(KINDS))
def test_rows_of_any_kind_are_padded_with_a_mask(rows, kind):
    batch = collate([kind(row) for row in rows], pad_id=7)
    tensors = [torch.tensor(row) for row in rows]
    assert torch.equal(batch["input_ids"], pad_sequence(tensors, batch_first=True, padding_value=7))
    assert torch.equal(batch["attention_mask"], pad_sequence([torch.ones_like(t) for t in tensors], batch_first=True))
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_samples_of_a_file_make_the_batch_that_token_documents_make():
    file = opened_documents(numbered([3, 8, 1, 5]))
    expected = TokenDocuments(file, pad_multiple=4).gather(np.array([1, 2, 0]), epoch=0, seed=0)
    batch = collate([file[1], file[2], file[0]], pad_multiple=4)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in batch)
    assert isinstance(file[0], Sample)


def test_a_mask_of_the_samples_is_kept():
    batch = collate([([1, 2, 3], [1, 0, 1], 4), ([5], [1], 6)])
    assert batch["attention_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [4, 6]


def test_mappings_keep_their_names():
    samples = [
        {"tokens": [1, 2], "types": [4, 5], "labels": [2, -100], "flags": [0.0, 1.0, 1.0], "name": "a"},
        {"tokens": [3], "types": [6], "labels": [-100], "flags": [1.0, 1.0, 0.0], "name": "b"},
    ]
    batch = collate(samples, pad_id=9, pad_multiple=2)
    assert batch["tokens"].tolist() == [[1, 2], [3, 9]]
    assert batch["attn_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["types"].tolist() == [[4, 5], [6, 0]]
    assert batch["labels"].tolist() == [[2, -100], [-100, -100]]
    assert batch["flags"].tolist() == [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    assert batch["flags"].dtype == torch.float32
    assert batch["name"] == ["a", "b"]


def test_values_of_several_dimensions_are_padded_along_the_tokens():
    features = [torch.rand(3, 2), torch.rand(1, 2)]
    batch = collate([{"input_ids": [1, 2, 3], "x": features[0]}, {"input_ids": [4], "x": features[1]}])
    assert torch.equal(batch["x"], pad_sequence(features, batch_first=True))


def test_equal_shapes_are_stacked_as_torch_does():
    samples = [{"image": np.full((2, 3), i, np.uint8), "label": i, "weight": np.float32(0.5)} for i in range(4)]
    batch = collate(samples)
    expected = torch.utils.data.default_collate(samples)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in batch)
    assert {key: batch[key].dtype for key in batch} == {key: expected[key].dtype for key in batch}


@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, functools.partial(DataLoader, shuffle=False)])
def test_it_is_the_collate_fn_of_a_loader(loader):
    documents = numbered([2, 4, 1])
    data = [np.array(document) for document in documents]
    batches = list(loader(data, batch_size=2, collate_fn=functools.partial(collate, pad_id=0)))
    assert batches[0]["input_ids"].tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert batches[1]["attention_mask"].tolist() == [[1]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([[1], [[2]]], "one dimension"),
        ([{"input_ids": [1]}, {"tokens": [1]}], "different keys"),
        ([([1],)], "all be \\(ids, labels\\)"),
        ([{"input_ids": [1], "x": [1, 2]}, {"input_ids": [1], "x": [1]}], "x has different shapes"),
        ([{"input_ids": [None]}], "input_ids of a sample is list"),
        ([torch.zeros(2, dtype=torch.bfloat16)], "cannot be converted to an array"),
    ],
)
def test_samples_that_do_not_fit_are_reported(samples, message):
    with pytest.raises(DataError, match=message):
        collate(samples)
