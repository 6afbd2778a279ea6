"""What goes wrong in a run of several processes: all of them end with exit code 2 and one line of explanation."""

import fcntl

import pytest

from run_files import records

pytestmark = pytest.mark.distributed


def assert_one_line(ended, text, codes=(2, 2)):
    """All processes ended with their code, and together they said one line."""
    assert ended.codes == list(codes), ended
    lines = [line for err in ended.err for line in err.splitlines()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("etude: ")
    assert text in lines[0]


MISTAKES = {
    "misspelt key": ({"epoch": 3}, {}, "training.epoch: unknown key"),
    "data missing for the first process": ({}, {"data": {"name": "toy_missing"}}, "no data on rank 0"),
    "data missing for the second only": ({}, {"data": {"name": "toy_missing", "on_rank": 1}}, "no data on rank 1"),
    "one sample cannot be read": (
        {},
        {"data": {"name": "toy_dataset", "samples": 50, "bad": 7}},
        "sample 7 cannot be read",
    ),
    "sharded, a label that only the second sees": (
        {},
        {"data": {"name": "toy_classes", "mislabelled": 9}, "parallel": "fsdp"},
        "in validation, tried before the first step: labels out of range: found 7",
    ),
    "mistake in the backward pass of one": (
        {},
        {"model": {"name": "toy_tripwire"}},
        "a mistake in the backward pass",
    ),
    "batch smaller than the processes": ({"batch_size": 1}, {}, "must be at least 2"),
    "batch norm of one sample": ({}, {"model": {"name": "toy_net", "batch_norm": True}}, "drop_last=true"),
    "unused parameters": (
        {},
        {"model": {"name": "toy_unused"}},
        "unused in the loss: spare.weight, spare.bias;",
    ),
    "terms that come and go": ({}, {"loss": {"name": "toy_fickle"}}, "return sum 0"),
    "numbers that are not finite": (
        {"max_skipped_steps": 2, "gradient_clip_norm": None},
        {"optimizer": {"name": "sgd", "lr": 1e30}},
        "not finite in the last 2 steps",
    ),
    "checkpoint that cannot be written": (
        {"save_every_steps": 3},
        {"callbacks": [{"name": "toy_spoil", "step": 5}]},
        "cannot save",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_all_processes_with_one_line(runs, mistake):
    training, sections, text = MISTAKES[mistake]
    config = runs.write("run", training, **sections)
    assert_one_line(runs.train(2, config)[1], text)


def test_no_cuda_device_for_a_process_is_reported(runs):
    config = runs.write("run", {"device": "cuda"})
    assert_one_line(runs.train(2, config)[1], "device 'cuda' is not available")


def test_a_file_of_predictions_that_cannot_be_written(runs):
    command = ["predict", runs.root, "--data", runs.root / "x.npz", "--out", runs.root / "nowhere" / "x.csv"]
    assert_one_line(runs.server.run(2, command, runs.root / "logs"), "there is no folder")


def test_run_folders_that_cannot_be_used(runs):
    config = runs.write("run", {"epochs": 1})
    folder, ended = runs.train(2, config)
    ended.ok()
    assert_one_line(runs.train(2, config)[1], "already holds a run")
    assert_one_line(runs.resume(2, folder), "is finished")
    assert_one_line(runs.resume(2, folder / "nowhere"), "there is no run folder")
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_one_line(runs.resume(2, folder), "is in use by process")


def test_damaged_checkpoints(runs):
    config = runs.write("run", {"epochs": 2, "keep_best": 5})
    folder, ended = runs.train(2, config)
    ended.ok()
    older, newer = sorted((folder / "checkpoints").glob("step-*"))
    (newer / "model.safetensors").write_bytes(b"nothing")
    ended = runs.resume(2, folder, "training.epochs=3")
    assert ended.codes == [0, 0]
    assert len(ended.said) == 1
    assert "passed over" in ended.said[0]
    assert [one["epoch"] for one in records(folder, "val")] == [0, 1, 2]
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        (checkpoint / "model.safetensors").write_bytes(b"nothing")
    assert_one_line(runs.resume(2, folder, "training.epochs=4"), "is intact")
    assert older.exists()


def test_a_warning_is_printed_once(runs):
    sections = {"data": {"name": "toy_classes", "validation": 0}, "callbacks": [{"name": "early_stopping"}]}
    assert_one_line(
        runs.train(2, runs.write("run", {"epochs": 1}, **sections))[1], "EarlyStopping did nothing", codes=(0, 0)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_others(runs, rank):
    config = runs.write(
        "run", {}, callbacks=[{"name": "toy_signal", "step": 10, "rank": rank, "signal_name": "SIGKILL"}]
    )
    _, ended = runs.train(3, config)
    codes = [2, 2, 2]
    codes[rank] = -9
    assert_one_line(ended, "lost the connection to another process", codes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bug_in_one_process_shows_its_traceback_alone(runs, rank):
    config = runs.write("run", {}, callbacks=[{"name": "toy_crash", "step": 10, "rank": rank}])
    _, ended = runs.train(2, config)
    assert ended.codes[rank] == 1
    assert ended.codes[1 - rank] == 2
    assert "ZeroDivisionError: a bug in a callback" in ended.err[rank]
    assert not ended.err[1 - rank]


def test_a_second_signal_stops_at_once(runs):
    callback = {"name": "toy_signal", "step": 10, "rank": 0, "signal_name": "SIGINT", "times": 2}
    folder, ended = runs.train(2, runs.write("run", {"save_every_steps": 3}, callbacks=[callback]))
    assert ended.codes[0] == 130
    assert ended.codes[1] == 2
    assert any("stopped at once" in line and f"resume {folder}" in line for line in ended.said)
    assert not ended.err[1]
