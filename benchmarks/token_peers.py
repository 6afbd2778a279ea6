"""Other loaders on the same token file, each written as its own documentation shows, for one thread.

Each is a function that prepares what it needs and returns batches without end: ids and labels (next tokens), (16, 1024)
of int64, in shuffled order.
"""

import contextlib
import io
import logging
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

LENGTH, BATCH_SIZE = 1024, 16
Batches = Iterator[Any]


@dataclass(frozen=True)
class Corpus:
    """A headerless file of uint16 tokens, and a folder for those who want them in a format of their own."""

    path: Path
    folder: Path
    converted_tokens: int
    """Tokens that are converted to other formats: the first ones of the file."""

    def mapped(self) -> NDArray[np.uint16]:
        """Return the tokens, mapped into memory, as a plain array: its slices cost less than those of a memmap."""
        return np.asarray(np.memmap(self.path, dtype=np.uint16, mode="r"))

    def touched(self) -> NDArray[np.uint16]:
        """Return the tokens with every page looked at once, so that the first visit to a page is not timed."""
        tokens = self.mapped()
        tokens[:: mmap.PAGESIZE // 2].sum()
        return tokens

    def converted(self) -> NDArray[np.uint16]:
        """Return blocks with the token after them, (n, LENGTH + 1), as other formats keep them."""
        return self.mapped()[: self.converted_tokens // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def quiet() -> None:
    """Keep warnings and progress bars of other libraries out of the way, and the libraries off the network."""
    warnings.simplefilter("ignore")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    for name in ("litdata", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def parted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and next tokens as int64."""
    blocks = blocks.long()
    return blocks[:, :-1], blocks[:, 1:]


def nanogpt(corpus: Corpus) -> Batches:
    """What `get_batch` of nanoGPT's train.py does: blocks from random places."""
    while True:
        data = np.memmap(corpus.path, dtype=np.uint16, mode="r")  # again for every batch, as it does
        places = torch.randint(len(data) - LENGTH, (BATCH_SIZE,))
        x = torch.stack([torch.from_numpy((data[i : i + LENGTH]).astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + LENGTH]).astype(np.int64)) for i in places])
        yield x, y


class MappedBlocks(Dataset[Tensor]):
    """A map-style dataset over a memory-mapped file; ids and labels are parted once a batch has been collated."""

    def __init__(self, corpus: Corpus) -> None:
        self.data = corpus.touched()
        self.size = (len(self.data) - 1) // LENGTH

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        start = index * LENGTH
        return torch.from_numpy(self.data[start : start + LENGTH + 1].astype(np.int64))


def torch_loader(corpus: Corpus, *, num_workers: int) -> Batches:
    loader = DataLoader(
        MappedBlocks(corpus), BATCH_SIZE, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    while True:
        yield from map(parted, loader)


class WholeBatches(MappedBlocks):
    """The same by a list of indices: one sample is one batch."""

    def __getitem__(self, indices: list[int]) -> Tensor:
        starts = [index * LENGTH for index in indices]
        return torch.from_numpy(
            np.stack([self.data[start : start + LENGTH + 1] for start in starts]).astype(np.int64)
        )


def torch_batches(corpus: Corpus) -> Batches:
    """A sampler that gives lists of indices, and no collating: what torch calls disabling automatic batching."""
    dataset = WholeBatches(corpus)
    sampler = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=False)
    loader: Any = DataLoader(dataset, sampler=sampler, batch_size=None)
    while True:
        yield from map(parted, loader)


def stateful(corpus: Corpus) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(MappedBlocks(corpus), BATCH_SIZE, shuffle=True)
    while True:
        yield from map(parted, loader)


def shuffled_state(corpus: Corpus) -> Callable[[], Any]:
    """Read half an epoch with a StatefulDataLoader; return what reads the batch after it with another one."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    first: Any = StatefulDataLoader(MappedBlocks(corpus), BATCH_SIZE, shuffle=True)
    for _ in islice(first, len(first) // 2):
        pass
    state, second = first.state_dict(), StatefulDataLoader(MappedBlocks(corpus), BATCH_SIZE, shuffle=True)

    def resume() -> Any:
        second.load_state_dict(state)
        return next(iter(second))

    return resume


def litdata(corpus: Corpus) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    folder = corpus.folder / "litdata"
    pieces = np.array_split(np.arange(len(corpus.converted())), max(1, corpus.converted_tokens // 2**22))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        optimize(
            partial(_tokens_of, corpus),
            [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces],
            str(folder),
            chunk_size=8 * 2**20 // (LENGTH + 1) * (LENGTH + 1),  # 16 MB
            item_loader=TokensLoader(),
            num_workers=1,
            verbose=False,
        )
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=0, drop_last=True)
    while True:
        yield from map(parted, loader)


def _tokens_of(corpus: Corpus, span: tuple[int, int]) -> Iterator[Tensor]:
    yield torch.from_numpy(corpus.converted()[span[0] : span[1]].reshape(-1).astype(np.uint16))


def hugging_face(corpus: Corpus) -> Batches:
    """An Arrow table on disk; whole batches are asked for, as the guide for use with PyTorch advises."""
    import datasets
    import pyarrow

    folder = corpus.folder / "arrow"
    tokens = pyarrow.array(corpus.converted().reshape(-1))
    blocks = pyarrow.FixedSizeListArray.from_arrays(tokens, LENGTH + 1)
    with contextlib.redirect_stderr(io.StringIO()):
        datasets.Dataset(pyarrow.table({"input_ids": blocks})).save_to_disk(str(folder))
    dataset: Any = datasets.load_from_disk(str(folder)).with_format("numpy")
    for _ in dataset.iter(1000):  # touches every page
        pass
    batches = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=True)
    loader: Any = DataLoader(dataset, sampler=batches, batch_size=None)
    while True:
        for batch in loader:
            yield parted(batch["input_ids"])


class BlockSource:
    """A random-access source for grain."""

    def __init__(self, corpus: Corpus) -> None:
        self.data = corpus.touched()

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        start = index * LENGTH
        return self.data[start : start + LENGTH + 1].astype(np.int64)


def grain(corpus: Corpus) -> Batches:
    import grain

    blocks = grain.MapDataset.source(BlockSource(corpus)).seed(0).shuffle().repeat().batch(BATCH_SIZE)
    for batch in blocks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)):
        yield parted(torch.from_numpy(batch))


@dataclass(frozen=True)
class Peer:
    name: str
    batches: Callable[[Corpus], Batches]
    needs: tuple[str, ...] = ()
    converts: bool = False
    """Whether it reads a format of its own."""


PEERS = (
    Peer("torch DataLoader, 0 workers", partial(torch_loader, num_workers=0)),
    Peer("torch DataLoader, whole batches", torch_batches),
    Peer("torch DataLoader, 2 workers", partial(torch_loader, num_workers=2)),
    Peer("StatefulDataLoader", stateful, ("torchdata",)),
    Peer("litdata", litdata, ("litdata",), converts=True),
    Peer("HF datasets", hugging_face, ("datasets",), converts=True),
    Peer("nanoGPT's get_batch", nanogpt),
    Peer("grain", grain, ("grain",)),
)
