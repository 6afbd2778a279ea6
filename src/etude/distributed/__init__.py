"""Process groups, wrapping for data parallelism, and reductions over ranks."""

from etude.distributed.parallel import local_gradients, wrap_data_parallel
from etude.distributed.world import World, join_world, leave_world

__all__ = ["World", "join_world", "leave_world", "local_gradients", "wrap_data_parallel"]
