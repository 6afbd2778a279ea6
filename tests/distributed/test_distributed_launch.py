"""`etude … --nproc 2`: the processes of a run are started, stopped, lost and restarted by one command."""

import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed_runs import TIMEOUT_S, without_announcements

from run_files import files_of, records, weights

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

NET = {"name": "toy_net", "dropout": 0.2, "batch_norm": True}
TRANSFORMER = {"name": "transformer_lm", "vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_len": 12}
TRAINING = {"epochs": 4, "batch_size": 12, "drop_last": True, "log_interval": 2, "save_every_steps": 2}


def start(*arguments, cwd=None):
    """Start `etude` with one thread for each process; it leads a session, so that a test can end all of it."""
    return subprocess.Popen(
        [sys.executable, "-m", "etude", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def end(process):
    """Return exit code, stdout and the lines on stderr without announcements."""
    out, err = process.communicate(timeout=2 * TIMEOUT_S)
    return process.returncode, out, without_announcements(err).splitlines()


def workers(process):
    """Return the processes that a launcher has started."""
    try:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(one) for one in found if b"etude" in _read(f"/proc/{one}/cmdline")]


def _read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def all_end(pids):
    """At the end, wait until these processes have ended: closed pipes come before that."""
    with contextlib.ExitStack() as stack:
        processes = [os.pidfd_open(pid) for pid in pids]
        for process in processes:
            stack.callback(os.close, process)
        yield
        for process in processes:
            assert select.select([process], [], [], TIMEOUT_S)[0], "a process was left behind"


def lines_until(process, text):
    """Read the output of a process up to a line with this text."""
    found = []
    while line := process.stdout.readline():
        found.append(line)
        if text in line:
            return found
    raise AssertionError((found, process.stderr.read()))


def test_the_same_as_two_processes_of_torchrun_and_as_quiet(runs):
    straight, ended = runs.train(2, runs.write("straight", TRAINING, model=NET))
    ended.ok()
    code, out, err = end(
        start("train", runs.root / "straight.yaml", "--nproc", 2, "-q", "--run-dir", runs.root / "run")
    )
    assert (code, err) == (0, [])
    assert out.splitlines()[0] == "starting 2 processes, 1 CPU thread each (OMP_NUM_THREADS)"
    assert out.count("finished at step 16;") == 1
    assert weights(runs.root / "run") == weights(straight)
    assert records(runs.root / "run") == records(straight)


def test_a_mistake_is_one_line_and_restarts_nothing(runs):
    config = runs.write("bad", TRAINING, data={"name": "toy_missing", "on_rank": 1})
    code, out, err = end(
        start("train", config, "--nproc", 2, "-q", "--max-restarts", 3, "--run-dir", runs.root / "run")
    )
    assert code == 2
    assert len(err) == 1
    assert "no data on rank 1" in err[0]
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "here_too"),
    [("SIGTERM", False), ("SIGTERM", True), pytest.param("SIGINT", False, marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_resuming_is_exact(runs, name, here_too):
    straight, ended = runs.train(2, runs.write("straight", TRAINING, model=NET))
    ended.ok()
    callbacks = [{"name": "toy_signal_launcher", "step": 5, "signal_name": name, "here_too": here_too}]
    config, folder = runs.write("stopped", TRAINING, model=NET, callbacks=callbacks), runs.root / "run"
    code, out, err = end(start("train", config, "--nproc", 2, "-q", "--run-dir", folder, "--max-restarts", 2))
    said = ["etude: stopping after this step; press Ctrl-C again to stop at once"] if name == "SIGINT" else []
    assert (code, err) == (130, said)
    step, command = re.findall(r"^stopped at step (\d+) and saved; [^:]+: (.*)$", out, re.MULTILINE)[0]
    assert 5 <= int(step) <= 10
    assert command == f"etude resume {folder} --nproc 2 --max-restarts 2"
    code, out, err = end(start(*command.split()[1:], "-q", "callbacks=[]"))
    assert (code, err) == (0, [])
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


def test_a_signal_after_the_end_does_not_make_a_finished_run_look_stopped(runs):
    config = runs.write("run", TRAINING)
    launcher = start("train", config, "--nproc", 2, "-q", "--run-dir", runs.root / "run")
    lines_until(launcher, "finished at step 16;")
    launcher.send_signal(signal.SIGTERM)  # while the interpreters of the processes shut down
    code, _, err = end(launcher)
    assert (code, err) == (0, [])


def test_a_second_signal_stops_at_once(runs):
    config = runs.write(
        "long",
        TRAINING | {"epochs": 10_000, "save_every_steps": None},
        callbacks=[{"name": "toy_told", "forever": True}],
    )
    launcher = start("train", config, "--nproc", 2, "--run-dir", runs.root / "run")
    lines_until(launcher, "training\n")
    with all_end(workers(launcher)):
        launcher.send_signal(signal.SIGINT)
        lines_until(launcher, "press Ctrl-C again")
        launcher.send_signal(signal.SIGINT)
        code, _, err = end(launcher)
    assert code == 130
    assert all("stopped at once" in line for line in err)


@pytest.mark.parametrize("whom", ["launcher", "process"])
def test_kill_9_leaves_no_process_behind(runs, whom):
    config = runs.write("long", TRAINING | {"epochs": 10_000}, callbacks=["toy_told"])
    launcher = start("train", config, "--nproc", 2, "-q", "--run-dir", runs.root / "run")
    lines_until(launcher, "training\n")
    pids = workers(launcher)
    assert len(pids) == 2
    with all_end(pids):
        os.kill(launcher.pid if whom == "launcher" else pids[1], signal.SIGKILL)
        code, _, err = end(launcher)
    if whom == "process":
        assert code == 128 + signal.SIGKILL
        assert len(err) == 1
        assert "process 1 of 2 was killed by SIGKILL" in err[0]


def saved_steps(folder):
    """Return the step of the newest checkpoint of a run, 0 if there is none yet."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def begun(folder):
    """Return how many attempts of a run have begun."""
    events = _read(folder / "events.jsonl").decode()
    return events.count('"kind": "start"') + events.count('"kind": "resume"')


LAYOUTS = {
    "ddp": {"model": NET},
    "fsdp": {"model": {**NET, "batch_norm": False}, "parallel": "fsdp"},
    "tensor": {"data": "toy_text", "model": TRANSFORMER, "parallel": {"tensor": 2}},
}
KILLED = [("fsdp", True, 1), *((layout, way, 6) for layout in LAYOUTS for way in (False, True)), ("ddp", False, 20)]


@pytest.mark.parametrize(
    ("layout", "in_background", "kills"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[2] > 1), id="-".join(map(str, case))) for case in KILLED],
)
def test_processes_killed_at_random_moments_are_restarted_and_end_with_the_same_bytes(
    runs, layout, in_background, kills
):
    training = TRAINING | {"save_every_steps": 1, "epochs": 4 + kills, "async_save": in_background}
    callbacks = [{"name": "toy_told", "step": -1, "seconds": 0.1}]
    config, straight = (
        runs.write("straight", training, callbacks=callbacks, **LAYOUTS[layout]),
        runs.root / "straight",
    )
    code, _, err = end(start("train", config, "--nproc", 2, "-q", "--run-dir", straight))
    assert (code, err) == (0, [])
    command = ["train", config, "--nproc", 2, "-q", "--max-restarts", kills]
    launcher, moments, folder = start(*command, cwd=runs.root), random.Random(kills), runs.root
    last = records(straight)[-1]["step"] - 10  # a second before the end, so that every kill hits a training
    for restart, step in enumerate(sorted(moments.sample(range(1, last), kills))):
        while begun(folder) <= restart or saved_steps(folder) < step:
            assert launcher.poll() is None, end(launcher)
            time.sleep(0.01)
            folder = next(runs.root.glob("runs/straight/*"), folder)
        time.sleep(moments.uniform(0, 0.2))  # any moment of the steps after it
        os.kill(moments.choice(workers(launcher)), signal.SIGKILL)
    code, out, err = end(launcher)
    assert code == 0, "\n".join([out, *err])
    words = "etude: process . of 2 was killed by SIGKILL .out of memory.*; restart "
    assert [re.sub(words, "", line) for line in err] == [f"{number + 1} of {kills}" for number in range(kills)]
    assert files_of(folder) == files_of(straight)
    assert records(folder) == records(straight)


def world(restart):
    return {"TORCHELASTIC_RUN_ID": "toy", "TORCHELASTIC_RESTART_COUNT": str(restart)}


def test_from_two_processes_to_one_and_back_the_run_goes_on(runs):
    """As an elastic launcher does it: the same command again, in as many processes as there are now."""
    training = {"epochs": 3, "save_every_steps": 1}
    straight, ended = runs.train(1, runs.write("straight", training))
    ended.ok()
    config, folder = runs.write("lost", training, callbacks=["toy_kill"]), runs.root / "run"
    command = ["train", config, "-q", "--run-dir", folder]
    for restart, (size, kill_at) in enumerate([(2, "0"), (2, "5"), (1, "11"), (2, "15"), (2, "")]):
        log, env = runs.root / f"logs-{restart}", world(restart) | {"TOY_KILL_AT": kill_at}
        ended = runs.server.run(size, command, log, env)
        assert (-9 in ended.codes) == bool(kill_at), ended
    assert set(ended.codes) == {0}
    for mine, theirs in zip(records(folder, "train"), records(straight, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    begun = [(one["processes"], one["restart"]) for one in events if one["kind"] in ("start", "resume")]
    assert begun == [(2, 0), (2, 1), (1, 2), (2, 3), (2, 4)]
