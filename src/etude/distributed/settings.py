"""The `parallel:` section: how the processes of a run divide data and model, and which device mesh that gives."""

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import model_validator

from etude.config import SectionModel
from etude.core.errors import ConfigError

Size = Annotated[int, Ge(1)]
Style = Literal["colwise", "rowwise", "colwise_gathered", "replicated"]

SHORT: dict[str, dict[str, Any]] = {
    "auto": {"shard": "auto"},
    "ddp": {},
    "fsdp": {"data": 1, "shard": "all"},
}
"""What a single word stands for."""
BYTES_PER_PARAMETER = 16
"""Of a replica in training: weight, gradient and the two averages of Adam, in float32."""
SHARE_OF_MEMORY = 0.6
"""Of a device that a replica may take; the rest is for activations."""


class ParallelConfig(SectionModel):
    """How several processes train one model; `data` x `shard` x `tensor` is their number.

    A single word is short for a section: `ddp`, `fsdp` (shard over all processes) or `auto` (fsdp if the model does not
    fit into the memory of one device).

    >>> ParallelConfig(shard=2, tensor=2).sizes(8)
    Sizes(data=2, shard=2, tensor=2)
    """

    data: Size | Literal["auto"] = "auto"
    """Replicas of the model, each trained on its own part of a batch; auto: as many as the other sizes leave."""
    shard: Size | Literal["all", "auto"] = 1
    """Processes over which weights, gradients and optimizer state are sharded (FSDP2); auto: all if memory needs it."""
    tensor: Size = 1
    """Processes over which each layer is divided (tensor parallelism); they should be on one machine."""
    blocks: str | None = None
    """Pattern of the modules that are gathered one at a time; by default the repeated blocks of the model."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward pass; false: keep them, for less communication."""
    meta_device: bool = False
    """Make the model without memory for its weights, and draw those of each process once it is divided."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and update them there; CUDA only."""
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision in which sharded weights are gathered; auto: that of training."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision in which sharded gradients are summed over processes."""
    tensor_plan: dict[str, Style] | None = None
    """How layers are divided, by patterns of their names; by default the model's own plan."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in SHORT:
                raise ValueError(f"'{value}' is none of {', '.join(SHORT)}; or give data, shard and tensor")
            return SHORT[value]
        return value

    @model_validator(mode="after")
    def _needs_its_feature(self) -> "ParallelConfig":
        if self.shard == 1:
            fields = type(self).model_fields
            of_shards = ("blocks", "reshard_after_forward", "cpu_offload", "param_dtype", "reduce_dtype")
            if changed := [name for name in of_shards if getattr(self, name) != fields[name].default]:
                raise ValueError(f"{changed[0]} is for sharded weights, but shard is 1; set shard to 2 or more")
        if self.shard == 1 and self.tensor == 1 and self.meta_device:
            raise ValueError("meta_device is for a model that processes divide; set shard or tensor to 2 or more")
        if self.tensor == 1 and self.tensor_plan is not None:
            raise ValueError("tensor_plan divides layers over processes, but tensor is 1; set tensor to 2 or more")
        if self.tensor_plan is not None and {*self.tensor_plan.values()} <= {"replicated"}:
            raise ValueError("tensor_plan divides no layer; give one a style such as colwise, or leave it out")
        return self

    def sizes(self, world_size: int, parameters: int = 0, device_bytes: int | None = None) -> "Sizes":
        """Return the three sizes; raise ConfigError if they do not multiply to the number of processes.

        `shard: auto` needs the number of parameters and the memory of a device.
        """
        left, rest = divmod(world_size, self.tensor)
        if self.shard == "auto":
            needed = parameters * BYTES_PER_PARAMETER / self.tensor
            is_sharded = device_bytes is not None and needed > SHARE_OF_MEMORY * device_bytes
        else:
            is_sharded = self.shard == "all"
        every = max(1, left // (1 if self.data == "auto" else self.data))
        shard = self.shard if isinstance(self.shard, int) else every if is_sharded else 1
        data = max(1, left // shard) if self.data == "auto" else self.data
        if rest or data * shard * self.tensor != world_size:
            raise ConfigError(
                f"parallel: data {self.data} x shard {self.shard} x tensor {self.tensor} is not the number of "
                f"processes, {world_size}; {_remedy(data * shard * self.tensor)}"
            )
        return Sizes(data, shard, self.tensor)


def _remedy(needed: int) -> str:
    return f"start {needed} with --nproc {needed}, or change the sizes"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of the device mesh; neighbouring ranks divide layers, then shards, then data."""

    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def replicas(self) -> int:
        """Number of parts into which a batch is divided."""
        return self.data * self.shard

    @property
    def divides_model(self) -> bool:
        """Whether a process holds only a part of the model."""
        return self.shard > 1 or self.tensor > 1


def memory_of(device: Any) -> int:
    """Return the bytes of memory that a process can use on a device."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
