"""Loaders made elsewhere that keep a state: a resume goes on from it, exactly, and reads nothing again."""

import random
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset, IterableDataset

from etude.core.errors import DataError
from etude.core.loader import StatefulLoader
from etude.data import ForeignLoader

GENERATORS = {
    "none": lambda: None,
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "old numpy": lambda: np.random.RandomState(1),
    "torch": lambda: torch.Generator(),
}


def noise(generator):
    if generator is None:
        return random.gauss(0, 1) + np.random.randn() + torch.randn(()).item()
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


class StatefulBatches:
    """Batches of a shuffled range with noise; counts how many it made, and reads one ahead of what it hands out."""

    def __init__(self, generator: Any = None) -> None:
        self.generator = generator
        self.made, self.start, self.place = 0, None, None

    def __iter__(self):
        start, self.start = self.start, None
        order = torch.randperm(20).tolist() if start is None else start["order"]
        for number in range(0 if start is None else start["number"], 7):
            self.made += 1
            self.place = {"order": order, "number": number + 1}
            rows = torch.tensor(order[3 * number : 3 * number + 3], dtype=torch.float64)
            yield rows + noise(self.generator)

    def state_dict(self):
        return dict(self.place)

    def load_state_dict(self, state):
        self.start = state


@dataclass
class StatefulRecord(StatefulBatches):
    """Compared by its values, so that it cannot be hashed."""

    generator: Any = None

    def __post_init__(self) -> None:
        super().__init__(self.generator)


