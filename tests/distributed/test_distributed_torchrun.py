"""The real thing: `torchrun --nproc-per-node 2 -m etude`, trained, stopped by a signal, resumed."""

import os
import re
import subprocess
import sys

import pytest
import torch.distributed
from distributed_runs import HERE, TIMEOUT_S

from run_files import records, weights

pytestmark = pytest.mark.distributed

NET = {"name": "toy_net", "dropout": 0.2, "batch_norm": True}
# With data workers: torchrun passes a signal on to them too, and they must live on until the run has ended.
SIGNAL = {"name": "toy_signal_launcher", "step": 5}
DATA = {"name": "toy_dataset"}
TRAINING = {"epochs": 4, "batch_size": 12, "drop_last": True, "log_interval": 2, "num_workers": 1}


def torchrun(*arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize("resumed_by", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_train_stop_and_resume(runs, resumed_by):
    straight, ended = runs.train(2, runs.write("straight", TRAINING, model=NET, data=DATA))
    ended.ok()
    config = runs.write("stopped", TRAINING, model=NET, data=DATA, callbacks=[SIGNAL])
    folder = runs.root / "run"
    first = torchrun("-m", "etude", "train", config, "--run-dir", folder)
    said = re.findall(r"^stopped at step (\d+) and saved; [^:]+: (.*)$", first.stdout, re.MULTILINE)
    assert len(said) == 1, first
    assert first.stdout.count("stopping after this step") == 1
    step, command = said[0]
    assert 5 <= int(step) <= 10
    assert command == f"torchrun --nproc-per-node 2 -m etude resume {folder}"
    assert [one["step"] for one in records(folder, "train")][-1] <= int(step)
    if resumed_by == "forks":
        runs.resume(2, folder, "callbacks=[]").ok()
    else:
        second = torchrun("-m", "etude", "resume", folder, "callbacks=[]")
        assert second.returncode == 0, second
        assert second.stdout.count("finished at step 16;") == 1
        assert "Warning" not in second.stderr
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


SCRIPT = """
import torch
from torch import nn
from etude import Trainer

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
trainer = Trainer(nn.Linear(4, 2), (x, (x[:, 0] > 0).long()), config={"epochs": 2, "batch_size": 8, "device": "cpu"})
trainer.train()
"""


@pytest.mark.slow
def test_a_script_of_a_python_user(tmp_path):
    """The same lines as with one process; nobody has to think of process groups."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = torchrun(script)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("finished") == 1
    assert "destroy_process_group" not in ended.stderr
    assert "Warning" not in ended.stderr


LEAVING = """
import sys
import torch
import torch.distributed as dist
from etude.distributed.world import join_world, run_collective

world = join_world("cpu")  # kept, as a script keeps its trainer: the threads of gloo live on
sys.setswitchinterval(60)  # they release one tensor each time this thread waits
run_collective(lambda *rows: dist.group.WORLD.allreduce_coalesced([*rows]).wait(), *torch.zeros(20000, 1))
"""


def test_a_script_may_end_while_gloo_holds_its_tensors():
    """Without waiting for gloo's threads the process is aborted: they take the GIL of an interpreter that is gone."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = os.environ | world | {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVING], env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(runs):
    config = runs.write("bad", TRAINING, data={"name": "toy_missing", "on_rank": 1})
    ended = torchrun("-m", "etude", "train", config, "--run-dir", runs.root / "run")
    assert ended.returncode != 0
    assert ended.stderr.count("no data on rank 1") == 1
    assert "lost the connection" not in ended.stderr
    assert str(HERE.parent.parent / "src") not in ended.stderr  # no traceback of ours
