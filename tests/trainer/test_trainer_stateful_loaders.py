"""A loader that keeps a state goes on from it through every door: the same bytes, and nothing is read again."""

import random
import tempfile
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, IterableDataset

from etude import BasicTrainingLoop, Callback, Trainer, TrainingLoop

SAMPLES, BATCH, EPOCHS = 20, 4, 2
STEPS = SAMPLES // BATCH


class Rows:
    """Samples, counted as they are read."""

    reads = 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        Rows.reads += 1
        return np.random.default_rng(int(index)).normal(size=4).astype(np.float32), int(index) % 2

    def __repr__(self):
        return "Rows"


def batch_of(indices):
    rows = [Rows()[index] for index in indices]
    return torch.tensor(np.stack([x for x, _ in rows])), torch.tensor([y for _, y in rows])


class OnLoader:
    """As torchdata's StatefulDataLoader: the loader keeps the state, and shuffles with torch's generator."""

    def __init__(self):
        self.start, self.place = None, None

    def __iter__(self):
        start, self.start = self.start, None
        self.place = {"order": torch.randperm(SAMPLES).tolist(), "number": 0} if start is None else dict(start)
        while self.place["number"] < STEPS:
            first = BATCH * self.place["number"]
            self.place["number"] += 1
            yield batch_of(self.place["order"][first : first + BATCH])

    def state_dict(self):
        return dict(self.place)

    def load_state_dict(self, state):
        self.start = state


class OnDataset(IterableDataset):
    """As Hugging Face's: the dataset keeps the state, and begins there in every iteration of the state's epoch."""

    def __init__(self):
        self.epoch, self.place, self.start = 0, {"index": 0, "epoch": 0}, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        goes_on = self.start is not None and self.start["epoch"] == self.epoch
        self.place = dict(self.start) if goes_on else {"index": 0, "epoch": self.epoch}
        order = np.random.default_rng(self.epoch).permutation(SAMPLES)
        while self.place["index"] < SAMPLES:
            self.place["index"] += 1
            yield Rows()[order[self.place["index"] - 1]]

    def state_dict(self):
        return dict(self.place)

    def load_state_dict(self, state):
        self.start = state


class OnIterator:
    """As grain's: the iterator keeps the state, in bytes."""

    def __iter__(self):
        return _Batches()


class _Batches:
    number = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == STEPS:
            raise StopIteration
        self.number += 1
        return batch_of(range(BATCH * (self.number - 1), BATCH * self.number))

    def get_state(self):
        return bytes([self.number, 255])

    def set_state(self, state):
        self.number, last = state
        assert last == 255


class CountsEpochs:
    """As litdata's StreamingDataLoader: an iteration is the next epoch, unless a state was loaded before the end."""

    def __init__(self):
        self.current_epoch, self.restore, self.number = 0, False, 0

    def __iter__(self):
        if not self.restore:
            self.current_epoch, self.number = self.current_epoch + 1, 0
        order = np.random.default_rng(self.current_epoch).permutation(SAMPLES)
        while self.number < STEPS:
            self.number += 1
            yield batch_of(order[BATCH * (self.number - 1) : BATCH * self.number])
        self.restore = False  # left as it is if the iteration is broken off

    def state_dict(self):
        return {"current_epoch": self.current_epoch, "number": self.number}

    def load_state_dict(self, state):
        self.current_epoch, self.number = state["current_epoch"], state["number"]
        self.restore = self.restore or 0 < self.number < STEPS


def torchdata():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True)


def _tensors(rows):
    return torch.stack([torch.as_tensor(row["x"]) for row in rows]), torch.tensor([int(row["y"]) for row in rows])


def _generate(shards):
    for shard in shards:
        for index in range(BATCH * shard, BATCH * (shard + 1)):
            x, y = Rows()[index]
            yield {"x": x.tolist(), "y": y}


def hugging_face(**options):
    datasets = pytest.importorskip("datasets")
    data = datasets.IterableDataset.from_generator(_generate, gen_kwargs={"shards": list(range(STEPS))})
    if options:
        data = data.map(lambda rows: {"x": [[2 * value for value in x] for x in rows["x"]]}, batched=True, **options)
    return TorchLoader(data, batch_size=BATCH, collate_fn=_tensors)


