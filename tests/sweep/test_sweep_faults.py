"""Sweeps that are killed, interrupted or shared: no trial is lost, none runs twice, and the bytes are the same."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from etude.core import RunFolderError
from etude.sweep import SweepFolder, run_sweep
from etude.sweep.folder import _JournalLock

LIMIT_S = 300
SPACE = ("optimizer.lr=0.01,0.02", "--dir", "s")


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "etude", "sweep", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_until(condition, process) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def events(run: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_sweep_continues_its_trial_with_the_same_bytes(etude, points, same_weights, how):
    Path("hold").touch()
    sweep = start(points, *SPACE)
    wait_until(Path("reached").exists, sweep)
    trial = Path("s/trial-0000")
    pid = json.loads((trial / "status.json").read_text())["pid"]
    if how == signal.SIGINT:
        os.killpg(sweep.pid, how)  # as a terminal does; trials have groups of their own
        wait_until(lambda: "stopping" in (trial / "output.txt").read_text(), sweep)
        Path("hold").unlink()
        out, err = sweep.communicate()
        assert sweep.returncode == 130, err
        assert "press Ctrl-C again" in out
        assert "continue with: etude sweep s" in out
        assert "Traceback" not in err
    else:
        for one in (sweep.pid, pid):
            os.kill(one, how)
        sweep.communicate()
        Path("hold").unlink()
    assert events(trial).count("end") == (how == signal.SIGINT)
    assert etude("sweep", "status", "s").out.splitlines()[1].split()[:2] == ["0", "stopped"]
    done = etude("sweep", "s")
    assert done.code == 0, done.err
    assert "trial 0 is continued" in done.out
    assert "2 of 2 trials: 2 complete" in done.out
    assert events(trial).count("resume") == 1
    same_weights(trial, "optimizer.lr=0.01")


def test_the_dashboard_sees_the_last_values_of_a_stopped_sweep(points, monkeypatch):
    monkeypatch.setattr("etude.sweep.trials_file.EVERY_S", math.inf)  # not by chance a moment before
    Path("hold").touch()

    def stop():
        while not (Path("reached").exists() and '"val"' in Path("s/trial-0000/metrics.jsonl").read_text()):
            time.sleep(0.01)
        time.sleep(1)  # the sweep reads the values every 0.2 s
        Path("hold").unlink()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    outcome = run_sweep(points, ["optimizer.lr=0.01,0.02", "training.epochs=2000"], run_dir="s")
    thread.join()
    assert outcome.status == "interrupted"
    (trial,) = json.loads(Path("s/trials.json").read_text())["trials"]
    assert (trial["number"], trial["state"]) == (0, "running")
    assert trial["value"] > 0


@pytest.mark.slow
def test_trials_of_a_killed_sweep_save_and_stop(etude, points):
    Path("hold").touch()
    sweep = start(points, *SPACE)
    wait_until(Path("reached").exists, sweep)
    trial = Path("s/trial-0000")
    sweep.kill()
    sweep.wait()  # its output stays open until the trial has stopped
    Path("hold").unlink()
    sweep.communicate()
    while json.loads((trial / "status.json").read_text())["state"] == "running":
        time.sleep(0.01)
    assert json.loads((trial / "status.json").read_text())["state"] in ("interrupted", "stopped")
    assert etude("sweep", "s").code == 0


def test_a_killed_process_of_a_trial_is_started_again(etude, points, same_weights):
    Path("die").touch()
    done = etude("sweep", points, *SPACE)
    assert done.code == 0, done.err
    assert "trial 0: its process was killed; continuing" in done.out
    assert "2 of 2 trials: 2 complete" in done.out
    same_weights(Path("s/trial-0000"), "optimizer.lr=0.01")


def test_trials_outlive_the_process_that_forks_them(etude, points, same_weights):
    """Its end says nothing about the trials: one that still runs is waited for, and does not count as failed."""
    Path("hold").touch()
    sweep = start(points, *SPACE)
    wait_until(Path("reached").exists, sweep)
    trial = json.loads(Path("s/trial-0000/status.json").read_text())["pid"]
    server = int(Path(f"/proc/{trial}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    assert "trial 0 still runs" in [*zip(range(2), sweep.stdout, strict=False)][1][1]
    Path("hold").unlink()
    out, err = sweep.communicate()
    assert sweep.returncode == 0, err
    assert "2 of 2 trials: 2 complete" in out
    assert "resume" not in events(Path("s/trial-0000"))
    same_weights(Path("s/trial-0000"), "optimizer.lr=0.01")


def test_two_processes_share_a_sweep_and_no_trial_runs_twice(etude, points):
    values = ",".join(str(0.01 * number) for number in range(1, 13))
    words = [points, f"optimizer.lr={values}", "training.epochs=2", "--dir", "s", "--workers", 2]
    other = start(*words)
    wait_until(Path("s/trial-0000/config.yaml").exists, other)
    done = etude("sweep", *words)
    out, err = other.communicate()
    assert (done.code, other.returncode) == (0, 0), done.err + err
    study = SweepFolder("s").study()
    assert sorted(trial.params["optimizer.lr"] for trial in study.trials) == [float(one) for one in values.split(",")]
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)
    for number in range(12):
        assert [kind for kind in events(Path("s", f"trial-{number:04d}")) if kind in ("start", "resume")] == ["start"]
    counts = [sum(line.startswith("trial ") for line in text.splitlines()) for text in (done.out, out)]
    assert sum(counts) == 12
    assert min(counts) >= 1


def test_a_line_of_the_journal_that_was_cut_off_is_dropped(etude, points):
    assert etude("sweep", points, *SPACE, "training.epochs=1").code == 0
    journal = Path("s/journal.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    lock = _JournalLock(journal)
    lock.acquire()
    lock.release()
    assert journal.read_bytes().endswith(b"}\n")
    assert "2 of 2" in etude("sweep", "status", "s").out


def test_a_sweep_is_continued_as_it_was(etude, points):
    assert etude("sweep", points, *SPACE, "training.epochs=1").code == 0
    other = etude("sweep", points, "optimizer.lr=0.01,0.03", "training.epochs=1", "--dir", "s")
    assert "holds another sweep (space differ" in other.error
    Path("points.yaml").write_text(Path("points.yaml").read_text().replace("dropout: 0.1", "dropout: 0.2"))
    assert "has changed since the sweep" in etude("sweep", "s").error


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("mode: min", "mode: max", "mode"),
        ("metric: val_loss", "metric: loss", "metric"),
        ("- 0.02", "- 0.03", "space"),
    ],
)
def test_a_sweep_file_that_was_edited_in_its_folder_is_refused(etude, points, old, new, key):
    """Its trials were compared, or chosen, in another way."""
    assert etude("sweep", points, *SPACE, "--trials", 1, "training.epochs=1").code == 0
    file = Path("s/sweep.yaml")
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    for words in (["s", "--trials", 2], ["status", "s"], ["best", "s"], ["plot", "s"]):
        assert f"another sweep ({key} differ" in etude("sweep", *words).error


def test_sweeps_whose_folders_have_the_same_name_do_not_share_a_study(etude, points):
    database = ["training.epochs=1", "--storage", "sqlite:///s.db"]
    assert etude("sweep", points, *SPACE, *database).code == 0
    other = etude("sweep", points, "model.dropout=0.1,0.2", "--dir", "other/s", *database)
    assert "another sweep (space differ" in other.error
    Path("other.yaml").write_text(points.read_text())
    other = etude("sweep", "other.yaml", "optimizer.lr=0.01,0.02", "--dir", "another/s", *database)
    assert "another sweep (experiment differ" in other.error
    assert "there is no study 's'" in etude("sweep", "status", "s", "--storage", "sqlite:///new.db").error


@pytest.mark.parametrize("arguments", [["sweep.yaml", "--dir", "."], ["."], [".", "--trials", 1]])
def test_a_folder_with_a_sweep_file_of_the_user_is_no_sweep(etude, points, arguments):
    text = f"experiment: {points}\nspace: {{optimizer.lr: [0.01, 0.02]}}\nmetric: val_loss\nmode: min\n"
    Path("sweep.yaml").write_text(text)
    assert "no sweep has begun in ." in etude("sweep", *arguments).error
    assert Path("sweep.yaml").read_text() == text


def test_a_sweep_does_not_begin_in_the_folder_of_a_run(etude, points):
    assert etude("train", points, "training.epochs=1", "--run-dir", "run", "-q").code == 0
    before = sorted(Path("run").iterdir())
    assert "run holds a run" in etude("sweep", points, "optimizer.lr=0.01,0.02", "--dir", "run").error
    assert sorted(Path("run").iterdir()) == before


def test_an_experiment_that_is_edited_while_its_sweep_runs_ends_it(points):
    """Trials of two experiments cannot be compared. With the old text the sweep goes on."""
    text = points.read_text()

    def say(line):
        if line.startswith("trial 0"):
            points.write_text(text.replace("dropout: 0.1", "dropout: 0.2"))

    words = ["optimizer.lr=0.01,0.02,0.03", "training.epochs=1"]
    with pytest.raises(RunFolderError, match="has changed since the sweep in s began"):
        run_sweep(points, words, run_dir="s", say=say)
    assert not Path("s/trial-0001/config.yaml").exists()
    points.write_text(text)
    outcome = run_sweep("s")
    assert [trial.params["optimizer.lr"] for trial in outcome.study.trials] == [0.01, 0.02, 0.03]
    assert {trial.state.name for trial in outcome.study.trials} == {"COMPLETE"}


@pytest.mark.slow
@pytest.mark.distributed
def test_trials_of_several_processes(etude, points):
    done = etude("sweep", points, "optimizer.lr=0.01,0.02", "training.epochs=1", "--nproc", 2, "--dir", "s")
    assert done.code == 0, done.err + Path("s/trial-0000/output.txt").read_text()
    assert "2 of 2 trials: 2 complete" in done.out
    assert "etude train b.yaml --nproc 2\n" in etude("sweep", "best", "s", "--out", "b.yaml").out


def test_a_full_disk_stops_the_sweep_and_not_the_trial(etude, points, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(SweepFolder, "is_full", lambda _: True)
        done = etude("sweep", points, "optimizer.lr=1e30,0.02", "--dir", "s")
    assert done.code == 2
    assert "No space left on device" in done.error
    assert "continue with: etude sweep s" in done.error
    assert etude("sweep", "status", "s").out.splitlines()[1].split()[:2] == ["0", "stopped"]
    done = etude("sweep", "s")  # there is room again, so that the reason is the trial
    assert "trial 0  failed: the loss" in done.out
    assert "1 failed, 1 complete" in done.out


FORKSERVER = """
import signal
from multiprocessing import forkserver
from etude.sweep.launch import start_server

