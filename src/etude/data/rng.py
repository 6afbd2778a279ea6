"""Seeding the global generators for a moment, and giving the caller's own state back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator (about 10 µs: cheap enough for every sample)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever is drawn inside leaves Python's, NumPy's and torch's CPU generator as they were.

    >>> _ = torch.manual_seed(1); expected = torch.rand(1); _ = torch.manual_seed(1)
    >>> with preserved_rng():
    ...     seed_generators(5); _ = torch.rand(1)
    >>> bool(torch.rand(1) == expected)
    True
    """
    python, numpy, tensor = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(tensor)
