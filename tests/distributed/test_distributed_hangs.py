"""A rank that hangs ends the run with one message, in time; what is only slow does not."""

import re

import pytest
from distributed_runs import HERE

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
}


@pytest.mark.parametrize("hang", HANGS)
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process(runs, rank):
    folder, ended = runs.train(2, write(runs, callbacks=[{"name": "toy_stop", "step": 5, "rank": rank}]))
    assert_one_message(ended, f"rank {rank} does not respond", "its stack is unknown", stopped=rank)
    assert f"===== rank {1 - rank}" in (folder / "stacks.txt").read_text()


def test_a_hung_run_is_resumed(runs):
    straight, ended = runs.train(2, write(runs, "straight"))
    ended.ok()
    folder, _ = runs.train(2, write(runs, data={"name": "toy_endless_data"}))
    runs.resume(2, folder, "data=toy_dataset").ok()
    assert weights(folder) == weights(straight)


def test_saving_and_validating_may_take_longer(runs):
    slow = [{"name": "toy_slow_save", "seconds": 4.5}]
    training = {"save_every_steps": None, "checkpoint_interval": 0, "epochs": 1}
    runs.train(2, write(runs, training=training, callbacks=slow))[1].ok()


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
