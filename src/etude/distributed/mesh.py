"""The device mesh of a run: which processes share data, and which share a replica of the model."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from etude.distributed.settings import ParallelConfig, Sizes
from etude.distributed.world import World

DATA, SHARD, TENSOR = "data", "shard", "tensor"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a run divide its data and its model."""

    world: World = field(default_factory=World)
    """All processes."""
    data_world: World = field(default_factory=World)
    """Those with different samples: the processes that divide layers between them (`tensor`) have the same ones."""
    sizes: Sizes = field(default_factory=Sizes)
    mesh: Any = None
    """torch's DeviceMesh, if a process holds only a part of the model."""
    settings: ParallelConfig = field(default_factory=ParallelConfig)

    def warning(self) -> str | None:
        """Return what the user may not intend, or None."""
        if self.settings.shard == "all" and not self.sizes.divides_model:
            return "parallel.shard is all, but the model is not divided: start several processes, with --nproc"
        return None

    @property
    def shard_mesh(self) -> Any:
        """The mesh over which FSDP2 shards and replicates; None if there is only one process on it."""
        if self.mesh is None or self.sizes.replicas == 1:
            return None
        return self.mesh[DATA, SHARD] if self.sizes.data > 1 else self.mesh[SHARD]

    @property
    def tensor_mesh(self) -> Any:
        """The mesh over which layers are divided; None if they are not."""
        return self.mesh[TENSOR] if self.mesh is not None and self.sizes.tensor > 1 else None


def make_layout(world: World, settings: ParallelConfig, sizes: Sizes, device: torch.device) -> Layout:
    """Make the mesh of a run. All processes must call this together."""
    if not sizes.divides_model:
        return Layout(world, world, sizes, None, settings)
    shape = (sizes.data, sizes.shard, sizes.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA, SHARD, TENSOR))
    return Layout(world, _data_world(world, sizes, device), sizes, mesh, settings)


def _data_world(world: World, sizes: Sizes, device: torch.device) -> World:
    """Return the ranks with the same part of every layer: they have different samples."""
    if sizes.tensor == 1:
        return replace(world, in_lockstep=True)
    columns = [list(range(first, world.size, sizes.tensor)) for first in range(sizes.tensor)]
    host_group, _ = dist.new_subgroups_by_enumeration(columns, backend="gloo")
    group = host_group
    if device.type == "cuda":
        group, _ = dist.new_subgroups_by_enumeration(columns)
    return replace(
        world,
        rank=world.rank // sizes.tensor,
        size=sizes.replicas,
        host_group=host_group,
        group=group,
        writes=world.is_main,
        parent=world,
        in_lockstep=True,
    )
