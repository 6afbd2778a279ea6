"""The argument `parallel` of a `Trainer`, on one process."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.core import ConfigError

DATA = torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)


def make(parallel):
    return Trainer(nn.Linear(3, 2), DATA, config={"epochs": 1, "device": "cpu"}, parallel=parallel, progress=False)


@pytest.mark.parametrize(("parallel", "warns"), [("fsdp", True), ("ddp", False), ("auto", False), (None, False)])
def test_a_model_that_one_process_cannot_divide_is_noticed(parallel, warns, caplog):
    make(parallel).train()
    assert ("the model is not divided" in caplog.text) == warns


@pytest.mark.parametrize("parallel", ["fdsp", {"shard": 2}, {"shards": 1}, {"tensor": 0}, {"cpu_offload": True}, 3])
def test_mistakes_are_refused(parallel):
    with pytest.raises(ConfigError, match="parallel"):
        make(parallel)
