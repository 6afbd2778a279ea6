"""Sharded parameters (DTensor) over two processes: the same norm, clipping and update as whole ones."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from etude.optim import AdamW, clip_gradients
from etude.optim.optimizers import choose_kernel

pytestmark = pytest.mark.distributed


def check_rank(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = [nn.Parameter(torch.arange(12.0).view(6, 2) - 5), nn.Parameter(torch.linspace(-1, 1, 7))]
        parts = [nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])) for param in whole]
        assert choose_kernel(parts) == "fused"
        assert choose_kernel([parts[0], whole[1]]) == "loop"
        optimizers = AdamW(whole, lr=0.1), AdamW(parts, lr=0.1)
        for step in range(3):
            for full, part in zip(whole, parts, strict=True):
                full.grad = torch.sin(full.detach() + step) * 10
                part.grad = distribute_tensor(full.grad, mesh, [Shard(0)])
            norms = clip_gradients(whole, 1.0), clip_gradients(parts, 1.0)
            assert type(norms[1]) is torch.Tensor
            torch.testing.assert_close(norms[0], norms[1])
            for optimizer in optimizers:
                optimizer.step()
        for full, part in zip(whole, parts, strict=True):
            torch.testing.assert_close(part.full_tensor(), full.detach())
    finally:
        dist.destroy_process_group()


def test_norm_clipping_and_update_of_sharded_parameters(tmp_path: Path):
    mp.spawn(check_rank, args=(str(tmp_path),), nprocs=2)
