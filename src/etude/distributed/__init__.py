"""Processes of one run: joining them, reductions over ranks, and data parallelism."""

from etude.distributed.parallel import (
    RankTask,
    check_gradients,
    idle_output,
    local_gradients,
    share_buffers,
    wrap_data_parallel,
)
from etude.distributed.world import World, before_joining, failing_together, join_world, launcher, leave_world

__all__ = [
    "RankTask",
    "World",
    "before_joining",
    "check_gradients",
    "failing_together",
    "idle_output",
    "join_world",
    "launcher",
    "leave_world",
    "local_gradients",
    "share_buffers",
    "wrap_data_parallel",
]
