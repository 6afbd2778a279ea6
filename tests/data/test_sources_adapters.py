"""Loaders made elsewhere: their order is repeated, and resumed at every position."""

import random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch.utils.data import (
    DataLoader as TorchLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from etude.core import Loader, num_samples
from etude.core.errors import DataError
from etude.data import DataLoader, ForeignLoader, as_loader
from grids import sampled

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
    for epoch in (1,) if kind == "workers" else (0, 1):  # processes take long to start
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


class Buffered(IterableDataset):
    """Shuffles with a buffer: a number is drawn for each sample, from a generator of the given kind."""

    def __init__(self, length, buffer, kind):
        self.length, self.buffer = length, buffer
        self.below = DRAWS[kind](self)

    def __iter__(self):
        info = get_worker_info()
        mine = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        kept = []
        for index in mine:
            kept.append(index)
            if len(kept) > self.buffer:
                yield kept.pop(self.below(len(kept)))
        while kept:
            yield kept.pop(self.below(len(kept)))


def own_generator(dataset, generator):
    dataset.rng = generator
    return generator


DRAWS = {
    "python": lambda _: random.randrange,
    "numpy": lambda _: np.random.randint,
    "torch": lambda _: lambda n: int(torch.randint(n, ())),
    "own python": lambda dataset: own_generator(dataset, random.Random(1)).randrange,
    "own numpy": lambda dataset: own_generator(dataset, np.random.default_rng(1)).integers,
    "own old numpy": lambda dataset: own_generator(dataset, np.random.RandomState(1)).randint,
    "gauss": lambda _: lambda n: int(abs(np.random.randn()) * 100) % n,  # NumPy keeps every second number for later
}


def disturb(draws):
    """Draw as a model or a callback would."""
    for _ in range(draws):
        random.random(), np.random.randn(), torch.rand(2)


def check_exact(make, epochs, stop, draws):
    """The batches from `stop` on, by a new loader, are those of a run that went on; both are disturbed differently."""
    undisturbed = ForeignLoader(make(), seed=2)
    for epoch in range(epochs):
        iterator = undisturbed.iterate(epoch)
        whole, positions = [], [0]
        for batch in iterator:
            whole.append(batch.tolist())
            positions.append(iterator.position)
            disturb(1)
        if epoch < epochs - 1:
            continue
        assert len(positions) > 1
        at = stop % len(positions)
        resumed = ForeignLoader(make(), seed=2).iterate(epoch, positions[at])
        rest = []
        for batch in resumed:
            rest.append(batch.tolist())
            disturb(draws)
        assert rest == whole[at:]
    return whole


@given(
    kind=st.sampled_from(sorted(DRAWS)),
    length=st.integers(1, 60),
    buffer=st.integers(0, 20),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 60),
    epochs=st.integers(1, 3),
    draws=st.integers(0, 2),
)
def test_a_shuffle_drawn_sample_by_sample_is_resumed_exactly(kind, length, buffer, batch_size, stop, epochs, draws):
    seen = check_exact(lambda: TorchLoader(Buffered(length, buffer, kind), batch_size), epochs, stop, draws)
    assert sorted(index for batch in seen for index in batch) == list(range(length))


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        ("python", False),
        ("own numpy", True),
        *(pytest.param(one, False, marks=pytest.mark.slow) for one in ("numpy", "torch", "own numpy")),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("python", "numpy", "torch")),
    ],
)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])  # each example starts processes
@given(
    length=st.integers(2, 40),
    buffer=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 60),
    prefetch=st.integers(1, 3),
)
def test_so_is_one_drawn_in_workers(kind, persistent, length, buffer, batch_size, stop, prefetch):
    def make():
        options = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": prefetch}
        return TorchLoader(Buffered(length, buffer, kind), batch_size, **options)

    seen = check_exact(make, 2, stop, 1)
    assert sorted(index for batch in seen for index in batch) == list(range(length))


class LazySampler:
    """Draws each index when it is asked for, from a generator of its own or the global one."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return 23

    def __iter__(self):
        return (int(torch.randint(23, (), generator=self.generator)) for _ in range(23))


class Noisy(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([index + random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Sharded(IterableDataset):
    """As in Hugging Face's datasets: the shuffle is a function of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(24).tolist()
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


