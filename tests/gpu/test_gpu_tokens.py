"""Blocks of tokens on a GPU: the same batches, one copy for ids and labels, and nobody waits."""

import numpy as np
import pytest
import torch

from etude.data import DataLoader, TokenBlocks, TokenDocuments, TokenWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    with TokenWriter(path, meta={"vocab_size": 1000}) as writer:
        for length in rng.integers(5, 90, 300):
            writer.add(rng.integers(0, 1000, length).astype(np.uint16))
    return path


@pytest.mark.parametrize("prefetch", [0, 2])
def test_blocks_arrive_as_on_the_cpu_and_stay_views(path, prefetch):
    blocks = TokenBlocks(path, 64)
    expected = list(DataLoader(blocks, batch_size=8))
    loader = DataLoader(blocks, batch_size=8, device="cuda", prefetch=prefetch)
    list(loader.iterate(1))  # pinned memory is made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = list(loader.iterate(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found, expected, strict=True):
        assert one["input_ids"].is_cuda
        assert torch.equal(one["input_ids"].cpu(), other["input_ids"])
        assert torch.equal(one["labels"].cpu(), other["labels"])
        assert one["input_ids"].untyped_storage().data_ptr() == one["labels"].untyped_storage().data_ptr()


def test_documents_arrive_as_on_the_cpu(path):
    documents = TokenDocuments(path)
    options = {"batch_size": 8, "bucket_batches": 4}
    for one, other in zip(
        DataLoader(documents, device="cuda", prefetch=2, **options), DataLoader(documents, **options), strict=True
    ):
        assert all(torch.equal(one[key].cpu(), other[key]) for key in other)