start_server()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
status = open(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read()
print(bool(int(status.split("SigIgn:")[1].split()[0], 16) & 1 << signal.SIGINT - 1))
"""


def test_the_process_that_imports_torch_leaves_ctrl_c_to_the_sweep():
    done = subprocess.run([sys.executable, "-c", FORKSERVER], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_disk_with_room_is_not_full(tmp_path):
    assert not SweepFolder(tmp_path).is_full()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_has_one_study(etude, points):
    words = "sweep", points, "optimizer.lr=0.01,0.02", "training.epochs=1", "--dir"
    assert etude(*words, "a", "--storage", "sqlite:///a.db").code == 0
    assert "pass the same --storage" in etude(*words, "a").error
    assert etude(*words, "b").code == 0
    assert "leave out --storage" in etude(*words, "b", "--storage", "sqlite:///a.db").error
    assert "trial-0000 holds a run" in etude(*words, "a", "--storage", "sqlite:///other.db").error


def test_a_trial_that_was_killed_while_its_values_were_chosen(etude, points):
    """Optuna writes a trial before its values: a sweep killed in between must lose no point of its grid."""
    assert etude("sweep", points, *SPACE, "training.epochs=1").code == 0
    journal = Path("s/journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    values = [number for number, line in enumerate(lines) if json.loads(line)["op_code"] == 5]
    journal.write_text("".join(lines[: values[-1]]))  # 5 sets a value
    (last := Path("s/trial-0001")).rename("moved")
    done = etude("sweep", "s")
    assert done.code == 0, done.err
    assert "2 of 2 trials: 2 complete" in done.out
    assert [trial.params["optimizer.lr"] for trial in SweepFolder("s").study().trials] == [0.01, 0.02]
    assert last.is_dir()


def test_a_pruner_that_can_prune_nothing_is_named(etude, points):
    done = etude("sweep", points, *SPACE, "training.epochs=1", "--pruner", "median")
    assert done.out.count("no trial can be pruned") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_all_processes_of_a_trial_end_when_it_is_stopped_at_once(points):
    Path("hold").touch()
    sweep = start(points, *SPACE, "--nproc", 2)
    wait_until(Path("reached").exists, sweep)
    pid = json.loads(Path("s/trial-0000/status.json").read_text())["pid"]
    os.killpg(sweep.pid, signal.SIGINT)
    while "press Ctrl-C again" not in sweep.stdout.readline():
        assert sweep.poll() is None
    os.killpg(sweep.pid, signal.SIGINT)
    _, err = sweep.communicate()
    assert sweep.returncode == 130
    assert "stopped at once" in err
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_exception_in_several_processes_is_the_reason_and_nothing_is_repeated(etude, points):
    Path("fail").touch()
    done = etude("sweep", points, *SPACE, "--nproc", 2)
    assert done.out.count("failed: RuntimeError: shapes do not match") == 2
    assert events(Path("s/trial-0000")).count("start") == 1
    assert "resume" not in events(Path("s/trial-0000"))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_or_failed_process_of_several(etude, points):
    Path("die").touch()
    done = etude("sweep", points, "optimizer.lr=0.01,1e30", "--nproc", 2, "--dir", "s")
    assert "trial 0: its process was killed; continuing" in done.out
    assert "trial 1  failed: the loss or its gradients" in done.out
    assert "1 complete, 1 failed" in done.out
