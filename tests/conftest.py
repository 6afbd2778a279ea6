"""Shared by all tests: few threads, so that parallel processes do not fight over cores, and no deadlines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("etude", deadline=None)  # how fast a machine is says nothing about the code
hypothesis.settings.load_profile("etude")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
