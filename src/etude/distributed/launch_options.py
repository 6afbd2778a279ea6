"""How many processes and machines a command asks for."""

import os
import sys
from dataclasses import dataclass

import torch

from etude.core.errors import ConfigError
from etude.distributed.network import parse_endpoint

CORES_PER_PROCESS = 4
"""CPU cores of one process with `--nproc auto` where there is no GPU: every process has its own copy of the data."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How many processes and machines; None where the command line says nothing."""

    nproc: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int | None = None

    def __post_init__(self) -> None:
        several = self.nodes[1] > 1
        if several and self.rdzv_endpoint is None:
            raise ConfigError("--nnodes needs --rdzv-endpoint HOST:PORT, one address for all machines")
        if not several and (self.rdzv_endpoint is not None or self.node_rank is not None):
            raise ConfigError("--rdzv-endpoint and --node-rank are for several machines; add --nnodes")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes[1]:
            raise ConfigError(f"--node-rank {self.node_rank}: must be from 0 to {self.nodes[1] - 1} (--nnodes)")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: must be 0 or more")
        if self.rdzv_endpoint is not None:
            parse_endpoint(self.rdzv_endpoint)

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the most machines."""
        first, _, last = ("1" if self.nnodes is None else self.nnodes).partition(":")
        try:
            least, most = int(first), int(last or first)
        except ValueError:
            least, most = 0, 0
        if not 1 <= least <= most:
            raise ConfigError(
                f"--nnodes {self.nnodes or repr('')}: give a number, such as 2, or a range, such as 1:2"
            )
        return least, most

    @property
    def processes(self) -> int:
        """The processes on this machine."""
        if self.nproc == "auto":
            return torch.cuda.device_count() or max(1, _cores() // CORES_PER_PROCESS)
        try:
            count = 1 if self.nproc is None else int(self.nproc)
        except ValueError:
            count = 0
        if count < 1:
            raise ConfigError(f"--nproc {self.nproc or repr('')}: give a number, such as 4, or auto")
        return count

    @property
    def is_one_process(self) -> bool:
        """Whether one process does it all and is not restarted."""
        return self.processes == 1 and self.nodes[1] == 1 and not self.max_restarts

    @property
    def threads(self) -> str:
        """The threads of each process: those of the variable, or the cores divided among the processes."""
        return os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // self.processes))

    def __str__(self) -> str:
        many, (least, most), threads = self.processes, self.nodes, self.threads
        machines = "" if most == 1 else f" on each of {least if least == most else f'{least} to {most}'} machines"
        each = f"{threads} CPU thread{'s' * (threads != '1')} each (OMP_NUM_THREADS)"
        return f"{many} process{'es' * (many > 1)}{machines}, {each}"

    @property
    def shape(self) -> str:
        """The options to start as many processes again."""
        words = [f"--nproc {self.processes}"]
        if self.nnodes is not None and self.nodes[1] > 1:
            words += [f"--nnodes {self.nnodes}", f"--rdzv-endpoint {self.rdzv_endpoint}"]
            words += [] if self.node_rank is None else ["--node-rank …"]
        return " ".join(words + ([f"--max-restarts {self.max_restarts}"] if self.max_restarts else []))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
