"""Tokens of a batch: found where a batch has them, counted without padding, and not found in anything else."""

import pytest
import torch

from etude.core import DataBatch
from etude.engine.meter import count_tokens

IDS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        IDS.int(),
        (IDS,),
        (IDS, IDS),
        DataBatch(IDS, torch.zeros(3)),
        {"input_ids": IDS},
        {"input_ids": IDS, "labels": torch.zeros(3)},
        {"labels": IDS, "tokens": IDS},
        {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)},  # says who sees whom, not what is padding
    ],
)
def test_ids_without_padding_are_a_plain_number(batch):
    count = count_tokens(batch)
    assert count == 12
    assert isinstance(count, int)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 4),
        (torch.zeros(3, 4), IDS),
        (torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3)),
        (torch.zeros(3, 64, dtype=torch.uint8), torch.arange(3)),  # pixels
        {"pixel_values": torch.zeros(3, 3, 8, 8), "labels": torch.arange(3)},
        {"input_ids": torch.arange(4)},
        {"labels": IDS},
        ["words"],
        (),
    ],
)
def test_other_batches_have_no_tokens(batch):
    assert count_tokens(batch) == 0


def test_padding_of_packed_documents_does_not_count():
    documents = torch.tensor([[0, 0, 1, 2], [0, 1, -1, -1], [0, 0, 0, -1]])
    batch = {"input_ids": IDS, "document_ids": documents}
    assert count_tokens(batch) == 9


@pytest.mark.parametrize("key", ["attention_mask", "attn_mask"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_padding_does_not_count(key, dtype):
    batch = {"input_ids": IDS, key: MASK.to(dtype)}
    count = count_tokens(batch)
    assert isinstance(count, torch.Tensor)  # nothing was read
    assert count == 7


def test_a_next_token_batch_counts_the_tokens_to_predict():
    batch = {"tokens": IDS, "types": IDS, "attn_mask": MASK}
    assert count_tokens(batch) == 3 + 1 + 0
    del batch["attn_mask"]
    assert count_tokens(batch) == 9
