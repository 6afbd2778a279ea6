"""A small vocabulary of three modalities, and codebooks for it."""

import pytest
import torch

from etude import build_vocab_spec


@pytest.fixture
def vocab():
    return build_vocab_spec(v_image=12, v_scalar=8, v_spectra=10)


@pytest.fixture
def codebooks():
    draw = torch.Generator().manual_seed(5)
    return {
        "image": torch.randn(12, 3, generator=draw),
        "scalar": torch.linspace(-2, 2, 8),
        "spectrum": torch.randn(10, 4, generator=draw),
    }
