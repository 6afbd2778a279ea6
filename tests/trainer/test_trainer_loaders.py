"""What users have their data in becomes batches, and says how many steps a run has."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, DistributedSampler, TensorDataset

from etude import DataLoader
from etude.core import ConfigError, DataError
from etude.distributed import World
from etude.trainer import TrainerConfig
from etude.trainer.changed_loaders import DeviceLoader
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine

X = torch.arange(24.0).reshape(12, 2)
Y = torch.arange(12)


def loaders(train=None, validation=None, *, machine=None, model=None, **config):
    machine = machine if machine is not None else Machine("cpu")
    return Loaders(train, validation, config=TrainerConfig(**config), machine=machine, model=model)


def samples(loader, epoch=0):
    return [int(label) for batch in loader.iterate(epoch) for label in batch[1]]


class Rows:
    """A map-style dataset as those of Hugging Face: not of torch's class, but with its `__getitems__`."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


SOURCES = {
    "pair": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "dataset": lambda: TensorDataset(X, Y),
    "dataset of another library": Rows,
    "etude loader": lambda: DataLoader(X, Y, 4),
    "torch loader": lambda: TorchDataLoader(TensorDataset(X, Y), batch_size=4),
    "list of batches": lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_gives_every_sample_once_in_training_and_validation(source):
    made = loaders(source(), source(), batch_size=4)
    assert sorted(samples(made.train)) == sorted(samples(made.validation)) == list(range(12))
    assert made.num_batches == 3


def test_data_is_shuffled_for_training_only_and_the_seed_says_how():
    one, same, other = (loaders((X, Y), (X, Y), batch_size=4, seed=seed) for seed in (1, 1, 2))
    assert samples(one.train) == samples(same.train) != samples(other.train)
    assert samples(one.train, epoch=0) != samples(one.train, epoch=1)
    assert samples(one.validation) == list(range(12))


@given(
    batches=st.integers(1, 50),
    micro=st.integers(1, 7),
    epochs=st.integers(1, 9),
    most=st.none() | st.integers(1, 400),
)
def test_the_steps_of_a_run_are_those_that_counting_gives(batches, micro, epochs, most):
    source = [(X[:1], Y[:1])] * batches
    config = {"epochs": epochs, "max_steps": most, "grad_accum_steps": micro}
    made = loaders(source, **config)
    per_epoch = len(range(0, batches, micro))
    assert made.steps_per_epoch == per_epoch
    assert made.total_steps(TrainerConfig(**config)) == min(per_epoch * epochs, most or per_epoch * epochs)


def test_a_source_without_a_length_has_steps_only_if_max_steps_says_so():
    made = loaders(iter([(X, Y)]))
    assert made.num_batches is None
    assert made.steps_per_epoch is None
    assert made.total_steps(TrainerConfig(epochs=2)) is None
    assert made.total_steps(TrainerConfig(max_steps=7)) == 7


def test_arrays_get_the_number_format_of_the_model():
    made = loaders((X.numpy().astype("float64"), Y.numpy()), batch_size=4, model=nn.Linear(2, 2).to(torch.bfloat16))
    batch = next(iter(made.train.iterate(0)))
    assert (batch[0].dtype, batch[1].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(DataError, match="train_loader"):
        loaders(np.array(["a", "b"]))


@pytest.mark.parametrize(("place", "name"), [((3,), "train_loader"), ((None, 3), "val_loader")])
def test_an_error_names_the_argument(place, name):
    with pytest.raises((ConfigError, DataError), match=name):
        loaders(*place)
    with pytest.raises((ConfigError, DataError), match="my_data"):
        Loaders(
            *place, config=TrainerConfig(), machine=Machine("cpu"), names=("my_data", "my_data")
        )  # the names of another door


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"batch_size": 6}, ["batch_size"]),
        ({"batch_size": 4, "drop_last": True}, ["drop_last"]),
        ({"num_workers": 2, "batch_size": 8}, ["batch_size", "num_workers"]),
        ({"batch_size": 4}, []),
        ({}, []),
    ],
    ids=str,
)
def test_settings_that_a_given_loader_keeps_are_warned_of(settings, warned, caplog):
    with caplog.at_level(logging.WARNING, logger="etude"):
        loaders(TorchDataLoader(TensorDataset(X, Y), batch_size=4), **settings)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(warned)
    assert all(f"training.{name}" in line for name, line in zip(warned, found, strict=True))


@pytest.mark.parametrize("setting", [{"pin_memory": False}, {"persistent_workers": True}, {"prefetch_factor": 3}])
def test_how_a_torch_loader_loads_is_its_own_business(setting, caplog):
    workers = {"num_workers": 1, "pin_memory": True, "prefetch_factor": 2}
    with caplog.at_level(logging.WARNING, logger="etude"):
        loaders(TorchDataLoader(TensorDataset(X, Y), batch_size=4, **workers), **setting)
    assert [f"training.{name}" in caplog.text for name in setting] == [True]


@pytest.mark.parametrize("setting", ["validate_interval", "validate_every_steps", "keep_best"])
def test_settings_of_a_validation_that_there_is_not_are_warned_of(setting, caplog):
    with caplog.at_level(logging.WARNING, logger="etude"):
        loaders((X, Y), (X, Y), **{setting: 2})  # there is one
        loaders((X, Y))  # the defaults ask for nothing
        loaders(None, None, **{setting: 2})  # nothing is trained
        assert not caplog.records
        loaders((X, Y), **{setting: 2})
    assert f"training.{setting}" in caplog.text


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("source", [lambda: (X, Y), lambda: TensorDataset(X, Y), lambda: DataLoader(X, Y, 6)])
def test_processes_share_the_samples_of_every_batch(size, source):
    shares = [
        samples(loaders(source(), batch_size=6, machine=Machine("cpu", world=World(rank, size))).train)
        for rank in range(size)
    ]
    assert sorted(sample for share in shares for sample in share) == list(range(12))


def test_a_torch_loader_that_gives_every_process_everything_is_refused():
    machine = Machine("cpu", world=World(0, 2))
    dataset = TensorDataset(X, Y)
    with pytest.raises(ConfigError, match=r"train_loader.*DistributedSampler"):
        loaders(TorchDataLoader(dataset, batch_size=2), machine=machine)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    assert len(samples(loaders(TorchDataLoader(dataset, batch_size=2, sampler=sampler), machine=machine).train)) == 6


@pytest.mark.parametrize(("size", "rank", "warned"), [(2, 0, True), (2, 1, False), (1, 0, False)])
def test_a_torch_loader_that_every_process_evaluates_is_warned_of_once(size, rank, warned, caplog):
    """A confusion matrix has every sample twice."""
    dataset, machine = TensorDataset(X, Y), Machine("cpu", world=World(rank, size))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
    loaders(None, TorchDataLoader(dataset, batch_size=2, sampler=sampler), machine=machine)
    assert not caplog.records
    loaders(None, TorchDataLoader(dataset, batch_size=2), machine=machine)
    assert ("counts" in caplog.text) == warned


def test_fewer_samples_than_processes_in_a_batch_are_refused():
    with pytest.raises(ConfigError, match="batch_size"):
        loaders(DataLoader(X, Y, 2), machine=Machine("cpu", world=World(0, 3)))


def test_what_is_read_is_the_inner_loader_wherever_its_batches_go():
    made = loaders(DataLoader(X, Y, 4))
    assert made.sources == (made.train, None)
    inner = made.train
    made.train = DeviceLoader(inner, torch.device("cpu"))
    assert made.sources[0] is inner
    assert samples(made.train) == samples(inner)
    assert len(made.train) == len(inner)
