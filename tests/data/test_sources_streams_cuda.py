"""Streams delivered to a CUDA device: the same batches as on the CPU."""

import pytest
import torch
from token_samples import numbered, opened_documents

from etude.core.batch import JointBatch
from etude.data import StreamLoader, TensorData, TokenBlocks

pytestmark = pytest.mark.gpu


def data():
    images = torch.arange(60).reshape(20, 3)
    return {
        "images": TensorData(images, torch.arange(20), lambda data: data * 2),
        "text": TokenBlocks(opened_documents(numbered([50, 70])), 8),
        "samples": [(torch.tensor([float(i)]), i) for i in range(12)],
        "there": torch.arange(15, device="cuda"),
    }


@pytest.mark.parametrize("draw", ["alternate", "together"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("pin_memory", [None, False])
@pytest.mark.parametrize("names", [("images", "text", "samples", "there"), ("images", "text")])
def test_batches_on_the_device_are_those_on_the_cpu(draw, prefetch, pin_memory, names):
    chosen = {name: data()[name] for name in names}
    wanted = StreamLoader(chosen, 8, draw=draw)
    found = StreamLoader(chosen, 8, draw=draw, prefetch=prefetch, pin_memory=pin_memory, device="cuda")
    for epoch, position in ((0, 0), (2, 8)):
        for one, other in zip(found.iterate(epoch, position), wanted.iterate(epoch, position), strict=True):
            pairs = zip(one, other, strict=True) if isinstance(one, JointBatch) else [(one, other)]
            for mine, expected in pairs:
                assert mine.keys() == expected.keys()
                assert mine["stream"] == expected["stream"]
                for key in mine.keys() - {"stream"}:
                    assert mine[key].is_cuda
                    assert torch.equal(mine[key].cpu(), expected[key].cpu())
