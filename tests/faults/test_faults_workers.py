"""Programs with persistent data workers end, however they end, and leave no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults_runs import HERE, wait_for

LIMIT_S = 120


@pytest.fixture
def program():
    """Starts the program in a process group of its own and returns it with the ids of its workers."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "faults_workers.py"), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 2, process.stderr.read()
        return process, workers

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # ended, and nobody asked


@pytest.mark.parametrize(
    ("kind", "method", "ending", "code"),
    [
        ("etude", "fork", "normal", 0),
        ("torch", "fork", "exception", 1),
        ("etude", "spawn", "hangup", 0),
        ("torch", "fork", "terminate", 0),
        ("torch", "forkserver", "interrupt", 0),
    ],
)
def test_a_program_ends_and_its_workers_with_it(program, kind, method, ending, code):
    process, workers = program(kind, method, ending)
    assert process.wait(LIMIT_S) == code
    out, err = process.stdout.read(), process.stderr.read()
    assert not any(is_running(pid) for pid in workers)
    expected = {"normal": "8", "interrupt": "1 SIGINT", "terminate": "1 SIGTERM", "hangup": "1 SIGHUP"}
    assert out.strip() == expected.get(ending, "")
    assert ("Traceback" in err) == (ending == "exception"), err


@pytest.mark.parametrize(
    ("kind", "method", "number"), [("etude", "fork", signal.SIGKILL), ("torch", "fork", signal.SIGTERM)]
)
def test_workers_end_when_the_program_is_killed(program, kind, method, number):
    process, workers = program(kind, method, "wait")
    process.send_signal(number)
    assert process.wait(LIMIT_S) == -number
    wait_for(lambda: not any(is_running(pid) for pid in workers))
