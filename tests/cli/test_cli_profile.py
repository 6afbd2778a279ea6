"""`etude profile`: its report, its files, no run folder, and mistakes in one line."""

import errno
import json
import os
import signal

import pytest

from etude.experiment import load_experiment_config, profile_experiment


def test_a_profile_of_a_short_experiment(etude, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = ["tensorboard", {"name": "early_stopping", "patience": 1}, "device_stats", "profiler"]
    path = config(training={"epochs": 1, "batch_size": 8, "device": "cpu", "log_interval": 50}, callbacks=callbacks)
    done = etude("profile", path, "training.save_every_steps=40", "--steps", 4, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert done.err == ""
    assert "left out: tensorboard" in done.out
    for words in (
        "steps 10 to 13 on cpu",
        "data wait",
        "logging (1 in 50 steps)",
        "saving (1 in",
        "aten::",
        "memory",
    ):
        assert words in done.out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "profile.json",
        "profile.txt",
        "trace.json.gz",
    ]
    numbers = json.loads((tmp_path / "out/profile.json").read_text())
    assert numbers["intervals"]["logging"] == 50
    assert numbers["parts"]["logging"] == pytest.approx(numbers["each"]["logging"] / 50)
    assert numbers["parts"]["saving"] == pytest.approx(numbers["each"]["saving"] / numbers["intervals"]["saving"])
    assert not (tmp_path / "runs").exists()


def test_a_run_that_ends_too_early_is_no_interrupt(etude, config, tmp_path):
    parts = tmp_path / "parts.py"
    parts.write_text(
        "from etude import Callback, register\n"
        "@register('callback', 'enough')\n"
        "class Enough(Callback):\n"
        "    def on_step_end(self, report):\n"
        "        self.control.request_stop('it is enough')\n"
    )
    done = etude("profile", config(imports=[str(parts)], callbacks=["enough"]), "--out", tmp_path / "out")
    assert done.code == 2
    assert "ended after 1 steps (it is enough), before the profile" in done.error
    assert not (tmp_path / "out").exists()


def test_the_default_folder_and_again_in_the_same_one(etude, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = config()
    for _ in range(2):
        done = etude("profile", path, "--steps", 1, "--out", "out")
        assert done.code == 0, done.err
    done = etude("profile", path, "--steps", 1)
    (folder,) = (tmp_path / "profiles/toy").iterdir()
    assert f"{folder.relative_to(tmp_path)}/trace.json.gz" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training.epoch=3"], "did you mean 'epochs'"),
        (["--steps", "0"], "--steps"),
        (["training.device=cuda:77"], "cuda:77"),
        (["data.path=missing"], "data.path"),
    ],
)
def test_mistakes_leave_nothing_behind(etude, config, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    path = config()
    before = sorted(tmp_path.rglob("*"))
    done = etude("profile", path, *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_one_line(etude, config, tmp_path):
    (tmp_path / "file").write_text("")
    done = etude("profile", config(), "--out", tmp_path / "file/out")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1


def test_a_signal_stops_it_without_a_trace_of_it(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_experiment_config(config())

    def say(line):
        if "profiling" in line:
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    try:
        with pytest.raises(KeyboardInterrupt):
            profile_experiment(loaded, steps=5000, out=tmp_path / "out", say=say)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_written_are_not_said_to_be_made(etude, config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("etude.callbacks.profiler.Profiler.write", full)
    done = etude("profile", config(), "--steps", 1, "--out", tmp_path / "out")
    assert "No space left on device" in done.error
    assert "part of a step" in done.out
    assert "made" not in done.out
    assert not (tmp_path / "out").exists()
