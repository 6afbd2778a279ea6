"""Joining the processes that torchrun started, leaving them, and failing with one message."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from etude.core.errors import ConfigError, EtudeError, TrainingError
from etude.distributed.world import World

HINT = "start them with `torchrun --nproc-per-node N -m etude train …`"


def join_world(device_type: str) -> World:
    """Join the processes that torchrun started, or return a world of one.

    Raises ConfigError if the launcher's variables are incomplete, if there are more processes than devices, or if
    the group cannot be formed.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if size == 1:
        return World(local_rank=local_rank)
    device = _own_device(local_rank) if device_type == "cuda" else None
    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo" if device is None else "nccl", device_id=device)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot join the {size} processes of this run ({error}); {HINT}") from error
        atexit.register(leave_world)  # for scripts that do not leave by themselves
    host_group = dist.group.WORLD if device is None else dist.new_group(backend="gloo")
    return World(rank, size, local_rank, host_group, dist.distributed_c10d._get_default_store())


def leave_world() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def launcher(world: World) -> str:
    """Return what to type before `etude` to start as many processes again.

    >>> launcher(World()) + "etude resume RUN_DIR", launcher(World(size=2)) + "etude resume RUN_DIR"
    ('etude resume RUN_DIR', 'torchrun --nproc-per-node 2 -m etude resume RUN_DIR')
    """
    if world.size == 1:
        return ""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(world.size)) == str(world.size)
    return f"torchrun {f'--nproc-per-node {world.size}' if is_one_machine else '…'} -m "


@contextmanager
def before_joining() -> Iterator[None]:
    """Let one process of a machine tell of a mistake that all of them find before they have joined."""
    try:
        yield
    except EtudeError as error:
        error.told = os.environ.get("LOCAL_RANK", "0") != "0"
        raise


@contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Let the ranks of a run fail with one message: that of the rank that failed first.

    An error that another rank tells is marked as `told`. Losing the connection to another rank is a TrainingError.
    """
    try:
        yield
    except EtudeError as error:
        error.told = error.told or not world.claim("failure")
        raise
    except RuntimeError as error:
        first = world.claim("failure")
        if not _is_lost_connection(error):
            raise
        lost = TrainingError(
            f"process {world.rank} of {world.size} has lost the connection to another one, which was killed or has "
            f"failed; the last checkpoint is intact, resume from it"
        )
        lost.told = not first
        raise lost from error
    except BaseException:
        world.claim("failure")  # a traceback will tell, or it is Ctrl-C
        raise


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _own_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"process {local_rank} of this machine has no CUDA device of its own ({count} found); start at most "
            f"{count} processes here, or set training.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"the variable {name} is '{os.environ[name]}', not a number; {HINT}") from None
