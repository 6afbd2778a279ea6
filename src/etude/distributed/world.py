"""The processes of a run: this rank, and communication between ranks.

A single process is a world of size one: every method then returns at once and costs nothing. With several, every
rank must call the same methods in the same order.
"""

import atexit
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from etude.core import errors
from etude.core.errors import ConfigError, ConnectionLost, EtudeError, TrainingError
from etude.distributed.agreement import check_versions
from etude.distributed.network import notice_lost_machines
from etude.distributed.rank_log import RankLog
from etude.launched import SHAPE, is_first, is_launched

T = TypeVar("T")


@dataclass(slots=True)
class World:
    """Rank and size of the run, and reductions over its ranks.

    >>> World().sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Local rank of this process on its machine."""
    host_group: Any = None
    """A gloo group: it communicates between hosts without synchronising devices."""
    store: Any = None
    """The key-value store of the ranks; usable even if another rank has failed and the group is broken."""
    group: Any = None
    """The group of these ranks on the device; None is that of all processes."""
    writes: bool | None = None
    """Whether this process writes files, if these ranks are only some of the processes; None: rank 0 does."""
    parent: "World | None" = None
    """All processes, if these ranks are only some of them."""
    in_lockstep: bool = False
    """Whether running the model communicates: all ranks must run it equally often, also without samples."""
    _apart: "World | None" = field(default=None, repr=False, compare=False)
    log: RankLog | None = None
    """Warnings of this rank, on their way to rank 0; None if there is only one."""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0 if self.writes is None else self.writes

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks (in place if there are several)."""
        if self.size > 1:
            run_collective(lambda alias: dist.all_reduce(alias, group=self.group), tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the values of rank 0, in place."""
        if self.size > 1:
            run_collective(lambda alias: dist.broadcast(alias, group=self.group, group_src=0), tensor)

    def host_max(self, values: list[int]) -> list[int]:
        """Return the elementwise maximum over ranks of a few small numbers, on the host."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        run_collective(lambda row: dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.host_group), tensor)
        return [int(value) for value in tensor.tolist()]

    def gather_bytes(self, tensor: Tensor) -> list[Tensor]:
        """Return the byte tensors of all ranks, in rank order; lengths may differ."""
        if self.size == 1:
            return [tensor]
        length = torch.tensor([tensor.numel()], dtype=torch.int64)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._all_gather(lengths, length)
        sizes = [int(one.item()) for one in lengths]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: tensor.numel()] = tensor
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        self._all_gather(gathered, padded)
        return [row[:size] for row, size in zip(gathered, sizes, strict=True)]

    def _all_gather(self, rows: list[Tensor], own: Tensor) -> None:
        run_collective(
            lambda *tensors: dist.all_gather([*tensors[1:]], tensors[0], group=self.host_group), own, *rows
        )

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(row.tolist()).decode() for row in self.gather_bytes(data)]

    def share_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self.gather_text(text if self.is_main else "")[0]

    def union(self, names: list[str]) -> list[str]:
        """Return the union of the names of all ranks, in the same order on every rank."""
        return list(dict.fromkeys(name for text in self.gather_text(json.dumps(names)) for name in json.loads(text)))

    def attempt(self, action: Callable[[], T], *, here: bool = True) -> T | None:
        """Run `action` on the ranks where `here` is true; an EtudeError of any of them is raised on every rank.

        So no rank waits for a failed one. Returns None where the action did not run.
        """
        result, failure = None, None
        try:
            result = action() if here else None
        except EtudeError as error:
            failure = error
        if self.size > 1:
            is_own = failure is not None and not failure.reported_elsewhere  # not one of an attempt inside this one
            texts = self.gather_text(f"{type(failure).__name__}: {failure}" if is_own else "")
            first = next((rank for rank, text in enumerate(texts) if text), self.rank)
            failure = failure if first == self.rank else _error_of_another_rank(texts[first])
        if failure is not None:
            raise failure
        return result

    def apart(self) -> "World":
        """Return the same ranks with a gloo group of their own, for another thread. All ranks call this together."""
        if self.size == 1:
            return self
        if self._apart is None:
            self._apart = replace(self, host_group=dist.new_group(backend="gloo"))
        return self._apart

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.host_group)
            note_progress()

    def claim(self, task: str) -> bool:
        """Return True on only one rank, the first to call; does not wait for the others."""
        if self.store is None:
            return True
        try:
            return int(self.store.add(f"etude/{task}", 1)) == 1
        except RuntimeError:  # the process that held the store is gone: doing it twice is better than not at all
            return True


_lent: list[weakref.ref[Tensor]] = []
"""Aliases of tensors that a gloo thread may still hold."""
_lending = threading.Lock()
RETURN_TIMEOUT_S = 5.0
_progress = 0


def note_progress() -> None:
    """Count something that shows that this rank is alive: a collective, or a batch of a validation.

    Work of one rank alone, such as a slow callback, calls this now and then, or the run counts as hung after
    `training.collective_timeout_s`.
    """
    global _progress
    _progress += 1


def progress_made() -> int:
    """Return how often this rank has noted progress."""
    return _progress


def run_collective(collective: Callable[..., object], *tensors: Tensor) -> None:
    """Run a collective on `tensors`; it must write its results into them.

    A gloo thread holds its tensors slightly longer than the call, and takes the GIL to release them. If the
    interpreter is shutting down by then, Python ends that thread and C++ aborts the process. Neither
    `destroy_process_group` nor DDP, which keeps the group alive, waits for the thread. So gloo gets aliases that
    nothing else refers to, and this process exits when all of them are gone.
    """
    aliases = [tensor.detach() for tensor in tensors]
    with _lending:
        _lent[:] = [*(ref for ref in _lent if ref() is not None), *map(weakref.ref, aliases)]
    try:
        collective(*aliases)
        note_progress()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # the traceback refers to the aliases while the error lives
        raise
    finally:
        aliases.clear()


@atexit.register
def _wait_for_gloo() -> None:
    """Wait until the gloo threads have released all tensors, before the interpreter shuts down or forks."""
    deadline = time.monotonic() + RETURN_TIMEOUT_S
    while any(ref() is not None for ref in _lent) and time.monotonic() < deadline:
        time.sleep(0.001)  # releases the GIL


if sys.platform != "win32":
    # A process forked while such a thread takes the GIL would wait forever for a lock of that thread.
    os.register_at_fork(before=_wait_for_gloo, after_in_child=_lent.clear)


def _error_of_another_rank(text: str) -> EtudeError:
    """Return an error of another rank, which that rank reports itself."""
    name, _, message = text.partition(": ")
    kind = getattr(errors, name, EtudeError)
    error: EtudeError = kind(message)
    error.reported_elsewhere = True
    return error


_joined: World | None = None
"""The processes that this one has joined."""
HINT = "start them with `etude train … --nproc N`"


def join_world(device_type: str) -> World:
    """Join the processes started by torchrun, or return a world of one.

    Raises ConfigError if the launcher's variables are incomplete, if there are more processes than devices, if the
    group cannot be formed, or if the processes have different versions of the library, torch or Python.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given or (given == ["WORLD_SIZE"] and os.environ["WORLD_SIZE"] == "1"):
        return World()
    if len(given) == 1:  # each process would train alone
        raise ConfigError(f"of the variables RANK and WORLD_SIZE only {given[0]} is set; {HINT}")
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:  # the others would wait for it
        raise ConfigError(f"the variable RANK is {rank}, but WORLD_SIZE is {size}: it must be from 0 to {size - 1}")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if size == 1:
        return World(local_rank=local_rank)
    global _joined
    if _joined is not None:
        return _joined
    device = _own_device(local_rank) if device_type == "cuda" else None
    if not dist.is_initialized():
        try:
            dist.init_process_group("gloo" if device is None else "nccl", device_id=device)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"cannot join the {size} processes of this run ({error}); {HINT}") from error
        atexit.register(leave_world)  # for scripts that do not leave the group themselves
    host_group = dist.group.WORLD if device is None else dist.new_group(backend="gloo")
    if os.environ.get("LOCAL_WORLD_SIZE", str(size)) != str(size):
        notice_lost_machines()
    _joined = World(rank, size, local_rank, host_group, dist.distributed_c10d._get_default_store())
    _joined.log = RankLog(_joined)
    _joined.log.attach()
    check_versions(_joined)
    return _joined


