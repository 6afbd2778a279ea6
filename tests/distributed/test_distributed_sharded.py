"""Checkpoints of tensors that are divided among processes: any layout and number of them can load any other."""

import os
import random
import signal
import time

import pytest
import torch
from sharded_checks import FOLDER

from etude.checkpoint import CheckpointManager, newest_intact, read_checkpoint

pytestmark = pytest.mark.distributed


@pytest.fixture
def call(runs, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return lambda size, check: runs.call(size, check, {FOLDER: str(folder)}).ok()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_is_read_in_every_other(call, size):
    call(size, "written_and_read_in_any_layout")


@pytest.mark.parametrize("size", [2, 4])
def test_models_and_optimizers_of_any_layout(call, size):
    call(size, "modules_of_any_layout")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4), (4, 1)])
def test_another_number_of_processes(call, before, after):
    call(before, "write_for_other_sizes")
    call(after, "read_of_other_sizes")


@pytest.mark.parametrize(
    "check",
    [
        "what_is_refused",
        "failing_on_one_rank",
        "damage_is_found_by_one_rank_and_raised_by_all",
        "mismatches_change_nothing",
    ],
)
def test_mistakes_and_damage(call, check):
    call(2, check)


@pytest.mark.parametrize("check", ["saved_in_the_background", "background_writes_that_fail"])
def test_background(call, check):
    call(2, check)


def test_a_run_that_saves_in_the_background(runs):
    """Data parallel: rank 0 alone writes, all go on; files and resumed runs are those of plain saves."""
    plain = runs.write("plain", {"save_every_steps": 2, "keep_best": 99})
    background = runs.write("background", {"save_every_steps": 2, "keep_best": 99, "async_save": True})
    folders = []
    for config in (plain, background):
        folder, ended = runs.train(2, config)
        ended.ok()
        folders.append(folder / "checkpoints")
    names = sorted(path.name for path in folders[0].glob("step-*"))
    assert len(names) > 3
    assert names == sorted(path.name for path in folders[1].glob("step-*"))
    for name in names:
        left, right = (folder / name / "model.safetensors" for folder in folders)
        assert left.read_bytes() == right.read_bytes()
    events = (folders[1].parent / "events.jsonl").read_text()
    assert all(f"saved {name}" in events for name in names)


def kill_one_of_two(server, folder, log, rank: int, wait_s: float) -> int:
    """Kill a rank while all save in a loop; return the last number that all had finished before."""
    finished = folder / "finished"
    finished.unlink(missing_ok=True)
    log.mkdir(parents=True, exist_ok=True)
    request = {"size": 2, "argv": ["call", "write_until_killed"], "log": str(log), "env": {FOLDER: str(folder)}}
    pids = server._ask(start=request)["pids"]
    deadline = time.monotonic() + 60
    while not finished.exists():
        assert time.monotonic() < deadline, (log / "0.err").read_text()
        time.sleep(0.005)
    time.sleep(wait_s)
    os.kill(pids[rank], signal.SIGKILL)
    codes = server._ask(wait={"timeout": 60})["codes"]
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 1  # the other one lost it
    return int(finished.read_text())


def kills(server, tmp_path, number: int, seed: int) -> None:
    rng, left = random.Random(seed), 0
    for i in range(number):
        done = kill_one_of_two(server, tmp_path, tmp_path / "logs", rng.randrange(2), rng.uniform(0, 0.2))
        root = tmp_path / "run"
        path, warnings = newest_intact(root)
        checkpoint = read_checkpoint(path)
        found = checkpoint.state["number"]
        assert warnings == []
        assert found >= done
        expected = torch.full((20_000, 2), float(found))
        assert torch.equal(checkpoint.model_state["w"], expected)
        assert torch.equal(checkpoint.state["w"], expected)
        left += any(one.name.startswith(".tmp-") for one in root.iterdir())
        CheckpointManager(root).save(10**6 + i, model_state={}, state={"number": 0})  # cleans up
        assert not [one for one in root.iterdir() if one.name.startswith(".")]
        for one in root.iterdir():
            if one.is_symlink():
                one.unlink()
        for one in root.glob("step-*"):
            for file in one.iterdir():
                file.unlink()
            one.rmdir()
    assert number < 10 or left, "no kill of rank 0 hit a save: the test proves nothing"


def test_kill_9_of_a_rank(server, tmp_path):
    kills(server, tmp_path, 4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_of_a_rank_many_times(server, tmp_path, seed):
    kills(server, tmp_path, 15, seed)