class Reader:
    """Its method gives the batches; it keeps the generator."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def batches(self):
        for _ in range(7):
            yield torch.from_numpy(self.rng.integers(100, size=3))


def seed_worker(_worker):
    """The recipe of torch's notes on reproducibility."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


WEIGHTS = torch.linspace(0.1, 1, 23).tolist()
LAZY = {
    "augmented": lambda **options: TorchLoader(Noisy(), 4, shuffle=True, **options),
    "seeded workers": lambda **options: TorchLoader(Noisy(), 4, shuffle=True, worker_init_fn=seed_worker, **options),
    "lazy sampler": lambda **options: TorchLoader(Noisy(), 4, sampler=LazySampler(), **options),
    "own generator": lambda **options: TorchLoader(Noisy(), 4, sampler=LazySampler(torch.Generator()), **options),
    "loader's generator": lambda **options: TorchLoader(
        Noisy(), 4, shuffle=True, generator=torch.Generator(), **options
    ),
    "replacement": lambda **options: TorchLoader(
        Noisy(), 4, sampler=RandomSampler(range(23), True, 70, torch.Generator()), **options
    ),
    "weighted": lambda **options: TorchLoader(Noisy(), 4, sampler=WeightedRandomSampler(WEIGHTS, 23), **options),
    "set_epoch": lambda **options: TorchLoader(Sharded(), 4, **options),
}
WORKERS = {"none": {}, "workers": {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}


@pytest.mark.parametrize(("kind", "workers"), sampled(3, LAZY, WORKERS))
def test_numbers_drawn_batch_by_batch_are_resumed_exactly(kind, workers):
    check_exact(lambda: LAZY[kind](**WORKERS[workers]), 2, 3, 2)


def test_so_are_those_of_a_generator_function_and_of_a_method():
    def draw():
        for _ in range(9):
            yield torch.tensor([random.random(), np.random.rand(), torch.rand(())])

    check_exact(lambda: draw, 2, 4, 2)
    check_exact(lambda: Reader().batches, 2, 4, 2)


def test_a_generator_shared_by_two_loaders_belongs_to_each():
    shared = torch.Generator()
    train, other = (TorchLoader(Noisy(), 4, sampler=LazySampler(shared)) for _ in range(2))
    expected = [batch.tolist() for batch in ForeignLoader(train).iterate(1)]
    got = []
    for batch in ForeignLoader(train).iterate(1):
        got.append(batch.tolist())
        next(ForeignLoader(other).iterate(0))  # as a validation in mid-epoch
    assert got == expected


@pytest.mark.parametrize("make", [make_plain, lambda _: TorchLoader(Noisy(), 4), lambda _: [torch.zeros(2)] * 4])
def test_the_caller_draws_as_if_there_were_no_data(make):
    def draw():
        return random.random(), np.random.randn(), torch.rand(()).item()

    def seed():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = [draw() for _ in range(4)]
    seed()
    iterator = ForeignLoader(make(0)).iterate(0)
    got = []
    for _ in range(4):
        next(iterator)
        got.append(draw())
    assert got == expected


@pytest.mark.parametrize("position", [0, 8])
def test_beginning_leaves_the_callers_generators_alone(position):
    loader = ForeignLoader(make_plain(0))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    next(loader.iterate(0, position))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_a_distributed_sampler_is_reported_the_epoch():
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


def test_set_epoch_of_a_batch_sampler_and_of_the_source_is_called():
    class SetEpoch:
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

        def __iter__(self):
            return iter([[0, 1], [2]])

    sampler = SetEpoch()
    list(ForeignLoader(TorchLoader(DATA, batch_sampler=sampler)).iterate(7))
    assert sampler.epochs == (7,)
    source = SetEpoch()
    assert list(ForeignLoader(source).iterate(2)) == [[0, 1], [2]]
    assert source.epochs == (2,)


def test_length():
    assert len(ForeignLoader(make_plain(0))) == 6
    assert len(ForeignLoader([torch.zeros(2)])) == 1
    with pytest.raises(TypeError, match="does not define its number of batches"):
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
    with pytest.raises(DataError, match="the loader ends after 8;"):
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
