"""Splits, loaders over them, and labels that do not fit."""

import pytest
import torch

from etude.core.errors import DataError
from etude.data import DataSplits, TensorData, check_labels, make_loader

PART = TensorData(torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2]), lambda data: data * 10)


def test_only_training_is_shuffled():
    splits = DataSplits(PART, PART, PART, num_classes=3)
    train, validation, test = (splits.make_loader(name, 4) for name in ("train", "validation", "test"))
    assert (train.shuffle, validation.shuffle, test.shuffle) == (True, False, False)
    assert [batch.data.tolist() for batch in validation] == [[0, 10, 20, 30], [40, 50]]
    assert not splits.make_loader("train", 4, shuffle=False).shuffle


def test_options_reach_the_loader():
    loader = DataSplits(PART).make_loader("train", 4, seed=9, drop_last=True, prefetch=1, rank=1, world_size=2)
    sampler = loader.sampler
    assert (sampler.seed, sampler.drop_last, sampler.rank, sampler.world_size) == (9, True, 1, 2)
    assert loader.prefetch == 1
    assert make_loader(PART, 2, shuffle=False, transform=None).next().data.tolist() == [0, 1]


def test_datasets_are_parts_too():
    assert [batch.tolist() for batch in make_loader([5, 6, 7], 2, shuffle=False)] == [[5, 6], [7]]


def test_a_missing_part_is_an_error():
    with pytest.raises(DataError, match="the data has no test split"):
        DataSplits(PART).make_loader("test", 4)


def test_length():
    assert len(PART) == 6
    assert len(TensorData({"x": torch.zeros(3, 2)})) == 3


def test_labels_out_of_range_are_found_when_splits_or_loaders_are_made():
    with pytest.raises(DataError, match=r"2 labels are out of range: the first is 2 \(entry 2\).* 2 classes"):
        DataSplits(PART, num_classes=2)
    with pytest.raises(DataError, match="out of range"):
        DataSplits(TensorData(torch.zeros(1)), validation=PART, num_classes=2)
    with pytest.raises(DataError, match="out of range"):
        make_loader(PART, 2, num_classes=2)


@pytest.mark.parametrize(
    ("labels", "is_fine"),
    [
        (torch.tensor([0, 9]), True),
        (torch.tensor([[0, 9], [-100, 3]]), True),
        (torch.tensor([0, 10]), False),
        (torch.tensor([-1, 3]), False),
        (torch.tensor([-101, 3]), False),
        (torch.tensor([156, 1], dtype=torch.uint8), False),  # -100 modulo 256
        (torch.tensor([9, 1], dtype=torch.uint8), True),
        (torch.tensor([99.5]), True),
        (torch.tensor([], dtype=torch.long), True),
    ],
)
def test_check_labels(labels, is_fine):
    if is_fine:
        check_labels(labels, 10)
    else:
        with pytest.raises(DataError, match="out of range"):
            check_labels(labels, 10)


def test_more_classes_than_a_byte_can_count():
    check_labels(torch.tensor([255], dtype=torch.uint8), 300)
