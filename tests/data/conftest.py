"""Small stand-ins for real data: idx files, text files, a dataset that draws random numbers; child processes."""

import gzip
import hashlib
import multiprocessing
import random
import struct

import numpy as np
import pytest
import torch

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array):
    """The idx file of a uint8 array."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


class IdxData:
    """Four small arrays like MNIST's, their idx files and the checksums of these."""

    def __init__(self, num_train=20, num_test=8):
        source = np.random.default_rng(0)
        self.arrays = {}
        for prefix, count in (("train", num_train), ("t10k", num_test)):
            images = source.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            self.arrays[f"{prefix}-images-idx3-ubyte"] = images
            self.arrays[f"{prefix}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) % 10
        self.raw = {name: idx_bytes(self.arrays[name]) for name in NAMES}
        self.files = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.raw.items()}

    def write(self, folder, *, packed=False, names=NAMES):
        """Write the files, or their .gz, into a folder and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(self.raw[name]))
            else:
                (folder / name).write_bytes(self.raw[name])
        return folder


@pytest.fixture
def idx_data():
    return IdxData()


class RandomDataset(torch.utils.data.Dataset):
    """Sample i is i with one number from each global generator, as a random augmentation would draw them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = [random.random(), np.random.random(), torch.rand(()).item()]
        return torch.tensor([float(index), *noise], dtype=torch.float64), index % 3


@pytest.fixture
def random_dataset():
    return RandomDataset(22)


@pytest.fixture
def in_child():
    """Run a function in a forked process: its exit code, and what it returned (None if it did not come to that)."""
    context = multiprocessing.get_context("fork")

    def run(function, *arguments):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(function(*arguments)))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = None
        process.join()
        receiver.close()
        return process.exitcode, result

    return run


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def write(content, name="d.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
        return str(path)

    return write
