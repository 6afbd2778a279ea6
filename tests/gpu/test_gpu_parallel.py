"""On a CUDA device: processes that share it train like one, whatever they divide."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_ranks import CASES, RANKS
from torch.distributed import TCPStore

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("gpu_ranks.py")
TIMEOUT_S = 240
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
"""No TF32, whose rounding the division of a batch changes."""


NCCL = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth,en,lo"}
"""NCCL refuses two processes on a device unless they seem to be on different hosts, which talk by sockets."""


def stacks_of(process):
    """End a process that hangs; it writes where its threads were into its log."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
    return process.wait()


@pytest.mark.parametrize("case", CASES)
def test_processes_on_one_device_train_like_one(case, tmp_path):
    ranks = RANKS[case]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port of its own
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    running = []
    for rank in range(ranks):
        env = os.environ | shared | EXACT | NCCL | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
        with (tmp_path / f"{rank}.txt").open("w") as log:
            command = [sys.executable, "-X", "faulthandler", SCRIPT, case]
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [one.wait(timeout=TIMEOUT_S) for one in running]
    except subprocess.TimeoutExpired:
        codes = [stacks_of(one) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert codes == [0] * ranks, "\n".join((tmp_path / f"{rank}.txt").read_text()[-3000:] for rank in range(ranks))
