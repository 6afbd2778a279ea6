"""A rank that hangs ends the run with one message, in time; what is only slow does not."""

import os
import re
import subprocess
import sys
import threading

import pytest
import torch.distributed
from distributed_runs import HERE, TIMEOUT_S
from test_distributed_launch import end, start

from etude.core.clock import Clock
from etude.distributed import World
from etude.distributed.stacks import place_of
from etude.distributed.watchdog import Report, Watchdog
from etude.monitor.jsonl import read_jsonl
from run_files import weights

pytestmark = pytest.mark.distributed

IMPORTS = [str(HERE / "distributed_toy.py"), str(HERE / "distributed_hangs.py")]
TRAINING = {"collective_timeout_s": 2.0, "save_every_steps": 3, "epochs": 2}
HEALTHY = {"loss": {"name": "toy_terms"}, "data": {"name": "toy_dataset"}, "callbacks": []}


def write(runs, name="run", training=None, **sections):
    return runs.write(name, {**TRAINING, **(training or {})}, imports=IMPORTS, **{**HEALTHY, **sections})


def assert_one_message(ended, *words, stopped=None):
    """All processes ended by themselves, but for one that was stopped, and together they said one line."""
    assert ended.codes == [-9 if rank == stopped else 2 for rank in range(len(ended.codes))], ended
    (line,) = [line for err in ended.err for line in err.splitlines()]
    for word in ("made no progress for 2 s", *words):
        assert word in line


HANGS = {
    "loss": ({"loss": {"name": "toy_endless_loss", "rank": 1}}, "rank 1 is at step 7 in hang_forever"),
    "loss of rank 0": ({"loss": {"name": "toy_endless_loss", "rank": 0}}, "rank 0 is at step 7 in hang_forever"),
    "data": ({"data": {"name": "toy_endless_data", "rank": 1}}, "rank 1 is at step 7 in hang_forever"),
    "workers": (
        {"data": {"name": "toy_endless_data", "rank": 1}, "training": {"num_workers": 1, "persistent_workers": True}},
        "rank 1 is at step 7 in ",
    ),
    "after an error": (
        {"callbacks": [{"name": "toy_stays"}, {"name": "toy_crash", "step": 5, "rank": 1}]},
        "rank 1 is at step 5 in hang_forever",
    ),
}


CASES = [pytest.param(name, marks=[] if name in ("loss of rank 0", "data") else pytest.mark.slow) for name in HANGS]


