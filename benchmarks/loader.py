"""Samples per second of loaders on one thread: MNIST-shaped bytes in memory, and map-style datasets.

    python benchmarks/loader.py [--rounds 7] [--samples 60000] [--batch-size 64]

Every loader runs one epoch per round, in turn, so that all see the same machine. The speeds are those of the best
round; the ratios are medians over the rounds. Where Hugging Face's `datasets` is installed, one of those is read too.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset, TensorDataset

from etude.data import DataLoader, Normalize

MEAN, STD = 0.1307, 0.3081
Epoch = Callable[[], Iterator[Any]]


def make_loaders(images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> dict[str, Epoch]:
    normalize = Normalize(MEAN, STD)
    etude = DataLoader(images, labels, batch_size, transform=normalize)
    etude_prefetch = DataLoader(images, labels, batch_size, transform=normalize, prefetch=2)
    dataset = TensorDataset(images, labels)

    def by_hand() -> Iterator[Any]:
        for index in torch.randperm(len(images)).split(batch_size):
            yield images[index].float().div_(255).sub_(MEAN).div_(STD), labels[index]

    def torch_loader(num_workers: int) -> Epoch:
        loader = TorchLoader(
            dataset, batch_size, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
        )

        def epoch() -> Iterator[Any]:
            for data, target in loader:
                yield data.float().div_(255).sub_(MEAN).div_(STD), target

        return epoch

    return {
        "etude DataLoader": lambda: iter(etude),
        "etude DataLoader, prefetch=2": lambda: iter(etude_prefetch),
        "hand-written randperm and index": by_hand,
        "torch DataLoader, 0 workers": torch_loader(0),
        "torch DataLoader, 2 workers": torch_loader(2),
    }


class Pictures(Dataset[Any]):
    """An ordinary dataset: one picture and its label at a time."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, noise: float = 0) -> None:
        self.images, self.labels, self.noise = images, labels.tolist(), noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        return (image + self.noise * torch.randn(1) if self.noise else image), self.labels[index]


def make_datasets(images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Return map-style datasets; the samples of the last draw random numbers."""
    small = images[:, 0, :4, :4].contiguous()
    found = {"pictures": Pictures(small, labels)}
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        columns = {"image": small.flatten(1).tolist(), "label": labels.tolist()}
        found["Hugging Face"] = datasets.Dataset.from_dict(columns)
    return {**found, "pictures and noise": Pictures(small, labels, noise=0.1)}


def dataset_loaders(dataset: Any, batch_size: int, num_workers: int) -> dict[str, Epoch]:
    options: Any = {"batch_size": batch_size, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    etude, by_torch = DataLoader(dataset, **options), TorchLoader(dataset, shuffle=True, **options)
    return {
        f"etude DataLoader, {num_workers} workers": lambda: iter(etude),
        "torch DataLoader": lambda: iter(by_torch),
    }


def seconds(epoch: Epoch) -> float:
    begin = time.perf_counter()
    for _ in epoch():
        pass
    return time.perf_counter() - begin


def race(loaders: dict[str, Epoch], rounds: int, samples: int, batch_size: int) -> None:
    """Print one row for each loader; the first is the one that the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for epoch in loaders.values():  # the first epoch starts workers and fills caches
        seconds(epoch)
    for _ in range(rounds):
        for name, epoch in loaders.items():
            times[name].append(seconds(epoch))
    num_batches = -(-samples // batch_size)
    base = next(iter(times.values()))
    print(f"{'loader':34}{'samples/s':>12}{'µs/batch':>10}{'time, etude = 1':>17}")
    for name, values in times.items():
        best = min(values)
        ratio = statistics.median(value / reference for value, reference in zip(values, base, strict=True))
        print(f"{name:34}{samples / best:12,.0f}{best / num_batches * 1e6:10.1f}{ratio:17.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of loaders on one thread.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (arguments.samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (arguments.samples,))
    sizes = arguments.rounds, arguments.samples, arguments.batch_size
    print(f"{arguments.samples} samples of 1x28x28 bytes, batches of {arguments.batch_size}, one thread")
    race(make_loaders(images, labels, arguments.batch_size), *sizes)
    for name, dataset in make_datasets(images, labels).items():
        for num_workers in (0, 2):
            print(f"\ndataset: {name}")
            race(dataset_loaders(dataset, arguments.batch_size, num_workers), *sizes)


if __name__ == "__main__":
    main()
