"""Batches that runs saved by earlier versions go on with: a change of one bit here breaks their resuming."""

import hashlib
from itertools import islice

import pytest
import torch
from token_samples import numbered, opened_documents

from etude.data import (
    DataLoader,
    LoaderData,
    MaskedTokens,
    PackedDocuments,
    StreamLoader,
    TensorData,
    TokenBlocks,
    TokenDocuments,
    TokenMixture,
)

KEYS = ("stream", "input", "input_ids", "labels", "attention_mask")
"""What may come beside these does not change a run."""
LENGTHS = [3 + number * 37 % 53 for number in range(60)]


def parts():
    """Whole numbers only: they are the same on every machine."""
    text, code = opened_documents(numbered(LENGTHS)), opened_documents(numbered(LENGTHS[20:]))
    documents = TokenDocuments(text, max_length=24, long="split")
    mixture = TokenMixture({"a": TokenBlocks(text, 12), "b": TokenBlocks(code, 8)}, {"a": 3, "b": 1}, 90)
    return {
        "tensor": torch.arange(53),
        "pair": TensorData(torch.arange(41), torch.arange(41) % 5, lambda data: data * 2),
        "blocks": TokenBlocks(text, 12),
        "moving": TokenBlocks(code, 12, moving=True),
        "documents": LoaderData(documents, {"bucket_batches": 3}),
        "packed": PackedDocuments(text, 32, strategy="fit"),
        "masked": MaskedTokens(TokenBlocks(code, 12), mask_id=1, vocab_size=3000, rate=0.3),
        "mixture": mixture,
        "samples": [(torch.tensor(number), number) for number in range(31)],
    }


def chosen(loader, **choice):
    loader.choose(**choice)
    return loader


LOADERS = {
    "tensor": lambda p: DataLoader(p["tensor"], batch_size=8, seed=7),
    "tensor of 70,000": lambda p: DataLoader(torch.arange(70_000), batch_size=512, seed=7),
    "tensor in order": lambda p: DataLoader(p["tensor"], batch_size=8, shuffle=False, drop_last=True),
    "blocks": lambda p: DataLoader(p["blocks"], batch_size=8, seed=7),
    "rank of documents": lambda p: DataLoader(
        p["documents"].data, batch_size=8, seed=7, bucket_batches=3, rank=1, world_size=3
    ),
    "masked": lambda p: DataLoader(p["masked"], batch_size=8, seed=7),
    "mixture": lambda p: DataLoader(p["mixture"], batch_size=8, seed=7, prefetch=2),
    "samples": lambda p: DataLoader(p["samples"], batch_size=8, seed=7),
    "alternate": lambda p: StreamLoader(p, 8, seed=3, prefetch=2, epoch_samples=200),
    "weights": lambda p: StreamLoader(
        {name: p[name] for name in ("blocks", "documents", "pair")},
        8,
        seed=3,
        weights={"blocks": 1, "documents": 3, "pair": 0.5},
        epoch_samples=200,
    ),
    "together": lambda p: StreamLoader(p, 20, seed=3, draw="together", epoch_samples=200),
    "rank of together": lambda p: StreamLoader(
        p, 20, seed=3, draw="together", epoch_samples=200, rank=2, world_size=3
    ),
    "evaluation": lambda p: StreamLoader(p, 16, training=False),
    "chosen": lambda p: chosen(
        StreamLoader(p, 8, seed=3, epoch_samples=200),
        weights={"packed": 1, "documents": 2},
        sequence_length=8,
    ),
}
RECORDED = {
    "tensor": "c1e9a4d468d3b855",
    "tensor of 70,000": "f910df913f960450",
    "tensor in order": "307f9e7199ff6257",
    "blocks": "6d8fd27ea7d70005",
    "rank of documents": "09ea26ea9383978e",
    "masked": "92cf928329a40735",
    "mixture": "f13d19378aa0ccca",
    "samples": "fbb840421359cc72",
    "alternate": "798d4389ccfe7560",
    "weights": "5bd86bd609bfa817",
    "together": "a90b9f4f06965e66",
    "rank of together": "6a13735ad70337e6",
    "evaluation": "68a5d210a8fe9c52",
    "chosen": "4f86754434b08dd8",
}


def update(digest, value):
    """Take in a batch of any form: kinds, shapes and numbers."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in (key for key in KEYS if key in value):
            digest.update(key.encode())
            update(digest, value[key])
    elif isinstance(value, (tuple, list)):
        digest.update(type(value).__name__.encode())
        for one in value:
            update(digest, one)
    else:
        digest.update(repr(value).encode())


def recorded(make):
    """The digest of all batches and positions of two epochs, and of the rest of the second from its third batch on."""
    digest = hashlib.sha256()
    loader, second = make(parts()), []
    for epoch in (0, 2):
        batches = loader.iterate(epoch)
        for batch in islice(batches, 40):
            second.append(batches.position)
            digest.update(str(batches.position).encode())
            update(digest, batch)
        batches.close()
    batches = loader.iterate(2, second[2])
    for batch in islice(batches, 4):
        update(digest, batch)
    batches.close()
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_that_were_recorded(name):
    assert recorded(LOADERS[name]) == RECORDED[name]