@pytest.mark.parametrize("hang", CASES)
def test_a_rank_that_hangs(runs, hang):
    sections, words = HANGS[hang]
    folder, ended = runs.train(3, write(runs, **sections))
    assert_one_message(ended, words)
    assert_one_message(ended, "ranks", "wait in", str(folder / "stacks.txt"))
    stacks = (folder / "stacks.txt").read_text()
    behind = int(re.search(r"\d", words).group())
    assert re.findall(r"^===== rank (\d)", stacks, re.MULTILINE)[0] == str(behind)
    assert sorted(re.findall(r"^===== rank (\d)", stacks, re.MULTILINE)) == ["0", "1", "2"]
    assert stacks.index("thread MainThread") < stacks.index("thread etude-")
    (end,) = [one for one in read_jsonl(folder / "events.jsonl") if one["kind"] == "end"]
    assert end["status"] == "failed"
    assert "made no progress" in end["message"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_process(runs, rank):
    folder, ended = runs.train(2, write(runs, callbacks=[{"name": "toy_stop", "step": 5, "rank": rank}]))
    assert_one_message(ended, f"rank {rank} does not respond", "its stack is unknown", stopped=rank)
    assert f"===== rank {1 - rank}" in (folder / "stacks.txt").read_text()


@pytest.mark.parametrize("all_wait", [True, False])
def test_ranks_that_all_wait_do_different_things(all_wait, capsys):
    """A callback requested a stop on one of them, for example: more time would not help."""
    reports = {
        rank: Report(rank, 6, waits=all_wait or rank == 0, may_take_long=False, where="f (x.py:1)", stacks="")
        for rank in range(2)
    }
    message = Watchdog(World(size=2), Clock(), 2.0)._judge(reports)
    assert ("must do the same on all ranks" in message) == all_wait
    assert ("raise training.collective_timeout_s" in message) != all_wait
    capsys.readouterr()  # the stacks


def test_a_hung_run_is_resumed(runs):
    straight, ended = runs.train(2, write(runs, "straight"))
    ended.ok()
    folder, _ = runs.train(2, write(runs, data={"name": "toy_endless_data"}))
    runs.resume(2, folder, "data=toy_dataset").ok()
    assert weights(folder) == weights(straight)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_process_is_killed_and_the_run_restarted_by_our_launcher(runs, rank):
    straight, ended = runs.train(2, write(runs, "straight"))
    ended.ok()
    config, folder = write(runs, callbacks=[{"name": "toy_stop", "step": 8, "rank": rank}]), runs.root / "run"
    code, out, err = end(start("train", config, "--nproc", 2, "-q", "--max-restarts", 1, "--run-dir", folder))
    assert code == 0, (out, err)
    assert len(err) == 2
    assert f"made no progress for 2 s: rank {rank} does not respond since step " in err[0]
    assert err[1] == "etude: the processes hung; restart 1 of 1"
    assert f"===== rank {1 - rank}" in (folder / "stacks.txt").read_text()
    assert weights(folder) == weights(straight)


@pytest.mark.slow
def test_a_hang_without_restarts_is_one_line_and_exit_code_1(runs):
    config = write(runs, loss={"name": "toy_endless_loss", "rank": 0})
    code, _, err = end(start("train", config, "--nproc", 2, "-q", "--run-dir", runs.root / "run"))
    assert (code, len(err)) == (1, 1)
    assert "rank 0 is at step 7 in hang_forever" in err[0]
    assert "etude resume" not in err[0]


def test_a_signal_to_stop_while_a_rank_hangs_does_not_wait_for_the_timeout(runs):
    """The other rank is inside a collective and hears no signal."""
    config = write(runs, training={"collective_timeout_s": 2000.0}, loss={"name": "toy_endless_loss", "stop": True})
    code, out, err = end(start("train", config, "--nproc", 2, "-q", "--run-dir", runs.root / "run"))
    assert (code, len(err)) == (130, 1), (out, err)
    assert "made no progress for 1 s after a signal to stop: rank 1 is at step 7 in hang_forever" in err[0]
    assert "===== rank 1" in (runs.root / "run" / "stacks.txt").read_text()


def test_noted_progress_and_the_last_save_in_the_background_may_take_longer(runs):
    """Rank 0 is busy after a step; and then writes, while all others have nothing left to do."""
    training = {"save_every_steps": None, "max_steps": 5, "async_save": True}
    slow = [{"name": "toy_slow_rank", "step": 4, "seconds": 3.5}]
    runs.train(2, write(runs, training=training, callbacks=slow))[1].ok()


def test_compiling_may_take_longer():
    """It is seen while a function is compiled, and not while the compiled function runs."""
    places = []

    def backend(graph, _inputs):
        places.append(place_of(threading.get_ident()).may_take_long)

        def run(*inputs):
            places.append(place_of(threading.get_ident()).may_take_long)
            return graph(*inputs)

        return run

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert places == [True, False]


def test_saving_and_validating_may_take_longer(runs):
    slow = [{"name": "toy_slow_save", "seconds": 4.5}]
    training = {"save_every_steps": None, "checkpoint_interval": 0, "epochs": 1}
    runs.train(2, write(runs, training=training, callbacks=slow))[1].ok()


STAYS = """
import atexit, os, sys, torch
from torch import nn
from etude import Callback, Trainer
from distributed_hangs import hang_forever

class Crash(Callback):
    def on_step_end(self, report):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("a bug in a callback")

x = torch.zeros(24, 4)
settings = {"epochs": 2, "batch_size": 8, "device": "cpu", "collective_timeout_s": 2.0}
trainer = Trainer(nn.Linear(4, 2), (x, x[:, 0].long()), config=settings, callbacks=[Crash()], progress=False)
atexit.register(hang_forever)  # called before the process leaves the others
trainer.train()
"""


@pytest.mark.slow
def test_a_process_that_failed_and_stays(tmp_path):
    """A script of a Python user: the process that failed does not end, and the other one says why it does."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    common = os.environ | world | {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STAYS],
            env=common | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        _, said = ranks[0].communicate(timeout=TIMEOUT_S)
        assert ranks[0].returncode == 2, said
        assert "rank 1 failed before (ZeroDivisionError: a bug in a callback)" in said
    finally:
        ranks[1].kill()
        ranks[1].communicate()


def warnings(folder):
    return [one["message"] for one in read_jsonl(folder / "events.jsonl") if one["kind"] == "warning"]


@pytest.mark.parametrize("end", ["finished", pytest.param("failed", marks=pytest.mark.slow)])
def test_warnings_of_other_ranks_reach_the_run(runs, end):
    callbacks = [{"name": "toy_warn", "step": 5, "rank": 2}]
    if end == "failed":  # in the step of the warning, before the next exchange
        callbacks.append({"name": "toy_crash", "step": 5, "rank": 2})
    folder, ended = runs.train(3, write(runs, callbacks=callbacks))
    known, own = "etude: all know this", "etude: [rank 2] only I know this"
    assert ended.said.count(known) == 1
    assert ended.said.count(own) == 1
    assert not any("[rank 1]" in line for line in ended.said)
    if end == "finished":
        assert warnings(folder) == ["[rank 2] only I know this"]


def test_a_slow_rank_is_named_once(runs):
    training = {"epochs": 6, "save_every_steps": None, "collective_timeout_s": 30.0}
    straight, ended = runs.train(2, write(runs, "fast", training, data={"name": "toy_slow"}))
    ended.ok()
    assert warnings(straight) == []
    slow = write(runs, "slow", training, data={"name": "toy_slow", "seconds": 0.025})
    folder, ended = runs.train(2, slow)
    assert ended.codes == [0, 0]
    (line,) = warnings(folder)
    assert line.startswith("rank 1 waits ")
    assert weights(folder) == weights(straight)


def test_a_rank_with_nan_alone(runs):
    """The gradients of all ranks are summed, so all of them skip the update."""
    config = write(runs, training={"max_skipped_steps": 4}, data={"name": "toy_nan"}, loss={"name": "cross_entropy"})
    _, ended = runs.train(2, config)
    assert ended.codes == [2, 2]
    (line,) = ended.said
    assert "not finite in the last 4 steps" in line


@pytest.mark.slow
def test_the_disk_of_rank_0_is_full(runs, tmp_path):
    """Only rank 0 writes; the other ranks end with it, and the run is resumed when there is space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        _, ended = runs.train(2, write(runs, training={"keep_best": 50, "epochs": 9}), name="disk/run")
        assert ended.codes == [2, 2]
        (line,) = ended.said
        assert "No space left on device" in line
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        runs.resume(2, disk / "run").ok()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
