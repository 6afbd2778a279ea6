"""Batches of any nesting: moved, pinned, counted and copied, and of the same form afterwards."""

import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from batch_classes import Bag, Derived, Frozen, GraphBatch, Lookup, OneGraph, Pair, Plain, graphs
from etude.core.batch import (
    DataBatch,
    JointBatch,
    batch_labels,
    count_samples,
    in_pinned_memory,
    inputs_of,
    is_empty,
    map_tensors,
    num_samples,
    targets_of,
    tensors_in,
    to_device,
    without_samples,
)
from etude.core.errors import DataError

META = torch.device("meta")
LENGTH = 3


def packed(*lengths):
    return pack_sequence([torch.ones(length, 2) for length in lengths], enforce_sorted=False)


def named_mapping(kind):
    return lambda values: kind({f"key{number}": value for number, value in enumerate(values)})


CONTAINERS = [
    tuple,
    list,
    lambda values: Pair(values, values[0]),
    lambda values: DataBatch(values[0], values),
    lambda values: Plain(values[0], values),
    lambda values: Frozen(values),
    lambda values: Derived(values[0]),
    *(named_mapping(kind) for kind in (dict, OrderedDict, Bag, Lookup, lambda m: defaultdict(int, m))),
]
LEAVES = st.one_of(
    st.builds(lambda *shape: torch.zeros(LENGTH, *shape), st.integers(0, 2)),
    st.sampled_from(["words", 3, None, 0.5]),
    st.builds(lambda: packed(4, 2)),
    st.builds(lambda: graphs([3, 4])),
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda make, values: make(values), st.sampled_from(CONTAINERS), st.lists(inner, min_size=1)
    ),
    max_leaves=12,
)


def same_form(one, other, *, of_tensors):
    """Assert that two batches differ in nothing but what `of_tensors` compares."""
    if isinstance(one, Tensor):
        of_tensors(one, other)
        return
    assert type(one) is type(other) or (isinstance(one, Lookup) and type(other) is dict)
    if isinstance(one, GraphBatch):
        same_form(one.store, other.store, of_tensors=of_tensors)
    elif isinstance(one, (Mapping, UserDict)):
        assert list(one) == list(other)
        same_form(list(one.values()), list(other.values()), of_tensors=of_tensors)
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same_form(mine, theirs, of_tensors=of_tensors)
    elif is_dataclass(one):
        same_form(
            [getattr(one, f.name) for f in fields(one)],
            [getattr(other, f.name) for f in fields(other)],
            of_tensors=of_tensors,
        )
    else:
        assert one == other


@given(BATCHES)
def test_all_tensors_move_and_the_form_stays(batch):
    kept = copy.deepcopy(batch)

    def moved(before, after):
        assert (after.shape, after.dtype, after.device.type) == (before.shape, before.dtype, "meta")

    def compare(before, after):
        if before.dtype is torch.int64 and before.dim() == 1 and not after.is_meta:
            return  # what a PackedSequence says of its lengths never leaves the CPU
        moved(before, after)

    result = to_device(batch, META)
    same_form(kept, result, of_tensors=compare)


@given(BATCHES)
def test_nothing_is_copied_by_moving_to_where_it_is(batch):
    kept = list(tensors_in(batch))
    assert all(
        one is other for one, other in zip(tensors_in(to_device(batch, torch.device("cpu"))), kept, strict=True)
    )


@given(BATCHES)
def test_a_function_of_every_tensor_leaves_the_batch_as_it_was(batch):
    kept = copy.deepcopy(batch)
    result = map_tensors(batch, lambda tensor: tensor + 1)
    same_form(kept, batch, of_tensors=lambda one, other: torch.testing.assert_close(one, other))
    inside = _plain_tensors(batch)
    assert [(one + 1).tolist() for one in inside] == [one.tolist() for one in _plain_tensors(result)]


