"""The options of `--nproc`, and what its processes know of it: what is refused, and what is reported at the end."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from typer.testing import CliRunner

from etude.cli.main import _load, app
from etude.core.errors import ConfigError
from etude.distributed import before_joining, join_world
from etude.distributed.launch import Agent
from etude.distributed.launch_options import LaunchOptions
from etude.distributed.settings import ParallelConfig
from etude.launched import LAUNCHER, STOP_FILE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nproc": "0"}, "--nproc 0"),
        ({"nproc": ""}, "--nproc ''"),  # a variable of the shell that is not set
        ({"nnodes": ""}, "--nnodes ''"),
        ({"nproc": "many"}, "--nproc many"),
        ({"nnodes": "2:1", "rdzv_endpoint": "a:1"}, "--nnodes 2:1"),
        ({"nnodes": "two"}, "--nnodes two"),
        ({"nnodes": "2"}, "--rdzv-endpoint"),
        ({"nproc": "2", "rdzv_endpoint": "a:1"}, "add --nnodes"),
        ({"nproc": "2", "node_rank": 0}, "add --nnodes"),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "node_rank": 2}, "--node-rank 2"),
        ({"nnodes": "2", "rdzv_endpoint": "a"}, "--rdzv-endpoint a"),
        ({"max_restarts": -1}, "--max-restarts -1"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(ConfigError, match=words):
        _ = LaunchOptions(**options).processes


@pytest.mark.parametrize("plan", [{}, {"0": "replicated"}])
def test_a_tensor_plan_that_divides_nothing_is_refused(plan):
    with pytest.raises(ValueError, match="tensor_plan divides no layer"):
        ParallelConfig(tensor=2, tensor_plan=plan)


def test_threads_and_words(monkeypatch):
    monkeypatch.setattr("etude.distributed.launch_options._cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LaunchOptions(nproc="4").threads == "4"
    assert LaunchOptions(nproc="32").threads == "1"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert LaunchOptions(nproc="auto").processes == 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert LaunchOptions(nproc="auto").processes == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    elastic = LaunchOptions(nproc="4", nnodes="1:2", rdzv_endpoint="node1:29400", max_restarts=2)
    assert str(elastic) == "4 processes on each of 1 to 2 machines, 3 CPU threads each (OMP_NUM_THREADS)"
    assert elastic.shape == "--nproc 4 --nnodes 1:2 --rdzv-endpoint node1:29400 --max-restarts 2"


def test_not_within_another_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    ended = CliRunner().invoke(app, ["train", "lenet5/baseline", "--nproc", "2"])
    assert ended.exit_code == 2
    assert "leave out --nproc" in ended.output


def test_a_dry_run_needs_a_process():
    ended = CliRunner().invoke(app, ["train", "lenet5/baseline", "--dry-run", "--world", "0"], env=dict(os.environ))
    assert ended.exit_code == 2
    assert "--world 0: must be from 1" in ended.output


def test_world_is_for_a_dry_run():
    ended = CliRunner().invoke(app, ["train", "lenet5/baseline", "--world", "2"], env=dict(os.environ))
    assert ended.exit_code == 2
    assert "--dry-run" in ended.output


@pytest.mark.parametrize("option", [["--nproc", "4"], ["--nnodes", "1"]])
def test_a_dry_run_takes_the_number_of_all_processes_or_of_those_here(option):
    command = ["train", "lenet5/baseline", "--dry-run", "--world", "2", *option]
    ended = CliRunner().invoke(app, command, env=dict(os.environ))
    assert ended.exit_code == 2
    assert "--world" in ended.output


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1"}, "only RANK is set"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "from 0 to 1"),
    ],
)
def test_variables_of_a_launcher_that_do_not_fit_are_refused(monkeypatch, variables, words):
    """Each process would train alone, or the others would wait for one that never comes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        join_world("cpu")


def test_a_world_of_one_needs_no_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_world("cpu").size == 1


def test_an_error_of_any_process_before_they_have_joined_is_reported_once(monkeypatch, tmp_path):
    """Only this one may have it: a module that could not be imported because another process writes a file."""
    for name, value in {LAUNCHER: os.getppid(), STOP_FILE: tmp_path / "stop", "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    errors = [ConfigError("cannot import"), ConfigError("cannot import")]
    for error in errors:
        with pytest.raises(ConfigError), before_joining():
            raise error
    assert [one.reported_elsewhere for one in errors] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_command_that_a_process_runs_is_no_process_of_the_launcher(is_alive):
    """A process without its launcher ends at once; a command that a callback runs has a launcher, but not as parent."""
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if not is_alive:
        launcher.communicate()
    code = "from etude.launched import end_with_launcher; end_with_launcher()"
    env = os.environ | {LAUNCHER: str(launcher.pid), "RANK": "0"}
    ended = subprocess.run([sys.executable, "-c", code], env=env, check=False)
    launcher.communicate()
    assert ended.returncode == (0 if is_alive else -signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "first", "exit_code", "words"),
    [
        ({0: 75, 1: 130}, {1: 130}, 130, "process 1 of 2 was interrupted"),
        ({0: 130, 1: 130}, {1: 130}, 130, ""),  # all have stopped after the same step, and rank 0 has said so
        ({0: 75, 1: 0}, {0: 75}, 75, "process 1 of 2 ended with exit code 0 before"),
        ({0: 75, 1: 75}, {0: 75, 1: 75}, 75, "on another machine"),
    ],
)
def test_the_launcher_says_what_processes_could_not(monkeypatch, codes, first, exit_code, words):
    agent, said = Agent.__new__(Agent), []
    agent._ended, agent._asked, agent._complain = first, 0, said.append
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(world_size=2)])
    monkeypatch.setattr(Agent, "_codes", lambda _: codes)
    assert agent.exit_code() == exit_code
    assert len(said) == bool(words)
    assert all(words in one for one in said)


def test_an_interrupt_while_a_process_imports_waits_for_the_end_of_it(monkeypatch):
    """It would show the traceback of the import, or abort it."""
    masks = []
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda *_: masks.append(_blocked()))
    Agent.__new__(Agent)._start_workers(None)
    assert signal.SIGINT in masks[0]
    assert signal.SIGINT not in _blocked()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _load("dumps", "json")
    assert signal.SIGINT not in _blocked()


def _blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])