class StatefulSamples(IterableDataset):
    """As Hugging Face's: begins where it was set to whenever the epoch is that of the state."""

    def __init__(self, generator: Any = None) -> None:
        self.generator, self.made, self.epoch = generator, 0, 0
        self.index, self.start = 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(20).tolist()
        self.index = self.start["index"] if self.start is not None and self.start["epoch"] == self.epoch else 0
        while self.index < 20:
            self.index, self.made = self.index + 1, self.made + 1
            yield order[self.index - 1] + noise(self.generator)

    def state_dict(self):
        return {"index": self.index, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start = state


def in_torch(generator=None, **options):
    return TorchLoader(StatefulSamples(generator), batch_size=3, **options)


def run(loader, epoch, position=0):
    """Batches, each with the position and the loader's state after it; the caller draws in between."""
    iterator = loader.iterate(epoch, position)
    for batch in iterator:
        random.random(), np.random.randn(), torch.rand(2)
        yield batch.tolist(), iterator.position, loader.state_dict()


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("make", [StatefulBatches, StatefulRecord, in_torch])
def test_going_on_from_a_state_is_exact_and_reads_nothing_again(make, kind):
    loader = ForeignLoader(make(GENERATORS[kind]()), seed=4)
    assert isinstance(loader, StatefulLoader)
    for epoch in (0, 1):
        whole = list(run(loader, epoch))
        assert len(whole) == 7
        for done in range(1, 7):
            source = make(GENERATORS[kind]())
            resumed = ForeignLoader(source, seed=4)
            resumed.load_state_dict(whole[done - 1][2])
            rest = [batch for batch, _, _ in run(resumed, epoch, whole[done - 1][1])]
            assert rest == [batch for batch, _, _ in whole[done:]]
            made = source.made if isinstance(source, StatefulBatches) else source.dataset.made
            assert made == (len(rest) if isinstance(source, StatefulBatches) else 20 - 3 * done)
            # The epochs after it begin at their beginning, and so does this one if asked for again.
            for other in (epoch + 1, epoch):
                assert (
                    next(run(resumed, other))[:2] == next(run(ForeignLoader(make(GENERATORS[kind]()), 4), other))[:2]
                )


def test_asking_for_the_state_changes_nothing():
    class Draws(StatefulBatches):
        def state_dict(self):
            noise(None)
            return super().state_dict()

    asked = [batch for batch, _, _ in run(ForeignLoader(Draws(), seed=4), 0)]
    assert asked == [batch.tolist() for batch in ForeignLoader(Draws(), seed=4).iterate(0)]


@pytest.mark.parametrize("make", [StatefulBatches, in_torch])
def test_a_source_that_is_read_by_somebody_else_meanwhile_has_no_state(make):
    source = make()
    train, validation = ForeignLoader(source), ForeignLoader(source)
    iterator = train.iterate(0)
    next(iterator)
    assert train.state_dict()
    next(validation.iterate(0))
    assert train.state_dict() == {}


def test_the_state_is_there_after_closing_but_not_at_the_end():
    loader = ForeignLoader(StatefulBatches())
    iterator = loader.iterate(0)
    next(iterator)
    expected = loader.state_dict()["source"]
    iterator.close()
    del iterator
    assert loader.state_dict()["source"] == expected
    list(loader.iterate(1))
    assert loader.state_dict() == {}


def test_a_state_of_another_place_is_not_used():
    loader = ForeignLoader(StatefulBatches(), seed=4)
    whole = list(run(loader, 0))
    source = StatefulBatches()
    resumed = ForeignLoader(source, seed=4)
    resumed.load_state_dict(whole[1][2])
    assert [batch for batch, _, _ in run(resumed, 0, whole[3][1])] == [batch for batch, _, _ in whole[4:]]
    assert source.made == 7


@pytest.mark.parametrize(
    "source", [[torch.zeros(2)] * 3, lambda: iter([torch.zeros(2)] * 3), in_torch(num_workers=1)]
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_keeps_no_state_that_can_be_used_has_none(source):
    loader = ForeignLoader(source)
    assert loader.state_dict() == {}
    iterator = loader.iterate(0)
    next(iterator)
    assert loader.state_dict() == {}
    iterator.close()


class ArrowExamplesIterable:
    """Named as Hugging Face's."""


class MappedExamplesIterable:
    """Named as Hugging Face's, which goes on by computing some samples again."""

    ex_iterable = ArrowExamplesIterable()


class BufferShuffledExamplesIterable:
    """Named as Hugging Face's, whose state leaves out what the buffer holds."""

    ex_iterable = ArrowExamplesIterable()


class VerticallyConcatenatedMultiSourcesExamplesIterable:
    """Named as Hugging Face's."""

    def __init__(self, *several):
        self.ex_iterables = several


class Constant:
    """A generator of a dataset that draws nothing."""

    def random(self):
        return 0.5


@pytest.mark.parametrize(
    ("steps", "generator", "is_kept"),
    [
        (ArrowExamplesIterable(), None, True),
        (MappedExamplesIterable(), Constant(), True),
        (MappedExamplesIterable(), None, False),
        (MappedExamplesIterable(), random.Random(1), False),
        (BufferShuffledExamplesIterable(), Constant(), False),
        (VerticallyConcatenatedMultiSourcesExamplesIterable(ArrowExamplesIterable()), None, True),
        (VerticallyConcatenatedMultiSourcesExamplesIterable(BufferShuffledExamplesIterable()), Constant(), False),
    ],
)
def test_a_dataset_of_hugging_face_keeps_a_state_if_that_is_exact(steps, generator, is_kept):
    source = in_torch(generator)
    source.dataset._ex_iterable = steps
    expected = {"index": 3, "epoch": 0} if is_kept else None
    assert next(run(ForeignLoader(source), 0))[2].get("source") == expected


def test_one_whose_state_is_not_exact_is_read_again():
    source = in_torch()
    source.dataset._ex_iterable = MappedExamplesIterable()
    loader = ForeignLoader(source)
    whole = [batch.tolist() for batch in loader.iterate(0)]
    iterator = loader.iterate(0)
    next(iterator)
    assert loader.state_dict() == {}
    assert [batch.tolist() for batch in loader.iterate(0, 3)] == whole[1:]


def test_a_state_that_is_refused_is_explained():
    class Refuses(StatefulBatches):
        def load_state_dict(self, state):
            raise KeyError("shard 7")

    loader = ForeignLoader(Refuses())
    loader.load_state_dict({"epoch": 0, "position": 3, "source": {}, "random": {}})
    with pytest.raises(DataError, match=r"Refuses.*shard 7"):
        next(loader.iterate(0, 3))


class Slots:
    """Stateful, but no weak reference to it can be made."""

    __slots__ = ("place",)

    def __iter__(self):
        return iter([torch.zeros(3)] * 4)

    def state_dict(self):
        return {"place": 1}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_class_with_slots_is_read_again():
    loader = ForeignLoader(Slots())
    iterator = loader.iterate(0)
    next(iterator)
    assert loader.state_dict() == {}
    assert len(list(ForeignLoader(Slots()).iterate(0, iterator.position))) == 3


class StatefulIterations:
    """As grain's: its iterators keep the state, in bytes, with the text of the data."""

    def __init__(self, name=b"rows"):
        self.name = name

    def __iter__(self):
        return StatefulIteration(self.name)


class StatefulIteration:
    def __init__(self, name):
        self.name, self.index = name, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == 7:
            raise StopIteration
        self.index += 1
        return torch.full((3,), self.index)

    def get_state(self):
        return self.name + bytes([self.index, 255])

    def set_state(self, state):
        if not state.startswith(self.name):
            raise ValueError("another source")
        self.index = state[-2]


def test_an_iterator_that_keeps_a_state_is_let_go_of_when_it_is_closed():
    loader = ForeignLoader(StatefulIterations())
    first = loader.iterate(0)
    next(first)
    second, inner = loader.iterate(1), weakref.ref(first._batches)
    next(second), next(second)
    first.close()
    assert inner() is None
    state = loader.state_dict()
    second.close()
    assert loader.state_dict()["source"] == state["source"]
    assert state["position"] == 6
    resumed = ForeignLoader(StatefulIterations())
    resumed.load_state_dict(state)
    assert next(resumed.iterate(1, 6)).tolist() == [3, 3, 3]


def test_a_state_that_only_this_process_would_take_is_none(caplog):
    """The text of an object holds its address in memory unless it has a `__repr__`, and grain compares it."""
    loader = ForeignLoader(StatefulIterations(repr(object.__repr__(Constant())).encode()))
    iterator = loader.iterate(0)
    next(iterator)
    assert loader.state_dict() == {}
    assert "__repr__" in caplog.text


def test_an_iterator_that_refuses_a_state_is_named():
    resumed = ForeignLoader(StatefulIterations(b"other"))
    resumed.load_state_dict({"epoch": 0, "position": 3, "source": {"bytes": "rows\x01\xff"}, "random": {}})
    with pytest.raises(DataError, match=r"StatefulIterations.*another source"):
        next(resumed.iterate(0, 3))


class StatefulTorch(TorchLoader):
    """Keeps a state, as torchdata's StatefulDataLoader, which is one of torch's as well."""

    def state_dict(self):
        return {"somewhere": 1}

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("sample", "is_kept"), [(float, True), (lambda i: i + torch.rand(()), False)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_state_leaves_out_what_workers_draw_so_it_is_not_used_then(sample, is_kept, persistent):
    loader = ForeignLoader(StatefulTorch(Samples(sample), 2, num_workers=1, persistent_workers=persistent))
    for epoch in (0, 1):
        iterator = loader.iterate(epoch)
        for _ in range(2):
            next(iterator)
        assert bool(loader.state_dict()) == is_kept
        iterator.close()


class Samples(Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.sample(index)


def test_nor_is_one_of_workers_whose_dataset_keeps_a_generator():
    dataset = Samples(float)
    dataset.generator = random.Random(1)
    loader = ForeignLoader(StatefulTorch(dataset, 2, num_workers=1))
    iterator = loader.iterate(0)
    next(iterator)
    assert loader.state_dict() == {}
    iterator.close()
