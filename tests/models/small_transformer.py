"""A small transformer in float64 and tokens for it."""

import torch

from etude.models import CausalTransformerLM

VOCAB = 37


def make(seed=0, **arguments):
    """Return a small model in float64 whose weights are large enough for every part to matter."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 3,
        "dropout": 0.0,
        "max_len": 32,
        **arguments,
    }
    model = CausalTransformerLM(**settings).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def draw(*shape, seed=1, high=VOCAB):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
