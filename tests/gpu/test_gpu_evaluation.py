"""On a CUDA device: evaluations whose batches are CUDA graphs give the numbers of usual ones."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.data import DataLoader, Normalize

pytestmark = [pytest.mark.gpu]


def net(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 10)
    )


def data(samples=333, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 255, (samples, 1, 8, 8), generator=generator).to(dtype)
    return x, torch.randint(10, (samples,), generator=generator)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_of_captured_evaluations(precision):
    found = {}
    for capture in ("on", "off"):
        config = {"epochs": 4, "batch_size": 16, "capture": capture, "precision": precision, "deterministic": True}
        trainer = Trainer(net(), data(), data(90), config=config, progress=False)
        trainer.train()
        found[capture] = [trainer.evaluate()]
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.mul_(0.5)
        found[capture].append(trainer.evaluate())
        if capture == "on":
            assert trainer.machine.evaluation.refused is None
            assert len(trainer.machine.evaluation._graphs) == 2  # whole batches, and the last one
    for one, other in zip(found["on"], found["off"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch_size", [7, 64])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_batches_that_travel_together_are_those_that_travel_alone(batch_size, prefetch, place):
    x, y = (one.to(place) for one in data(1000, torch.uint8))
    options = {"transform": Normalize(0.1, 0.3), "device": "cuda", "prefetch": prefetch}
    for position in (0, 5 * batch_size):
        together = DataLoader(x, y, batch_size, **options)
        alone = DataLoader(x, y, batch_size, **options)
        alone._source.samples.source.chunk_bytes = 0
        batches = list(zip(together.iterate(1, position), alone.iterate(1, position), strict=True))
        assert len(batches) > 10
        for one, other in batches:
            assert one.data.is_cuda
            assert torch.equal(one.data, other.data)
            assert torch.equal(one.labels, other.labels)
            assert one.data.data_ptr() % 256 == one.labels.data_ptr() % 256 == 0
