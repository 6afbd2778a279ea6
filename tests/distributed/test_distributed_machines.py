"""Several machines: network namespaces stand for hosts, a pair of virtual interfaces for the cable."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from distributed_runs import TIMEOUT_S, without_announcements
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from etude.core.errors import ConfigError, ConnectionLost
from etude.distributed.launch import launch
from etude.distributed.launch_options import LaunchOptions
from etude.distributed.network import (
    PEER_TIMEOUT_S,
    interface_of,
    local_address,
    notice_lost_machines,
    parse_endpoint,
    wait_for_endpoint,
)
from run_files import records

pytestmark = pytest.mark.distributed
TRAINING = {"epochs": 3, "save_every_steps": 5}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2."""
    names = [f"etude{os.getpid()}-{number}" for number in (1, 2)]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip(
                "link",
                "add",
                "cable1",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "cable2",
                "netns",
                names[1],
            )
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("network namespaces cannot be made here")
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"cable{number}")
            for link in ("lo", f"cable{number}"):
                ip("-n", name, "link", "set", link, "up")
        yield names


def start(host, config, folder, *arguments):
    command = ["train", config, *arguments, "-q", "--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "etude", *map(str, command), "--run-dir", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def end(process, timeout=2 * TIMEOUT_S):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, without_announcements(err).splitlines()


@pytest.mark.slow
def test_one_process_on_each_of_two_machines_is_two_on_one(runs, hosts):
    config, folder = runs.write("two", TRAINING), runs.root / "run"
    single, ended = runs.train(2, config)
    ended.ok()
    ended = [end(one) for one in [start(host, config, folder) for host in hosts]]
    assert [(code, err) for code, _, err in ended] == [(0, []), (0, [])]
    assert sum(out.count("finished at step 21;") for _, out, _ in ended) == 1
    for mine, theirs in zip(records(folder, "train"), records(single, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides_with_one_line_each_and_the_run_can_be_resumed(runs, hosts):
    callbacks = [{"name": "toy_told", "step": -1, "seconds": 0.05}]
    config, folder = runs.write("cut", TRAINING | {"epochs": 1000}, callbacks=callbacks), runs.root / "run"
    processes = [start(host, config, folder) for host in hosts]
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "checkpoints" / "step-00000010").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ip("-n", hosts[1], "link", "set", "cable2", "down")
    began = time.monotonic()
    for process in processes:
        code, _, err = end(process, PEER_TIMEOUT_S + TIMEOUT_S)
        assert code == 75
        assert len(err) == 1
        assert "connection" in err[0]
        assert "etude resume" in err[0]
    assert time.monotonic() - began < PEER_TIMEOUT_S + 30
    runs.resume(2, folder, "training.epochs=3", "callbacks=[]").ok()
    single, ended = runs.train(2, runs.write("straight", TRAINING))
    ended.ok()
    for mine, theirs in zip(records(folder, "train"), records(single, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def test_an_endpoint_tells_the_address_of_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert local_address(f"127.0.0.1:{port}") == ("127.0.0.1", True)
    if sys.platform == "linux":
        assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_connections_to_other_machines_get_a_time_limit_and_no_file_stays_open():
    address = next((one for one in _addresses() if not one.startswith("127.")), None)
    if address is None:
        pytest.skip("this machine has no network")
    option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    with (
        socket.create_server((address, 0)) as server,
        socket.create_connection(server.getsockname()) as far,
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.create_connection(own.getsockname()) as near,
    ):
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        notice_lost_machines()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert far.getsockopt(*option) == 1000 * PEER_TIMEOUT_S
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert near.getsockopt(*option) == 0


def _addresses():
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [one for one in found if ":" not in one]


@pytest.mark.parametrize("endpoint", ["node1", "node1:", ":29400", "node1:0", "node1:99999", "node1:http"])
def test_an_endpoint_needs_host_and_port(endpoint):
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        parse_endpoint(endpoint)


def test_a_machine_that_nobody_joins_says_so(monkeypatch):
    monkeypatch.setattr("etude.distributed.launch.JOIN_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConnectionLost, match=f"fewer than 2 machines came to {endpoint} within 1 s"):
        launch(["list"], LaunchOptions(nnodes="2", rdzv_endpoint=endpoint, node_rank=0), print)
    with pytest.raises(ConnectionLost, match=f"nothing answers at {endpoint} after 1 s"):
        wait_for_endpoint(endpoint, 1)


def test_a_port_that_another_program_has_is_refused(monkeypatch):
    """It listens and never answers: torch would wait forever."""
    monkeypatch.setattr("etude.distributed.launch.STORE_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{endpoint}: another program has this port"):
            launch(["list"], LaunchOptions(nnodes="2", rdzv_endpoint=endpoint), print)
    for thread in threading.enumerate():
        if thread.name == "etude-rendezvous":  # its connection is closed now; at exit it would need the interpreter
            thread.join(TIMEOUT_S)


CLOCK = """
import sys, threading
from datetime import datetime, timedelta
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from etude.core.errors import EtudeError
from etude.distributed.launch import launch
from etude.distributed.launch_options import LaunchOptions

class Late(datetime):
    @classmethod
    def now(cls, zone=None):
        return datetime.now(zone) - timedelta(seconds=float(sys.argv[3]))

dynamic_rendezvous.datetime = Late
try:
    sys.exit(launch(["list"], LaunchOptions(nnodes="2", rdzv_endpoint=sys.argv[1], node_rank=int(sys.argv[2])), print))
except EtudeError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_machines_with_different_clocks_do_not_train_alone():
    """Torch takes a machine whose clock is late for lost, and would go on with fewer than are asked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-c", CLOCK, endpoint]
    machines = [
        subprocess.Popen([*command, str(rank), str(late)], stdout=subprocess.PIPE, text=True)
        for rank, late in enumerate([0, 120])
    ]
    said = [one.communicate(timeout=2 * TIMEOUT_S)[0] for one in machines]
    assert said[0].startswith("ConfigError: --nnodes 2")
    assert "clocks" in said[0]
    assert said[1].startswith("ConnectionLost")


def test_processes_say_why_they_end_also_if_the_machine_of_the_endpoint_has_ended_before(runs, monkeypatch):
    def gone(_):
        raise RendezvousConnectionError("gone")

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", gone)
    monkeypatch.setattr("etude.distributed.launch.EXPLAIN_S", TIMEOUT_S)  # a busy machine starts them slowly
    config = runs.write("bad", TRAINING, data={"name": "toy_missing", "on_rank": 1})
    assert (
        launch(["train", str(config), "-q", "--run-dir", str(runs.root / "run")], LaunchOptions(nproc="2"), print)
        == 2
    )


@pytest.mark.slow
def test_a_machine_comes_and_is_lost_and_the_run_goes_on(runs):
    """Two launchers on one machine: one process, then two, then one again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    training = {"epochs": 1000, "max_steps": 1500, "save_every_steps": 100, "log_interval": 100}
    straight, ended = runs.train(1, runs.write("straight", training))
    ended.ok()
    callbacks = [{"name": "toy_told", "step": -1, "seconds": 0.05}]
    config, folder = runs.write("elastic", training, callbacks=callbacks), runs.root / "run"
    command = [sys.executable, "-m", "etude", "train", config, "-q", "--run-dir", folder, "--nnodes", "1:2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(list(map(str, [*command, "--node-rank", 0])), env=env, **pipes)
    _wait_for(lambda: _begun(folder) == [1], first)
    second = subprocess.Popen(list(map(str, [*command, "--node-rank", 1])), env=env, **pipes)
    _wait_for(lambda: _begun(folder) == [1, 2], first)
    second.kill()
    second.communicate(timeout=TIMEOUT_S)
    code, _, err = end(first, 600)
    assert code == 0, err
    assert _begun(folder) == [1, 2, 1]
    for mine, theirs in zip(records(folder, "train"), records(straight, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def _begun(folder):
    """Return the number of processes of each attempt."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one["processes"] for one in events if one["kind"] in ("start", "resume")]


def _wait_for(condition, process):
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while not condition():
        assert process.poll() is None, end(process)
        assert time.monotonic() < deadline
        time.sleep(0.1)