def leave_world() -> None:
    """Leave the process group, if this process is in one."""
    global _joined
    if _joined is not None and _joined.log is not None:
        _joined.log.detach()
    _joined = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def launched_command(world: World, command: str) -> str:
    """Return an `etude` command such that it starts the same number of processes, in the same way.

    >>> launched_command(World(), "etude resume RUN_DIR"), launched_command(World(size=2), "etude resume RUN_DIR")
    ('etude resume RUN_DIR', 'torchrun --nproc-per-node 2 -m etude resume RUN_DIR')
    """
    if is_launched():
        return f"{command} {os.environ[SHAPE]}"
    if world.size == 1:
        return command
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(world.size)) == str(world.size)
    return f"torchrun {f'--nproc-per-node {world.size}' if is_one_machine else '…'} -m {command}"


@contextmanager
def before_joining() -> Iterator[None]:
    """Let only one process per machine report an error that all of them may find before they have joined."""
    try:
        yield
    except EtudeError as error:
        error.reported_elsewhere = not is_first("failed")
        raise


@contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Let the ranks of a run fail with one message: that of the rank that failed first.

    An error that another rank reports is marked as such. Losing the connection to another rank is a TrainingError.
    """
    try:
        yield
        if world.log is not None:
            world.log.show()
    except EtudeError as error:
        _print_warnings(world)
        error.reported_elsewhere = error.reported_elsewhere or not world.claim("failure")
        raise
    except RuntimeError as error:
        _print_warnings(world)
        first = world.claim("failure")
        if not is_lost_connection(error):
            raise
        lost = ConnectionLost(
            f"process {world.rank} of {world.size} lost the connection to another process, which was killed or "
            "failed; resume from the last checkpoint"
        )
        # A launcher of ours knows better which process ended, and why; it looks at the exit code.
        lost.reported_elsewhere = not first or is_launched()
        lost.exit_code = lost.exit_code if is_launched() else TrainingError.exit_code
        raise lost from error
    except BaseException:
        _print_warnings(world)
        world.claim("failure")  # its traceback is printed, or it is Ctrl-C
        raise


def _print_warnings(world: World) -> None:
    if world.log is not None:
        world.log.print_rest()


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another process was killed or failed."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


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
