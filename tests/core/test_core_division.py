"""Dividing batches: every sample once, in order, in parts of nearly equal size."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pack_sequence

from etude import DataBatch
from etude.core import DataError
from etude.core.batch import STREAM, JointBatch, is_empty, num_samples
from etude.core.division import divide, divide_exactly


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


@given(st.integers(1, 40), st.integers(1, 50))
def test_every_sample_once(samples, count):
    rows = torch.arange(samples)
    parts = divide(
        (rows, {"y": rows * 2, "words": [str(row) for row in range(samples)], "scale": torch.tensor(3.0)}), count
    )
    sizes = [num_samples(part) for part in parts]
    assert len(parts) == min(count, samples)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part[0] for part in parts]), rows)
    assert torch.equal(torch.cat([part[1]["y"] for part in parts]), rows * 2)
    assert [word for part in parts for word in part[1]["words"]] == [str(row) for row in range(samples)]
    assert all(part[1]["scale"] == 3 for part in parts)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        DataBatch(torch.zeros(4, 2), torch.zeros(4)),
        Pair(torch.zeros(4, 2), "a"),
        {"x": torch.zeros(4, 2), STREAM: "a"},
        ([torch.zeros(3, 5), torch.zeros(2, 5), torch.zeros(1, 5), torch.zeros(7, 5)], torch.zeros(4)),
    ],
)
def test_forms_are_kept(batch):
    parts = divide(batch, 2)
    assert [num_samples(part) for part in parts] == [2, 2]
    assert {type(part) for part in parts} == {type(batch)}


def test_two_samples_of_a_pair():
    (x, y), _ = divide((torch.zeros(2, 3), torch.arange(2)), 2)
    assert (x.shape, y.tolist()) == ((1, 3), [0])


def test_streams_are_divided_alike():
    joint = JointBatch([{"x": torch.arange(4), STREAM: "a"}, {"x": torch.arange(1), STREAM: "b"}])
    parts = divide(joint, 2)
    assert [[(one[STREAM], len(one["x"])) for one in part] for part in parts] == [[("a", 2), ("b", 1)], [("a", 2)]]


def test_as_many_parts_as_another_process_has():
    joint = JointBatch([{"x": torch.arange(3), "scale": torch.tensor(2.0)}, {"x": torch.arange(1)}])
    parts = divide_exactly(joint, 4)
    assert [[one["x"].tolist() for one in part] for part in parts] == [[[0], [0]], [[1], []], [[2], []], [[], []]]
    assert [is_empty(part) for part in parts] == [False, False, False, True]
    assert all(part[0]["scale"] == 2 for part in parts)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(4, 2), "offsets": torch.zeros(3)},
        (torch.zeros(4, 2), torch.zeros(1, 2)),
        (torch.zeros(4, 2), object()),
        pack_sequence([torch.zeros(3), torch.zeros(2)]),
        "words",
    ],
)
def test_what_cannot_be_divided(batch):
    with pytest.raises(DataError, match="cannot be divided"):
        divide(batch, 2)
