"""Signals while a step is recorded, compared or compiled: the run stops or is killed, and resumes to the same bytes."""

import signal

import pytest
from faults_runs import facts
from faults_speed import POINTS

SETTINGS = {"capture": ("training.capture=auto",), "compile": ("training.compile=step",)}
CHANGES = ("model={name: faults_net, dropout: 0.0}", "scheduler=null")
"""On the CPU dropout draws on the host and the optimizer reads its rate there: such steps are not recorded."""
SIGNALS = {
    "stop": ([signal.SIGTERM], 130),
    "stop at once": ([signal.SIGTERM, signal.SIGINT], 130),
    "kill": ([signal.SIGKILL], -signal.SIGKILL),
}
CASES = [(how, at, sent) for how, moments in POINTS.items() for at in moments for sent in SIGNALS]
COMPILED = [("compile", "backend", "stop"), ("compile", "run", "kill")]
SAMPLE = [*(case for case in CASES[::2] if case[0] == "capture"), *COMPILED]
"""Compiling takes seconds, even where it does nothing."""


@pytest.fixture(scope="module")
def undisturbed(etude, experiment, tmp_path_factory):
    """What runs leave that are recorded or compiled, and are sent no signal."""
    found = {}
    for how, settings in SETTINGS.items():
        folder = tmp_path_factory.mktemp(how) / "run"
        code, process = etude.run("train", experiment, "--run-dir", folder, *CHANGES, *settings, speed={"how": how})
        assert code == 0, process.err
        assert set(POINTS[how]) <= set(process.out.splitlines()[-1].split()), process.out
        found[how] = facts(folder)
    return found


def check(etude, experiment, folder, undisturbed, how, at, sent):
    signals, expected = SIGNALS[sent]
    speed = {"how": how, "at": at, "signals": [int(number) for number in signals]}
    code, process = etude.run("train", experiment, "--run-dir", folder, *CHANGES, *SETTINGS[how], speed=speed)
    assert code == expected, process.err
    assert not (folder / "result.json").exists()
    code, process = etude.run("resume", folder, speed={"how": how})
    assert code == 0, process.err
    assert facts(folder) == undisturbed[how]


@pytest.mark.parametrize(("how", "at", "sent"), SAMPLE)
def test_a_signal_at_a_moment_of_recording_or_compiling(etude, experiment, tmp_path, undisturbed, how, at, sent):
    check(etude, experiment, tmp_path / "run", undisturbed, how, at, sent)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "at", "sent"), [case for case in CASES if case not in SAMPLE])
def test_any_signal_at_any_moment_of_recording_or_compiling(etude, experiment, tmp_path, undisturbed, how, at, sent):
    check(etude, experiment, tmp_path / "run", undisturbed, how, at, sent)


def test_recorded_steps_leave_the_bytes_of_usual_ones(etude, experiment, tmp_path, undisturbed):
    code, process = etude.run("train", experiment, "--run-dir", tmp_path / "run", *CHANGES)
    assert code == 0, process.err
    assert facts(tmp_path / "run") == undisturbed["capture"]
