"""Every argument of `DataLoader` and `DataLoaderFactory` acts, is refused, or is documented to have no effect."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from etude import DataLoaderFactory, TrainerConfig
from etude.core import DataError
from etude.data import DataLoader
from etude.data.sources import samples

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with few cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12 on
]
DATA = torch.arange(10)


class Who(Dataset):
    """Samples that say in which process they were made."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, -1 if get_worker_info() is None else get_worker_info().id


class Long:
    """Makes its own batches, and knows how long its samples are."""

    def __len__(self):
        return 10

    def gather(self, indices, *, epoch, seed):
        return {"x": torch.from_numpy(indices)}

    def lengths(self, indices):
        return indices % 5


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def read(data=DATA, **options):
    loader = DataLoader(data, **{"batch_size": 4, "shuffle": False, **options})
    return [batch.data.tolist() if hasattr(batch, "data") else batch for batch in loader.iterate(0)]


def processes(**options):
    return {int(who) for _, whos in read(Who(), **options) for who in whos}


ACT = {
    "data": lambda: read(DATA + 1) != read(),
    "labels": lambda: next(iter(DataLoader(DATA, DATA, 4))).labels is not None,
    "batch_size": lambda: len(read(batch_size=5)) == 2,
    "shuffle": lambda: read(shuffle=True) != read(),
    "drop_last": lambda: len(read(drop_last=True)) == 2,
    "prefetch": lambda: read(prefetch=2) == read(),  # only sooner
    "seed": lambda: read(shuffle=True, seed=1) != read(shuffle=True, seed=2),
    "bucket_batches": lambda: str(read(Long(), bucket_batches=2)) != str(read(Long())),
    "transform": lambda: read(transform=lambda x: -x)[0] == [0, -1, -2, -3],
    "device": lambda: next(iter(DataLoader(DATA, device="meta"))).data.device.type == "meta",
    "pin_memory": lambda: read(pin_memory=True) == read(),  # documented: no effect without CUDA
    "num_workers": lambda: processes(num_workers=2) == {0, 1},
    "persistent_workers": lambda: processes(num_workers=1, persistent_workers=True) == {0},
    "prefetch_factor": lambda: processes(num_workers=1, prefetch_factor=3) == {0},
    "collate_fn": lambda: read(Who(), collate_fn=len) == [4, 4, 2],
    "rank": lambda: read(rank=1, world_size=2)[0] == [2, 3],
    "world_size": lambda: read(world_size=2)[0] == [0, 1],
}
REFUSED = {
    "workers' settings without workers": (Who(), {"persistent_workers": True}, "persistent_workers.*num_workers"),
    "read ahead without workers": (Who(), {"prefetch_factor": 2}, "prefetch_factor.*num_workers"),
    "no batch ahead": (Who(), {"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
    "shuffling what has no order": (Endless(), {"shuffle": True}, "IterableDataset"),
    "labels of a dataset": (Who(), {"labels": DATA}, "labels"),
    "collating tensors": (DATA, {"collate_fn": len}, "collate_fn"),
    "buckets of tensors": (DATA, {"bucket_batches": 2}, "bucket_batches"),
    "negative": (DATA, {"prefetch": -1}, "prefetch is -1"),
}


def test_the_walk_leaves_no_argument_out():
    assert set(inspect.signature(DataLoader).parameters) == set(ACT)
    assert {field.name for field in fields(DataLoaderFactory)} <= set(ACT)


@pytest.mark.parametrize("name", ACT)
def test_an_argument_acts(name):
    assert ACT[name]()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_act_is_refused(case):
    data, options, words = REFUSED[case]
    with pytest.raises(DataError, match=words):
        DataLoader(data, batch_size=4, **options)


@pytest.mark.parametrize("training", [True, False])
def test_a_factory_of_the_default_config_makes_loaders(training):
    factory = DataLoaderFactory.from_config(TrainerConfig(batch_size=4, drop_last=True, seed=3))
    loader = factory.create((DATA, DATA), training=training)
    seen = [index for batch in loader.iterate(0) for index in batch.data.tolist()]
    assert len(seen) == (8 if training else 10)
    assert (seen == list(range(10))) == (not training)


def test_workers_for_tensors_are_said_to_do_nothing(caplog):
    samples.say_unused.cache_clear()
    for _ in range(2):
        assert len(list(DataLoader(torch.zeros(6, 2), batch_size=3, num_workers=2))) == 2
    (record,) = caplog.records
    assert "num_workers is 2" in record.getMessage()
    caplog.clear()
    list(DataLoader([torch.zeros(2)] * 6, batch_size=3))
    samples.say_unused.cache_clear()
    list(DataLoader(torch.zeros(6, 2), batch_size=3, shuffle=False, num_workers=2))  # validation beside a training
    assert not caplog.records
