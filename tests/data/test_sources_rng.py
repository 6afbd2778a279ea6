"""Generators that data keeps: wherever they are kept, an epoch does not depend on what was read before it."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset, Subset, default_collate

from etude.data import DataLoader, as_loader
from etude.data.sources.rng import owned_generators, seed_owned

SAMPLES, BATCH = 12, 4
KINDS = {
    "python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy_old": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


class Noise:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, value: Any) -> Any:
        return value + draw(self.generator)


class Numbers(Dataset):
    def __init__(self, transforms: Any = ()) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        value = float(index)
        for transform in self.transforms:
            value = transform(value)
        return value


class Direct(Numbers):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def __getitem__(self, index: int) -> float:
        return index + draw(self.generator)


def collate(noise: Noise, samples: list[float]) -> torch.Tensor:
    return noise(default_collate(samples))


PLACES = {
    "attribute": lambda g: {"dataset": Direct(g)},
    "subset": lambda g: {"dataset": Subset(Direct(g), range(SAMPLES))},
    "transform": lambda g: {"dataset": Numbers([lambda x: x, Noise(g)])},
    "method": lambda g: {"dataset": Numbers((Noise(g).__call__,))},
    "closure": lambda g: {"dataset": Numbers((lambda x: x + draw(g),))},
    "collate": lambda g: {"dataset": Numbers(), "collate_fn": functools.partial(collate, Noise(g))},
}
LOADERS = {
    "etude": lambda dataset, **more: DataLoader(dataset, batch_size=BATCH, **more),
    "torch": lambda dataset, **more: as_loader(TorchLoader(dataset, BATCH, shuffle=True, **more)),
}


def batches(loader: Any, epoch: int, position: int = 0) -> list[list[float]]:
    return [batch.tolist() for batch in loader.iterate(epoch, position)]


def assert_epochs_are_their_own(make: Any) -> None:
    straight = make()
    epochs = [batches(straight, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1]
    resumed = make()
    assert batches(resumed, 1, BATCH) == epochs[1][1:]
    assert batches(resumed, 2) == epochs[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_is_the_same_after_others_and_alone(loader, place, kind):
    assert_epochs_are_their_own(lambda: LOADERS[loader](**PLACES[place](KINDS[kind]())))


@pytest.mark.parametrize("place", ["transform", "collate"])
@pytest.mark.parametrize("loader", LOADERS)
def test_in_persistent_workers_too(loader, place):
    def make():
        return LOADERS[loader](**PLACES[place](KINDS["numpy"]()), num_workers=1, persistent_workers=True)

    assert_epochs_are_their_own(make)


def test_samples_of_a_dataset_do_not_depend_on_the_number_of_workers():
    loaders = [LOADERS["etude"](**PLACES["transform"](KINDS["numpy"]()), num_workers=n) for n in (0, 2)]
    assert batches(loaders[0], 1) == batches(loaders[1], 1)


def test_generators_of_one_kind_draw_different_numbers():
    one, two, other = np.random.default_rng(), np.random.default_rng(), random.Random()
    seed_owned([one, two, other], 5)
    assert one.random() != two.random()
    assert other.random() == random.Random(5).random()


def test_the_nearest_come_first_and_long_lists_are_left_alone():
    far, near = random.Random(1), random.Random(2)
    owner = Numbers([Noise(far)])
    owner.generator, owner.itself = near, owner
    owner.samples = [Noise(random.Random(3))] * 1000
    assert owned_generators(owner) == [near, far]
