"""Loaders made elsewhere: their order is repeated, and resumed at every position."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from etude.core import Loader, num_samples
from etude.core.errors import DataError
from etude.data import DataLoader, ForeignLoader, as_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with few cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12 on
]

DATA = TensorDataset(torch.arange(23), torch.arange(23) % 3)


def run(loader, epoch, position=0):
    """The batches, each with the position after it; the caller draws between batches, as dropout would."""
    iterator = loader.iterate(epoch, position)
    return [(*[part.tolist() for part in batch], iterator.position, torch.rand(1).item()) for batch in iterator]


def make_plain(workers):
    return TorchLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)


MAKERS = {
    "shuffle": lambda: make_plain(0),
    "workers": lambda: make_plain(2),
    "generator": lambda: TorchLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "sampler generator": lambda: TorchLoader(DATA, 4, sampler=RandomSampler(DATA, generator=torch.Generator())),
    "weighted": lambda: TorchLoader(DATA, 4, sampler=WeightedRandomSampler(torch.rand(23).tolist(), 23)),
    "function": lambda: lambda: ((x, x + 1) for x in torch.randperm(20).split(3)),
    "numpy function": lambda: lambda: ((x, x) for x in torch.from_numpy(np.random.permutation(20)).split(3)),
    "python function": lambda: lambda: ((x, x) for x in torch.tensor(random.sample(range(20), 20)).split(3)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_resuming_at_every_position_gives_the_same_batches(kind):
    torch.manual_seed(0)
    source = MAKERS[kind]()
    for epoch in (0, 1):
        torch.manual_seed(epoch)
        whole, states = [], [torch.get_rng_state()]
        iterator = ForeignLoader(source, seed=4).iterate(epoch)
        for batch in iterator:
            whole.append((*[part.tolist() for part in batch], iterator.position, torch.rand(1).item()))
            states.append(torch.get_rng_state())
        for i in range(len(whole)):
            torch.set_rng_state(states[i])  # as a restored checkpoint does
            position = whole[i - 1][2] if i else 0
            assert run(ForeignLoader(source, seed=4), epoch, position) == whole[i:]


@pytest.mark.parametrize("kind", MAKERS)
def test_epochs_and_seeds_differ(kind):
    torch.manual_seed(0)
    source = MAKERS[kind]()
    orders = {
        str([batch[0] for batch in run(ForeignLoader(source, seed), epoch)]) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_augmentations_in_this_process_are_resumed_exactly(random_dataset):
    loader = ForeignLoader(TorchLoader(random_dataset, 4, shuffle=True))

    def draw():
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    iterator = loader.iterate(0)
    whole, states, positions = [], [], []
    for batch in iterator:
        whole.append(batch[0].tolist())
        torch.rand(2)
        states.append(draw())
        positions.append(iterator.position)
    for i, (state, position) in enumerate(zip(states, positions, strict=True)):
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        rest = []
        for batch in loader.iterate(0, position):
            rest.append(batch[0].tolist())
            torch.rand(2)
        assert rest == whole[i + 1 :]


@pytest.mark.parametrize("position", [0, 8])
def test_beginning_leaves_the_callers_generators_alone(position):
    loader = ForeignLoader(make_plain(0))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    next(loader.iterate(0, position))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_a_distributed_sampler_is_told_the_epoch():
    def order(epoch):
        sampler = DistributedSampler(DATA, num_replicas=2, rank=0, seed=1)
        loader = ForeignLoader(TorchLoader(DATA, 4, sampler=sampler), world_size=2)
        batches = run(loader, epoch)
        assert [position for *_, position, _ in batches] == [8, 16, 24]
        return [batch[0] for batch in batches]

    expected = DistributedSampler(DATA, num_replicas=2, rank=0, seed=1)
    expected.set_epoch(3)
    assert [index for batch in order(3) for index in batch] == list(expected)
    assert order(3) != order(4)


def test_a_batch_sampler_and_the_source_are_told_the_epoch():
    class Told:
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

        def __iter__(self):
            return iter([[0, 1], [2]])

    sampler = Told()
    list(ForeignLoader(TorchLoader(DATA, batch_sampler=sampler)).iterate(7))
    assert sampler.epochs == (7,)
    source = Told()
    assert list(ForeignLoader(source).iterate(2)) == [[0, 1], [2]]
    assert source.epochs == (2,)


def test_length():
    assert len(ForeignLoader(make_plain(0))) == 6
    assert len(ForeignLoader([torch.zeros(2)])) == 1
    with pytest.raises(TypeError, match="does not tell how many batches"):
        len(ForeignLoader(lambda: iter([])))


def test_positions_count_samples_of_all_ranks():
    batches = [torch.zeros(4, 2), {"input_ids": torch.zeros(3, 5)}, (torch.zeros(2), torch.zeros(2))]
    iterator = ForeignLoader(batches, world_size=3).iterate(0)
    assert [(num_samples(batch), iterator.position) for batch in iterator] == [(4, 12), (3, 21), (2, 27)]


def test_an_iterator_can_be_read_once():
    loader = ForeignLoader(iter([torch.zeros(2), torch.zeros(2)]))
    assert len(list(loader.iterate(0))) == 2
    with pytest.raises(DataError, match=r"read only once.*function that returns a new iterator"):
        loader.iterate(1)


def test_resuming_into_changed_data_is_explained():
    loader = ForeignLoader([torch.zeros(4), torch.zeros(4)])
    assert list(loader.iterate(0, 8)) == []
    with pytest.raises(DataError, match="the loader ends after 8; has the data changed"):
        next(loader.iterate(0, 12))
    with pytest.raises(DataError, match=r"cannot resume at sample 6: a batch .* ends at sample 8"):
        next(loader.iterate(0, 6))


def test_an_empty_loader_is_an_error():
    with pytest.raises(DataError, match="the data is empty"):
        list(ForeignLoader([]).iterate(0))


def test_closing_closes_a_generator_and_ends():
    closed = []

    def source():
        try:
            while True:
                yield torch.zeros(1)
        finally:
            closed.append(True)

    iterator = ForeignLoader(source).iterate(0)
    next(iterator)
    iterator.close()
    iterator.close()
    assert closed == [True]
    assert list(iterator) == []


def test_as_loader_keeps_loaders_and_wraps_the_rest():
    own = DataLoader(torch.zeros(4), batch_size=2)
    assert as_loader(own) is own
    wrapped = as_loader(make_plain(0), seed=3, world_size=2)
    assert isinstance(wrapped, ForeignLoader)
    assert isinstance(wrapped, Loader)
    assert (wrapped.seed, wrapped.world_size) == (3, 2)
    assert as_loader(wrapped) is wrapped
    assert len(list(as_loader([torch.zeros(2)]).iterate(0))) == 1


class _Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "source",
    [torch.zeros(4), np.zeros(4), {"x": torch.zeros(4)}, "mnist", DATA, _Endless(), 5, None, (torch.zeros(2),) * 2],
    ids=lambda source: type(source).__name__,
)
def test_things_without_batches_are_refused(source):
    with pytest.raises(DataError, match=r"cannot take batches from a .*DataLoader\(data, labels, batch_size\)"):
        as_loader(source)
