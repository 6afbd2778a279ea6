"""Map-style datasets: batches and their random augmentations do not depend on who fetches them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from etude.core.errors import DataError
from etude.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with few cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12 on
]


def batches(dataset, epoch=0, position=0, **options):
    return list(DataLoader(dataset, batch_size=5, seed=3, **options).iterate(epoch, position))


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for (x, y), (x_expected, y_expected) in zip(got, expected, strict=True):
        assert torch.equal(x, x_expected)
        assert torch.equal(y, y_expected)


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()


def test_samples_come_in_the_samplers_order(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3)
    got = [x[:, 0].long().tolist() for x, _ in loader.iterate(2)]
    assert got == [loader.sampler.batch(2, p).tolist() for p in range(0, 22, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"prefetch": 2},
    ],
)
def test_workers_and_prefetching_change_nothing(random_dataset, options):
    for epoch in (0, 1):
        expected = batches(random_dataset, epoch)
        assert_equal(batches(random_dataset, epoch, **options), expected)
        assert_equal(batches(random_dataset, epoch, position=10, **options), expected[2:])


def test_persistent_workers_serve_epoch_after_epoch(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=2, persistent_workers=True)
    for epoch, position in ((0, 0), (1, 0), (1, 10), (0, 5)):
        assert_equal(list(loader.iterate(epoch, position)), batches(random_dataset, epoch, position))
    # An epoch broken off does not leak into the next one.
    iterator = loader.iterate(2)
    next(iterator)
    iterator.close()
    assert_equal(list(loader.iterate(3)), batches(random_dataset, 3))


def test_persistent_workers_are_the_same_processes():
    class WhoAmI(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            import os

            return os.getpid(), get_worker_info().id

    loader = DataLoader(WhoAmI(), batch_size=1, num_workers=2, persistent_workers=True)
    seen = [{int(pid) for pid, _ in loader.iterate(epoch)} for epoch in range(3)]
    assert len(seen[0]) == 2
    assert seen[0] == seen[1] == seen[2]


def test_an_iterator_overtaken_by_another_says_so(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, num_workers=1, persistent_workers=True)
    old = loader.iterate(0)
    next(old)
    new = loader.iterate(1)
    with pytest.raises(DataError, match="a new iteration has begun"):
        next(old)
    assert len(list(new)) == 5


def test_iterators_without_persistent_workers_are_independent(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=1)
    interleaved = list(zip(loader.iterate(0), loader.iterate(1), strict=True))
    assert_equal([a for a, _ in interleaved], batches(random_dataset, 0))
    assert_equal([b for _, b in interleaved], batches(random_dataset, 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_generators_are_untouched(random_dataset, num_workers):
    before = generators()
    for _ in DataLoader(random_dataset, batch_size=5, num_workers=num_workers).iterate(0):
        after = generators()
        assert before[:3] == after[:3]
        assert torch.equal(before[3], after[3])


def test_the_callers_draws_do_not_change_the_batches(random_dataset):
    iterator = DataLoader(random_dataset, batch_size=5, seed=3).iterate(0)
    got = []
    for batch in iterator:
        got.append(batch)
        random.random(), np.random.random(), torch.rand(3)
    assert_equal(got, batches(random_dataset))


def test_augmentations_change_with_sample_epoch_and_seed(random_dataset):
    def noise(epoch, seed):
        loader = DataLoader(random_dataset, batch_size=22, seed=seed, shuffle=False)
        return next(loader.iterate(epoch))[0][:, 1:]

    one = noise(0, 0)
    assert len(torch.unique(one)) == one.numel()
    assert not torch.any(one == noise(1, 0))
    assert not torch.any(one == noise(0, 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_together_see_the_same_samples(random_dataset, num_workers):
    alone = batches(random_dataset)
    for world_size in (2, 4):
        ranks = [
            batches(random_dataset, rank=r, world_size=world_size, num_workers=num_workers) for r in range(world_size)
        ]
        joined = [[torch.cat(parts) for parts in zip(*shares, strict=True)] for shares in zip(*ranks, strict=True)]
        assert_equal(joined, alone)
    # 22 samples in batches of 5 leave 2: with four ranks, some get an empty batch of the right form.
    assert {len(batch[-1][0]) for batch in ranks} == {0, 1}
    assert all(rank[-1][0].shape[1:] == (4,) for rank in ranks)


def test_collate_fn_makes_the_batch():
    loader = DataLoader(
        [3, 1, 2], batch_size=2, shuffle=False, collate_fn=lambda samples: {"n": torch.tensor(samples)}
    )
    assert [batch["n"].tolist() for batch in loader] == [[3, 1], [2]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_dataset_reaches_the_consumer(num_workers):
    class Broken(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 4:
                raise KeyError("no picture 4")
            return index

    iterator = DataLoader(Broken(), batch_size=2, shuffle=False, num_workers=num_workers).iterate(0)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="no picture 4"):
        next(iterator)
    iterator.close()


def test_by_hand_over_a_dataset(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=1)
    got = []
    while loader.has_next():
        got.append(loader.next())
    assert_equal(got, batches(random_dataset))
