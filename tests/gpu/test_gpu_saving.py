"""Saving in the background on a GPU: the copy is page-locked, reused, and of the moment of the save."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.checkpoint import read_checkpoint

pytestmark = pytest.mark.gpu


def test_files_are_those_of_a_plain_save(tmp_path):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    for background in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 2))
        config = {
            "epochs": 2,
            "batch_size": 8,
            "device": "cuda",
            "deterministic": True,
            "save_every_steps": 2,
            "keep_best": 99,
            "async_save": background,
        }
        data, folder = (x, (x.sum(1) > 0).long()), tmp_path / str(background)
        trainer = Trainer(model, data, config=config, output_dir=folder, progress=False)
        trainer.train()
    torch.use_deterministic_algorithms(False)
    copies = trainer.output._background._copies
    assert all(one.is_pinned() for name, one in copies.items() if "weight" in name and one.numel() > 1)
    names = sorted(path.name for path in (tmp_path / "False" / "checkpoints").glob("step-*"))
    assert len(names) == 8
    for name in names:
        plain, background = (read_checkpoint(tmp_path / str(one) / "checkpoints" / name) for one in (False, True))
        torch.testing.assert_close(plain.model_state, background.model_state, rtol=0, atol=0)
        torch.testing.assert_close(
            plain.state["optimizer"]["state"], background.state["optimizer"]["state"], rtol=0, atol=0
        )
