"""Starting the processes of a run on this machine, with torch's elastic agent, and what is said about their end."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from etude.core.errors import ConfigError, ConnectionLost, TrainingError
from etude.distributed.launch_options import LaunchOptions
from etude.distributed.network import (
    JOIN_TIMEOUT_S,
    interface_of,
    is_open,
    local_address,
    notice_lost_machines,
    wait_for_endpoint,
)
from etude.launched import HUNG, LAUNCHER, SHAPE, STOP_FILE, interrupts_blocked

SAVE_GRACE_S = 300
"""Time to save and stop before a process is killed: on a signal, or when machines join or leave."""
STORE_TIMEOUT_S = 60
"""How long the machine of the rendezvous may be silent."""
EXPLAIN_S = 5
"""How long a process that others have lost, or that hung, may take to end by itself."""
LAST_GRACE_S = 10
"""Time to end after the second signal."""
RESUME = "a run can be continued from its last checkpoint by `etude resume`"
EXPLAINED = {TrainingError.exit_code, ConnectionLost.exit_code, HUNG}
"""Exit codes of processes that have said why they end, or of which another one knows."""
FINAL = (2, 130)
"""Exit codes after which a restart would end the same way: a mistake of the user, an interrupt."""


def launch(arguments: Sequence[str], options: LaunchOptions, complain: Callable[[str], None]) -> int:
    """Run `etude ARGUMENTS` in several processes and return the exit code for this one.

    The processes get these arguments as they are, and know by the environment that they have been launched.
    `complain` prints a line about processes that were lost.
    """
    address, is_host = _place(options)
    if not is_host:
        wait_for_endpoint(str(options.rdzv_endpoint))
    with tempfile.TemporaryDirectory(prefix="etude-") as logs, _quiet(), _environment(options, address, logs):
        try:
            agent = Agent(_spec(list(arguments), options, address, is_host), DefaultLogsSpecs(log_dir=logs), complain)
            with agent.signals():
                agent.run()
                agent.close()
        except RendezvousTimeoutError as error:
            raise ConnectionLost(
                f"fewer than {options.nodes[0]} machines came to {options.rdzv_endpoint} within {JOIN_TIMEOUT_S} s; "
                "start the same command on all of them, and let them reach its port"
            ) from error
        except (RendezvousError, dist.DistError) as error:
            if options.nodes[1] == 1:
                raise TrainingError(f"cannot start the processes: {_cause(error)}") from error
            raise ConnectionLost(
                f"no connection to the machines at {options.rdzv_endpoint} ({_cause(error)}); {RESUME}, on all of them"
            ) from error
    return agent.exit_code()


class Agent(LocalElasticAgent):
    """Torch's agent, which waits while processes save, and restarts none that ended by a mistake or an interrupt."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, complain: Callable[[str], None]) -> None:
        super().__init__(spec, logs, shutdown_timeout=LAST_GRACE_S)
        self._complain = complain
        self._asked = 0
        """Signals received."""
        self._deadline = float("inf")
        self._lost_since: float | None = None
        self._has_finished = False
        """Whether a process has ended well: then the run is finished, whatever a signal did to the others."""
        self._ended: dict[int, int] = {}
        """Exit codes by rank, of those that ended first."""
        self._server: Any = None
        """The store of an attempt, if this is the first machine; it lives as long as it is here."""

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Pass signals on to the processes: the first one lets them save and stop, the second one stops them."""
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        kept = [one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN]  # as by nohup
        before = {number: signal.signal(number, self._pass_on) for number in kept}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Close the rendezvous, so that a machine that comes late does not wait."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _pass_on(self, number: int, _frame: Any) -> None:
        self._asked += 1
        codes = [process.poll() for process in self._processes().values()]
        if codes and all(code in (0, 130) for code in codes):  # the run has finished, or has stopped
            return
        if None not in codes:  # no process has begun: nothing is to be saved
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):
            Path(os.environ[STOP_FILE]).write_bytes(b"!" * self._asked)
        for process in self._processes().values():
            process.send_signal(number)
        if self._asked > 1:
            self._deadline = time.monotonic() + LAST_GRACE_S

    def _processes(self) -> dict[int, Any]:
        context: Any = self._pcontext
        handlers = {} if context is None else context.subprocess_handlers
        return {rank: handler.proc for rank, handler in handlers.items()}

    def _codes(self) -> dict[int, int | None]:
        """Return the exit codes of the processes of this machine by rank; None for those that run."""
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {ranks[local]: process.poll() for local, process in self._processes().items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Agree on ranks, and on a store of this attempt: in that of the last one torch would read old addresses."""
        with _variables(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):  # else torch tells only the first attempt's address
            super()._rendezvous(worker_group)
        group: Any = worker_group
        if group.group_world_size < (least := group.spec.rdzv_handler.settings.min_nodes):
            raise ConfigError(
                f"--nnodes {least}: only {group.group_world_size} of the machines seems alive, since their clocks "
                "differ by more than ten seconds; synchronise them (NTP)"
            )
        if group.group_rank == 0:
            self._server = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
            group.store.set("etude/store", f"{group.master_addr} {self._server.port}")
        address, port = group.store.get("etude/store").decode().split()
        group.master_addr, group.master_port = address, int(port)
        notice_lost_machines()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes with SIGINT blocked; they unblock it once they have imported torch."""
        with interrupts_blocked():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        return ids

    def run(self, role: str = "etude") -> Any:
        """Run the processes until they end."""
        handler: Any = self._worker_group.spec.rdzv_handler
        handler.num_nodes_waiting = partial(self._machines_waiting, handler.num_nodes_waiting)
        try:
            return super().run(role)
        finally:
            del handler.num_nodes_waiting  # it refers to this agent, which closes its store with its last reference

    def _machines_waiting(self, count: Callable[[], int]) -> int:
        """Return how many machines wait; if the one of the endpoint has ended, let the processes here say why."""
        try:
            return count()
        except (RendezvousError, dist.DistError):
            deadline = time.monotonic() + EXPLAIN_S
            while not set(self._codes().values()) - {None}:
                if time.monotonic() > deadline:
                    raise
                time.sleep(self._worker_group.spec.monitor_interval)
            return 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes()
        if (self._asked and self._may_go_on(list(codes.values()))) or self._is_explained_soon(list(codes.values())):
            return RunResult(state=WorkerState.HEALTHY)
        self._ended = {rank: code for rank, code in codes.items() if code}
        self._has_finished = 0 in codes.values()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._ended = self._ended or {rank: one.exitcode for rank, one in result.failures.items()}
            if self._asked or any(code in FINAL for code in self._ended.values()):
                self._remaining_restarts = 0
            if self._remaining_restarts:
                most = worker_group.spec.max_restarts
                self._complain(f"{self._words()}; restart {most - self._remaining_restarts + 1} of {most}")
        return result

    def _may_go_on(self, codes: list[int | None]) -> bool:
        """Whether processes that were asked to stop are still saving, or shut down after the end of the run."""
        ended = {code for code in codes if code is not None}
        if None not in codes or not ended <= {0, 130, -signal.SIGTERM, -signal.SIGHUP}:
            return False
        if ended:
            grace_s = SAVE_GRACE_S if ended <= {0, 130} else LAST_GRACE_S
            self._deadline = min(self._deadline, time.monotonic() + grace_s)
        return time.monotonic() < self._deadline

    def _is_explained_soon(self, codes: list[int | None]) -> bool:
        """Whether some have ended and said why, or by losing another one: the rest is about to end by itself.

        After a hang a process may be stopped, or hold the GIL: such a process hears no signal, and is killed.
        """
        ended = {code for code in codes if code is not None}
        if (self._asked and HUNG not in ended) or None not in codes or not ended or not ended <= EXPLAINED:
            self._lost_since = None
            return False
        self._lost_since = time.monotonic() if self._lost_since is None else self._lost_since
        is_soon = time.monotonic() < self._lost_since + EXPLAIN_S
        if HUNG in ended and not is_soon:
            for process in self._processes().values():
                process.kill()
        return is_soon

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            self._complain("another machine has come; the processes save and start again with it")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch calls it so
        self._shutdown(timeout=SAVE_GRACE_S)  # torch gives them 30 seconds

    def _words(self) -> str:
        """Return what has ended the processes: of several causes the one that explains the others."""
        if HUNG in self._ended.values():
            return "the processes hung"
        size = self._worker_group.workers[0].world_size
        for rank, code in sorted(self._ended.items()):
            if code < 0:
                return f"process {rank} of {size} was killed by {signal.Signals(-code).name}{_hint(code)}"
        for rank, code in sorted(self._ended.items()):
            if code != ConnectionLost.exit_code:
                how = "was interrupted" if code == 130 else f"failed with exit code {code}"
                return f"process {rank} of {size} {how}"
        for rank, ended in sorted(self._codes().items()):
            if ended == 0:
                return f"process {rank} of {size} ended with exit code 0 before the others had finished"
        return "the connection to a process on another machine was lost"

    def exit_code(self) -> int:
        """Return the exit code for the whole; say what the processes could not say themselves."""
        codes = set(self._ended.values())
        if self._asked:
            if self._has_finished:
                return 0
            if not codes <= {130} and HUNG not in codes:  # after a hang they have said so
                self._complain("stopped at once; earlier checkpoints are intact")
            return 130 if codes else 0  # it had finished
        if final := codes & set(FINAL):
            if final == {130} and set(self._codes().values()) - {0, 130}:  # not all have stopped, and said so
                self._complain(f"{self._words()}; {RESUME}")
            return max(final)
        if not codes:
            return 0
        if HUNG in codes:  # they have said so, and what to do
            return 1
        self._complain(f"{self._words()}; {RESUME}")
        if killed := sorted(-code for code in codes if code < 0):
            return 128 + killed[0]  # as a shell reports it
        return ConnectionLost.exit_code if codes == {ConnectionLost.exit_code} else 1


def _hint(code: int) -> str:
    return " (out of memory?)" if code == -signal.SIGKILL else ""


def _place(options: LaunchOptions) -> tuple[str, bool]:
    """Return the address of this machine, and whether it is the one at which the others meet."""
    if options.rdzv_endpoint is None:
        return "127.0.0.1", True
    address, is_here = local_address(options.rdzv_endpoint)
    if options.node_rank is not None:
        return address, options.node_rank == 0
    return address, is_here and not is_open(options.rdzv_endpoint)  # else another launcher of this machine has begun


def _spec(arguments: list[str], options: LaunchOptions, address: str, is_host: bool) -> WorkerSpec:
    least, most = options.nodes
    endpoint = options.rdzv_endpoint or f"{address}:0"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=uuid.uuid4().hex if most == 1 else f"etude-{endpoint}",
        min_nodes=least,
        max_nodes=most,
        local_addr=address,
        is_host=is_host,
        join_timeout=JOIN_TIMEOUT_S,
        read_timeout=STORE_TIMEOUT_S,
    )
    # Like this process: `-m` would put the current folder before the installed packages.
    safe = [] if sys.path[:1] in ([""], [str(Path.cwd())]) else ["-P"]
    return WorkerSpec(
        role="etude",
        local_world_size=options.processes,
        entrypoint=sys.executable,
        args=(*safe, "-m", "etude", *(one.replace("$", "$$") for one in arguments)),  # torch fills in templates
        rdzv_handler=_handler(parameters),
        max_restarts=options.max_restarts or 0,
        monitor_interval=0.1,
        local_addr=address,
    )


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Connect to the machine of the endpoint; raise ConfigError if something else has its port.

    Torch would wait forever for such a thing to answer, and hear no signal: so a thread waits for it.
    """
    made: list[RendezvousHandler | Exception] = []

    def connect() -> None:
        try:
            made.append(get_rendezvous_handler(parameters))
        except Exception as error:
            made.append(error)

    connecting = threading.Thread(target=connect, name="etude-rendezvous", daemon=True)
    connecting.start()
    connecting.join(STORE_TIMEOUT_S)
    if not made:
        raise ConfigError(
            f"--rdzv-endpoint {parameters.endpoint}: another program has this port; choose one that is free there"
        )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


@contextlib.contextmanager
def _environment(options: LaunchOptions, address: str, folder: str) -> Iterator[None]:
    """Set variables that the processes inherit."""
    new = {
        LAUNCHER: str(os.getpid()),
        SHAPE: options.shape,
        STOP_FILE: str(Path(folder, "stop")),
        "OMP_NUM_THREADS": options.threads,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "TORCH_CPP_LOG_LEVEL": "ERROR"
        if (level := os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")) == "FATAL"
        else level,
    }
    if options.nodes[1] > 1 and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address)):
        new["GLOO_SOCKET_IFNAME"] = name  # gloo would take what the host name stands for
    with _variables(**new):
        yield


@contextlib.contextmanager
def _variables(**new: str) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's messages about its agent from the user; what matters is said in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _cause(error: BaseException) -> str:
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return (str(inner).splitlines() or [type(inner).__name__])[0]
