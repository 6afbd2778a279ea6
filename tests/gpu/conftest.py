"""Shared by the tests on a CUDA device: waiting for it can be made an error."""

import pytest
import torch


@pytest.fixture
def no_waiting():
    """Within the test, switching this on makes any wait for the device an error."""

    def switch(on):
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def undo_determinism():
    """After the test, torch may use any algorithm again."""
    yield
    torch.use_deterministic_algorithms(False)
