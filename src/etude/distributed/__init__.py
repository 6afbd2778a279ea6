"""Processes of one run: joining them, reductions over ranks, and data parallelism."""

from etude.distributed.world import World, before_joining, join_world, launched_command, leave_world, note_progress

__all__ = [
    "World",
    "before_joining",
    "join_world",
    "launched_command",
    "leave_world",
    "note_progress",
]
