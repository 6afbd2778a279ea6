"""Settings of a run: values that torch or the machine could not bear are refused, the largest ones train."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.core import ConfigError
from etude.trainer.config import LARGEST

COUNTS = [
    "epochs",
    "max_steps",
    "batch_size",
    "log_interval",
    "validate_interval",
    "validate_every_steps",
    "checkpoint_interval",
    "save_every_steps",
    "keep_best",
    "grad_accum_steps",
    "max_skipped_steps",
]


def train(**settings: object) -> Trainer:
    data = (torch.randn(12, 3), torch.randint(0, 2, (12,)))
    config = {"max_steps": 2, "batch_size": 4, "device": "cpu", "train_metrics": False, **settings}
    trainer = Trainer(nn.Linear(3, 2), data, config=config, progress=False)
    if config["max_steps"] == 2:
        trainer.train()
    return trainer


@pytest.mark.parametrize("key", COUNTS)
def test_largest_count_trains_at_once(key):
    assert train(**{key: LARGEST}).state.clock.step == (0 if key == "max_steps" else 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, LARGEST + 1) for key in COUNTS),
        *((key, 10**5000) for key in COUNTS),
        ("num_threads", 100_000),
        ("num_workers", 100_000),
        ("prefetch", 10**9),
        ("prefetch_factor", 10**9),
        ("seed", 2**63),
        ("seed", -1),
        ("grad_accum_steps", {}),
        ("grad_accum_steps", {5: 1}),
        ("gradient_clip_norm", float("inf")),
        ("gradient_clip_norm", float("nan")),
        ("gradient_clip_norm", 10**400),
        ("learning_rate", float("inf")),
        ("weight_decay", float("inf")),
        ("loss_scale", float("inf")),
    ],
    ids=lambda value: str(value)[:20] if not isinstance(value, int) or value < 10**400 else "huge",
)
def test_value_that_cannot_be(key, value):
    with pytest.raises(ConfigError, match=key) as caught:
        train(**{key: value})
    assert len(str(caught.value)) < 300
