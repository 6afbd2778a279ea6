"""Samples per second of in-memory loaders on one thread: MNIST-shaped bytes in, normalised float32 out.

    python benchmarks/loader.py [--rounds 7] [--samples 60000] [--batch-size 64]

Every loader runs one epoch per round, in turn, so that all see the same machine. The speeds are those of the best
round; the ratios are medians over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

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


def seconds(epoch: Epoch) -> float:
    begin = time.perf_counter()
    for _ in epoch():
        pass
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of in-memory loaders on one thread.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (arguments.samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (arguments.samples,))
    loaders = make_loaders(images, labels, arguments.batch_size)
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for epoch in loaders.values():  # the first epoch starts workers and fills caches
        seconds(epoch)
    for _ in range(arguments.rounds):
        for name, epoch in loaders.items():
            times[name].append(seconds(epoch))
    num_batches = -(-arguments.samples // arguments.batch_size)
    base = times["etude DataLoader"]
    print(f"{arguments.samples} samples of 1x28x28 bytes, batches of {arguments.batch_size}, one thread")
    print(f"{'loader':34}{'samples/s':>12}{'µs/batch':>10}{'time, etude = 1':>17}")
    for name, values in times.items():
        best = min(values)
        ratio = statistics.median(value / reference for value, reference in zip(values, base, strict=True))
        print(f"{name:34}{arguments.samples / best:12,.0f}{best / num_batches * 1e6:10.1f}{ratio:17.2f}")


if __name__ == "__main__":
    main()
