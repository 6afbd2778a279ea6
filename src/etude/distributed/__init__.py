"""Processes of one run: joining them, reductions over ranks, and data parallelism."""

from etude.distributed.launch import before_joining, failing_together, join_world, launcher, leave_world
from etude.distributed.parallel import (
    check_gradients,
    idle_output,
    local_gradients,
    share_buffers,
    wrap_data_parallel,
)
from etude.distributed.task import RankTask, is_empty
from etude.distributed.world import World

__all__ = [
    "RankTask",
    "World",
    "before_joining",
    "check_gradients",
    "failing_together",
    "idle_output",
    "is_empty",
    "join_world",
    "launcher",
    "leave_world",
    "local_gradients",
    "share_buffers",
    "wrap_data_parallel",
]
