"""Programs with persistent data workers end, however they end, and leave no process behind."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults_runs import HERE, wait_for
from faults_workers import num_workers
from torch.utils.data import DataLoader as TorchLoader, Dataset

from etude import Callback, DataLoader, Trainer
from etude.core import DataError

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
        assert len(workers) == num_workers(arguments[1]), process.stderr.read()
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


class Fragile(Dataset):
    """While the file is there, a worker that is to read sample 5 is killed, or fails."""

    def __init__(self, flag, kills):
        self.flag, self.kills = flag, kills

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 5 and self.flag.exists():
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("no picture 5")
        return torch.full((4,), float(index)), index % 2


class Touch(Callback):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def on_epoch_end(self, epoch, logs):
        self.flag.touch()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
# torch raises its error about a killed worker from a signal handler: anywhere, also while it opens a socket
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("kind", [DataLoader, TorchLoader])
@pytest.mark.parametrize(
    ("kills", "words"),
    [(True, "out-of-memory killer.*num_workers.*prefetch_factor"), (False, "no picture 5.*test_faults_workers.py:")],
)
def test_a_worker_that_is_killed_or_fails_is_one_line_and_the_run_resumes(tmp_path, kind, kills, words):
    def make(name, flag, callbacks=()):
        torch.manual_seed(0)
        loader = kind(Fragile(flag, kills), batch_size=4, num_workers=2, shuffle=True)
        config = {"epochs": 2, "device": "cpu"}
        folder = tmp_path / name
        model = torch.nn.Linear(4, 2)
        return Trainer(
            model, loader, config=config, callbacks=callbacks, output_dir=folder, resume=True, progress=False
        )

    straight = make("straight", tmp_path / "never")
    straight.train()
    flag = tmp_path / "flag"
    with pytest.raises(DataError, match=words) as error:
        make("run", flag, [Touch(flag)]).train()
    assert "\n" not in str(error.value)
    del error
    gc.collect()  # such a socket, in this test and not in one that follows
    flag.unlink()
    resumed = make("run", flag)
    assert resumed.state.clock.epoch == 1
    resumed.train()
    assert torch.equal(resumed.model.weight, straight.model.weight)


@pytest.mark.parametrize("kind", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_killed_while_it_hands_over_a_batch_is_the_same_line_and_an_error_of_the_source_is_left(kind):
    """What torch raises then is what its socket says, in the midst of building a tensor."""

    class Handle:
        def detach(self):
            raise kind("cut off")

    def batches(of_torch):
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
        if of_torch:
            torch.multiprocessing.reductions.rebuild_storage_fd(torch.UntypedStorage, Handle(), 4)
        raise kind("of my own")

    for of_torch, expected, words in ((True, DataError, "killed.*num_workers"), (False, kind, "of my own")):
        trainer = Trainer(
            torch.nn.Linear(4, 2), lambda of_torch=of_torch: batches(of_torch), config={"epochs": 1}, progress=False
        )
        with pytest.raises(expected, match=words):
            trainer.train()
