"""One of several processes that share a CUDA device, by NCCL: trains alone, then with the others, and compares.

python gpu_ranks.py CASE, with the variables of a launcher.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from parallel_checks import compare, tokens

from etude import CausalTransformerLM
from etude.data import TensorData
from etude.optim import ScheduleFreeAdamW

ROWS = 26


def make_language() -> nn.Module:
    return CausalTransformerLM(vocab_size=24, d_model=16, n_layers=2, n_heads=2, max_len=8, dropout=0.0)


def make_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def text() -> TensorData:
    ids = tokens(ROWS)
    return TensorData({"input_ids": ids, "labels": ids})


def images() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return x, (x.mean((1, 2, 3)) > 0).long()


CASES = {
    "ddp": (make_conv, images, "ddp", {}, {}),
    "ddp, accumulation": (make_language, text, "ddp", {"grad_accum_steps": 2, "gradient_clip_norm": 0.5}, {}),
    "ddp, schedule-free": (make_conv, images, "ddp", {}, {"optimizer": lambda p: ScheduleFreeAdamW(p, lr=1e-3)}),
    "fsdp": (make_language, text, "fsdp", {"grad_accum_steps": 2, "gradient_clip_norm": 0.5}, {}),
    "fsdp, images": (make_conv, images, "fsdp", {}, {}),
    "fsdp, recomputed": (make_language, text, "fsdp", {"activation_checkpointing": True}, {}),
    "fsdp, compiled": (make_language, text, "fsdp", {"compile": True}, {}),
    "tensor": (make_language, text, {"tensor": 2}, {"grad_accum_steps": 2, "gradient_clip_norm": 0.5}, {}),
    "tensor, compiled": (make_language, text, {"tensor": 2}, {"compile": True}, {}),
    "ddp, compiled": (make_language, text, "ddp", {"compile": True}, {}),
    "ddp, tensor": (make_language, text, {"data": 2, "tensor": 2}, {"gradient_clip_norm": 0.5}, {}),
    "fsdp, tensor": (make_language, text, {"shard": 2, "tensor": 2}, {"gradient_clip_norm": 0.5}, {}),
    "offload": (make_language, text, {"shard": 2, "cpu_offload": True}, {"gradient_clip_norm": 0.5}, {}),
}

RANKS = dict.fromkeys(CASES, 2) | {"ddp, tensor": 4, "fsdp, tensor": 4}
"""Processes of each case."""


def main(case: str) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    make, data, parallel, config, more = CASES[case]
    settings = {"device": "cuda", "deterministic": True, "precision": "fp32", **config}
    compare(make, data(), parallel, config=settings, **more)


if __name__ == "__main__":
    main(sys.argv[1])
