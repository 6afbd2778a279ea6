"""The options of `--nproc`: what they mean, and what is refused in one line."""

import os

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.core.errors import ConfigError
from etude.distributed.launch import LaunchOptions
from etude.distributed.settings import ParallelConfig


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
    monkeypatch.setattr("etude.distributed.launch._cores", lambda: 16)
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