def grain_loader():
    grain = pytest.importorskip("grain.python")

    class Tensors(grain.MapTransform):
        def map(self, batch):
            return torch.as_tensor(batch[0]), torch.as_tensor(batch[1])

    sampler = grain.IndexSampler(SAMPLES, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(data_source=Rows(), sampler=sampler, operations=[grain.Batch(BATCH), Tensors()])


def grain_dataset():
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(Rows()).seed(3).shuffle().batch(BATCH)
    return data.map(lambda batch: (torch.as_tensor(batch[0]), torch.as_tensor(batch[1])))


@cache
def _chunks():
    writer = pytest.importorskip("litdata.streaming.writer")
    folder = tempfile.TemporaryDirectory()
    chunks = writer.BinaryWriter(folder.name, chunk_size=BATCH)
    for index in range(SAMPLES):
        chunks[index] = {"index": index}
    chunks.done()
    chunks.merge(1)
    return folder


def litdata():
    module = pytest.importorskip("litdata")
    data = module.StreamingDataset(_chunks().name, shuffle=True, seed=5)
    return module.StreamingDataLoader(data, batch_size=BATCH, collate_fn=_of_indices)


def _of_indices(rows):
    return batch_of([row["index"] for row in rows])


STAND_INS = {
    "loader": OnLoader,
    "dataset": lambda: TorchLoader(OnDataset(), batch_size=BATCH),
    "iterator": OnIterator,
    "counts epochs": CountsEpochs,
}
REAL = {
    "torchdata": torchdata,
    "hugging face": hugging_face,
    "hugging face mapped": lambda: hugging_face(batch_size=2),
    "grain loader": grain_loader,
    "grain dataset": grain_dataset,
    "litdata": litdata,
}


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_step_end(self, report):
        self.left -= 1
        if self.left == 0:
            self.control.request_stop("test")


class Parts:
    """A model with dropout and its optimizer."""

    def __init__(self, stop=None, saved=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.callbacks = [] if stop is None else [StopAt(stop)]
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def save(self, loop):
        return deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "loop": loop.state_dict()}
        )


def trainer(make, folder, stop=None, saved=None):
    parts = Parts(stop)
    options = {"callbacks": parts.callbacks, "output_dir": folder, "resume": saved is not None, "progress": False}
    Trainer(parts.model, make(), optimizer=parts.optimizer, config={"epochs": EPOCHS}, **options).train()
    return parts.model, folder


def basic(make, folder, stop=None, saved=None):
    parts = Parts(stop, saved)
    loop = BasicTrainingLoop(parts.model, parts.optimizer, callbacks=parts.callbacks, progress=False)
    if saved is not None:
        loop.load_state_dict(saved["loop"])
    loop.fit(make(), epochs=EPOCHS)
    return parts.model, parts.save(loop)


def by_epochs(make, folder, stop=None, saved=None, output_dir=None):
    parts, loader = Parts(stop, None if output_dir else saved), make()
    torch.manual_seed(1)
    loop = TrainingLoop(callbacks=parts.callbacks, progress=False, output_dir=output_dir)
    if saved is not None and output_dir is None:
        loop.load_state_dict(saved["loop"])
    elif saved is not None:
        loop.load_checkpoint(folder, parts.model, parts.optimizer)
    for epoch in range(loop.clock.epoch, EPOCHS):
        loop.train_epoch(parts.model, loader, parts.optimizer, epoch=epoch)
        if loop.should_stop:
            break
    return parts.model, parts.save(loop)


def by_epochs_in_a_folder(make, folder, stop=None, saved=None):
    return by_epochs(make, folder, stop, saved, output_dir=folder)


DOORS = [trainer, basic, by_epochs, by_epochs_in_a_folder]
REREAD = {"hugging face": BATCH, "hugging face mapped": BATCH, "grain loader": BATCH, "grain dataset": BATCH}
"""Samples that may be read besides: of a shard that is just ending, and by threads of the run before."""


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize(
    "name", [*STAND_INS, *(pytest.param(name, marks=pytest.mark.filterwarnings("ignore")) for name in REAL)]
)
def test_a_resumed_run_is_the_same_and_reads_nothing_again(tmp_path, name, door):
    make = {**STAND_INS, **REAL}[name]
    straight, _ = door(make, tmp_path / "straight")
    for stop in (3, STEPS, STEPS + 1):
        _, saved = door(make, tmp_path / str(stop), stop=stop)
        Rows.reads = 0
        random.random(), np.random.randn(), torch.rand(2)  # another program has drawn other numbers
        resumed, _ = door(make, tmp_path / str(stop), saved=saved)
        assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
        assert Rows.reads <= BATCH * (EPOCHS * STEPS - stop) + REREAD.get(name, 0)


@pytest.mark.parametrize("name", STAND_INS)
def test_every_fit_begins_at_the_beginning(name):
    """Also with a loader that another run has read, to its end or not."""
    loader, fresh = STAND_INS[name](), STAND_INS[name]
    for stop in (None, 3, None):
        parts, expected = Parts(stop), Parts(stop)
        for one, data in ((parts, loader), (expected, fresh())):
            BasicTrainingLoop(one.model, one.optimizer, callbacks=one.callbacks, progress=False).fit(data, epochs=2)
        assert all(map(torch.equal, parts.model.parameters(), expected.model.parameters()))


def test_a_state_that_has_not_been_used_yet_is_not_lost(tmp_path):
    _, saved = by_epochs(OnLoader, tmp_path, stop=3)
    parts = Parts(saved=saved)
    loop = TrainingLoop(progress=False)
    loop.load_state_dict(saved["loop"])
    assert parts.save(loop)["loop"]["data"]["source"] == saved["loop"]["data"]["source"]
