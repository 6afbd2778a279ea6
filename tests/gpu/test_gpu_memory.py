"""Real memory: steps that run out of it are done again in parts, sizes are found by trying, and nothing is left."""

import pytest
import torch
from torch import nn

from etude import Trainer

pytestmark = pytest.mark.gpu

MIB = 2**20


class Hungry(nn.Module):
    """Keeps 8 MiB of activations for every sample."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x):
        wide = x[:, None].expand(-1, 2 * MIB // 16, -1) * self.layers[0].weight[0]
        return self.layers(x) + 0 * wide.square().mean((1, 2))[:, None]


@pytest.fixture
def little_memory():
    """Within the test, torch may use 1 GiB."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1024 * MIB) / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def data(samples=512):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 16, generator=generator), torch.randint(3, (samples,), generator=generator)


def make(**config):
    settings = {"epochs": 2, "batch_size": 256, "device": "cuda", "precision": "fp32", "deterministic": False}
    return Trainer(Hungry(), data(), config={**settings, "compile": False, **config}, progress=False)


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.model.parameters()]).cpu()


@pytest.mark.parametrize("capture", ["off", "auto"])
def test_a_step_is_done_again(little_memory, capture):
    given = make(micro_batch_size=16, capture="off", epochs=8)
    given.train()
    split = make(on_out_of_memory="split", capture=capture, epochs=8)
    split.train()
    assert 1 <= split.step.splitter.size < 256
    torch.testing.assert_close(weights(split), weights(given), rtol=1e-3, atol=1e-5)


def test_sizes_are_found(little_memory):
    auto = make(batch_size="auto")
    assert 1 < auto.config.batch_size < 512
    auto.train()
    parts = make(micro_batch_size="auto")
    assert 1 < parts.config.micro_batch_size < 256
    parts.train()


def test_a_search_frees_its_memory(little_memory):
    before = torch.cuda.memory_allocated()
    trainer = make(micro_batch_size="auto")
    assert torch.cuda.memory_allocated() - before < 128 * MIB  # what cuBLAS keeps for itself
    assert not trainer.optimizer.state


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_find_lr_leaves_no_trace(precision):
    def trained(tested):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        config = {"epochs": 4, "batch_size": 64, "device": "cuda", "precision": precision, "compile": False}
        made = Trainer(model, data(), config=config, progress=False)
        for _ in range(2):
            if tested:
                made.find_lr(steps=40)
            made.train(num_epochs=2 if made.state.clock.epoch == 0 else 4)
        return weights(made)

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-4, atol=1e-6)
