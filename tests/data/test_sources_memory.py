"""Data in memory: batches that are gathered several at once are those that are gathered one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from etude.core.batch import DataBatch
from etude.data import BatchSampler
from etude.data.sources.memory import ALIGNED, TensorSource, _rows, _split


def tensors_of(batch):
    return list(batch.values()) if isinstance(batch, dict) else [one for one in batch if one is not None]


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    width=st.integers(1, 40),
    chunk_bytes=st.integers(0, 20_000),
    kind=st.sampled_from(["data", "labels", "mapping"]),
    drop_last=st.booleans(),
    start=st.integers(0, 3),
)
def test_batches_gathered_together(samples, batch_size, width, chunk_bytes, kind, drop_last, start):
    x, y = torch.arange(samples * width, dtype=torch.float32).view(samples, width), torch.arange(samples)
    make = {
        "data": lambda: TensorSource(x),
        "labels": lambda: TensorSource(x, y),
        "mapping": lambda: TensorSource({"x": x, "id": y}),
    }[kind]
    sampler = BatchSampler(samples, batch_size, drop_last=drop_last and batch_size <= samples, seed=3)
    position = min(start * batch_size, sampler.epoch_samples)
    one_by_one, together = make(), make()
    one_by_one.chunk_bytes, together.chunk_bytes = 0, chunk_bytes
    expected = list(one_by_one.batches(sampler, 1, position))
    found = list(together.batches(sampler, 1, position))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        for mine, theirs in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.is_contiguous()


@given(
    size=st.integers(1, 70),
    width=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
)
def test_every_part_begins_where_memory_of_its_own_could(size, width, dtype):
    column = torch.zeros(3 * size, width, dtype=dtype)
    for part in _split(column, size):
        assert part.storage_offset() * part.element_size() % ALIGNED == 0


def test_a_function_of_every_element_is_applied_to_all_of_them():
    source = TensorSource(torch.arange(8), torch.arange(8), transform=lambda data: data * 10)
    source.chunk_bytes = 10_000
    batches = list(source.batches(BatchSampler(8, 3, shuffle=False), 0, 0))
    assert [batch.data.tolist() for batch in batches] == [[0, 10, 20], [30, 40, 50], [60, 70]]
    assert [batch.labels.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(isinstance(batch, DataBatch) for batch in batches)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 5), (6, 1)])
def test_rows_are_the_bytes_of_samples(dtype, shape):
    column = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = np.array([5, 0, 0, 3])
    taken = torch.empty((4, *shape[1:]), dtype=dtype)
    np.take(_rows(column), index, axis=0, out=_rows(taken), mode="clip")
    assert torch.equal(taken, column.index_select(0, torch.from_numpy(index)))