def _plain_tensors(batch):
    found = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)
    return found


@given(BATCHES)
def test_all_tensors_are_pinned(batch):
    pinned = []

    def pin(tensor):
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(PackedSequence, "pin_memory", lambda self: pin(self.data) is None or self)
        wanted = [one.data_ptr() for one in _plain_tensors(batch)]
        result = in_pinned_memory(batch)
    assert set(wanted) <= set(pinned)
    same_form(batch, result, of_tensors=lambda one, other: torch.testing.assert_close(one, other))


@given(BATCHES)
def test_a_batch_is_as_long_as_its_first_tensor(batch):
    """Every tensor has three samples, every graph batch and packed sequence two; lists of tensors have entries."""
    count = count_samples(batch)
    assert num_samples(batch) == (1 if count is None else count)
    has_something = any(True for _ in tensors_in(batch))
    assert (count is None) == (not has_something)
    assert not is_empty(batch)


@given(st.integers(0, 5), st.sampled_from(CONTAINERS), st.sampled_from(CONTAINERS))
def test_counts_of_nested_tensors(size, outer, inner):
    batch = outer([inner([torch.zeros(size, 2)])])
    assert is_empty(batch) == (size == 0)
    if isinstance(batch, (tuple, list)) and isinstance(batch[0], list):
        return  # a list of samples, below
    assert count_samples(batch) in (size, 1)


IMAGES = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 7)]
BOXES = [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(4, 2), 4),
        (torch.zeros(()), 1),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"input_ids": torch.zeros(4, 7)}, 4),
        (Plain(torch.zeros(4), torch.zeros(2)), 4),
        (Frozen({"x": torch.zeros(4)}), 4),
        (graphs([3, 4, 5]), 3),
        ((graphs([3, 4, 5]), torch.zeros(7)), 3),
        (packed(4, 1, 2), 3),
        ((packed(4, 1, 2), torch.zeros(7)), 3),
        (SimpleNamespace(), None),
        (OneGraph(torch.zeros(7, 2), torch.zeros(7)), None),
        ((["a", "b"], torch.zeros(2)), 2),
        (["a", "b"], None),
        ({}, None),
        # detection: a list of images, of one size or not
        ((IMAGES, BOXES), 2),
        ((tuple(IMAGES), tuple(BOXES)), 2),
        (([IMAGES[0], IMAGES[0]], BOXES), 2),
        (([IMAGES[0], IMAGES[0]], None), 2),
        ((IMAGES, torch.zeros(2)), 2),
        ({"images": IMAGES}, 2),
        ({"images": IMAGES, "labels": [torch.zeros(5), torch.zeros(1)]}, 2),
        ([{"image": IMAGES[0], "boxes": torch.zeros(5, 4)}, {"image": IMAGES[1], "boxes": torch.zeros(1, 4)}], 2),
        # inputs side by side
        (((torch.zeros(4, 2), torch.zeros(4, 5)), torch.zeros(4)), 4),
        (([torch.zeros(4, 2), torch.zeros(4, 5)], torch.zeros(4)), 4),
        (((torch.zeros(4, 2), torch.zeros(4, 5)), (torch.zeros(4), torch.zeros(4))), 4),
        (((torch.zeros(4, 2), torch.zeros(4, 5)),), 4),
        (({"x": torch.zeros(4)}, {"y": torch.zeros(4)}), 4),
        # several streams
        (JointBatch([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(5, 3)}]), 7),
    ],
)
def test_how_many_samples(batch, count):
    assert count_samples(batch) == count
    assert num_samples(batch) == (1 if count is None else count)


def test_an_object_says_its_batch_size():
    class Sized:
        def __init__(self, batch_size):
            self.batch_size = batch_size

        def to(self, device):
            return self

    assert count_samples(Sized(5)) == 5
    assert count_samples(Sized(torch.Size([4, 2]))) == 4
    assert count_samples(Sized(torch.Size([]))) is None
    assert is_empty(Sized(0))
    assert not is_empty((Sized(0), torch.zeros(1)))


def test_an_object_that_knows_the_way_is_asked_to_go_without_waiting_only_if_it_can():
    asked = []

    class Old:
        def to(self, device):
            asked.append(device)
            return self

    class New:
        def to(self, device, non_blocking=False):
            asked.append((device, non_blocking))
            return self

    to_device([Old(), {"x": New()}], torch.device("cuda"))
    to_device(New(), META)
    assert asked == [torch.device("cuda"), (torch.device("cuda"), True), (META, False)]


def test_hugging_face_batches_stay_what_they_are():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(2, 3), "labels": torch.ones(2)})
    moved = to_device(batch, META)
    assert type(moved) is transformers.BatchEncoding
    assert moved["input_ids"].is_meta
    assert count_samples(batch) == 2
    cut = map_tensors(batch, lambda tensor: tensor[:1])
    assert type(cut) is transformers.BatchEncoding
    assert (len(cut["labels"]), len(batch["labels"])) == (1, 2)
    assert batch_labels(cut) is cut["labels"]


def test_a_dict_that_cannot_be_written_to_becomes_a_plain_one():
    class ReadOnly(dict):
        def __setitem__(self, key, value):
            raise TypeError("read only")

    result = map_tensors(ReadOnly(x=torch.zeros(1)), lambda tensor: tensor + 1)
    assert type(result) is dict
    assert result["x"].item() == 1


def test_a_rebuilt_dataclass_is_still_frozen_and_not_initialised_again():
    batch = Derived(torch.zeros(2))
    result = map_tensors(batch, lambda tensor: tensor + 1)
    assert [one.tolist() for one in (result.x, result.twice, result.thrice)] == [[1, 1]] * 3
    with pytest.raises(FrozenInstanceError):
        result.x = None
    assert batch.x.tolist() == [0, 0]


def test_a_batch_without_samples_has_the_form_of_one_with_some():
    batch = {"x": torch.zeros(3, 2), "pair": Plain(torch.zeros(3), "name")}
    nothing = without_samples(batch)
    assert is_empty(nothing)
    assert (nothing["x"].shape, nothing["pair"].x.shape, nothing["pair"].y) == ((0, 2), (0,), "name")
    with pytest.raises(DataError, match=r"GraphBatch.*drop_last"):
        without_samples(graphs([3, 4]))


def test_settings_of_a_mapping_stay():
    bag = Bag(x=torch.zeros(1))
    bag.colour = "blue"
    assert map_tensors(bag, torch.clone).colour == "blue"


def test_tensors_inside_of_objects_are_found_once():
    class Holder:
        def __init__(self):
            self.x, self.itself = torch.zeros(2), self

        def to(self, device):
            return self

    holder = Holder()
    assert [one is holder.x for one in tensors_in({"a": holder})] == [True]
    assert len(list(tensors_in(graphs([3, 4])))) == 4
    assert any(one is batch for batch in (packed(2).data,) for one in tensors_in(batch))


@dataclass
class Labelled:
    x: Tensor
    labels: Tensor


@pytest.mark.parametrize(
    ("batch", "labels"),
    [
        (graphs([2, 4]), [0, 1]),
        (OneGraph(torch.zeros(2), torch.tensor([7])), [7]),
        (Labelled(torch.zeros(1), torch.tensor([3])), [3]),
        (SimpleNamespace(target=torch.tensor([4])), [4]),
        ((packed(2, 1), torch.tensor([5, 6])), [5, 6]),
    ],
)
def test_labels_of_objects(batch, labels):
    assert targets_of(batch)[0].tolist() == labels


def test_objects_without_labels_are_their_own_input():
    for batch in (packed(2, 1), SimpleNamespace()):
        assert batch_labels(batch) is None
        assert inputs_of(batch) is batch
