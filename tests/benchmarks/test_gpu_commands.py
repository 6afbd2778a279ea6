"""Whole commands of the GPU benchmark: what it reads from run folders, and commands that fail or take too long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_commands

ROOT = Path(__file__).parents[2]

COMPONENTS = """
import torch
from etude import register
from etude.data import DataSplits, TensorData
from torch import nn

@register("data", "benchmark_points")
def points():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData(x, (x[:, 0] > 0).long())
    return DataSplits(data, data, num_classes=2)

@register("model", "benchmark_net")
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
"""
CONFIG = """
imports: [components.py]
model: {name: benchmark_net}
data: {name: benchmark_points}
training: {max_steps: 8, batch_size: 5, log_interval: 2, device: cpu}
"""


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "components.py").write_text(COMPONENTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return str(tmp_path / "config.yaml")


def test_a_command_is_run_to_its_end_and_its_folder_is_read(experiment):
    found = gpu_commands.train(experiment, "training.max_steps=6")
    assert found["s"] > found["finished in"] > 0
    assert found["steps"] == 6
    assert found["steps/s"] > 0
    assert 0 <= found["val_accuracy"] <= 1
    assert found["val_loss"] > 0


def test_a_command_that_fails_is_its_last_line(experiment):
    with pytest.raises(RuntimeError, match="no_such_setting"):
        gpu_commands.train(experiment, "training.no_such_setting=1")


def test_a_command_that_takes_too_long_is_stopped(experiment, monkeypatch):
    monkeypatch.setattr(gpu_commands, "LIMIT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"0\.01 s"):
        gpu_commands.train(experiment)


def record(step, samples_per_s, *, batch=10):
    return {"split": "train", "step": step, "samples": step * batch, "samples_per_s": samples_per_s}


@pytest.mark.parametrize(
    ("records", "rate"),
    [
        ([], None),
        ([record(10, 5.0)], None),
        ([record(10, 1.0), record(20, 50.0)], 5.0),
        ([record(10, 1.0), record(20, 1.0), record(30, 100.0), record(40, 50.0)], 20 / 3),  # 1 and 2 seconds
    ],
)
def test_the_rate_is_that_of_the_last_half_without_validation(records, rate):
    between = [{"split": "val", "step": one["step"], "val_loss": 1.0} for one in records]
    mixed = [one for pair in zip(records, between, strict=True) for one in pair]
    found = gpu_commands.last_half(mixed)
    assert found == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("message", "graphs"),
    [
        ("steps are captured as CUDA graphs", "yes"),
        ("steps are not captured as CUDA graphs: a callback reads the gradients of every step", "no"),
        ("compiling the step; later runs use the compilation cache", None),
    ],
)
def test_events_say_whether_steps_were_captured(message, graphs):
    events = [
        {"kind": "start", "time": 10.0, "step": 0, "message": "started"},
        {"kind": "execution", "time": 11.0, "step": 4, "message": message},
        {"kind": "end", "time": 13.5, "step": 40, "message": "finished"},
    ]
    found = gpu_commands.facts([], events)
    assert found == {"finished in": 3.5, "steps": 40} | ({} if graphs is None else {"graphs": graphs})


def test_processes_share_one_folder_of_bytecode(monkeypatch, tmp_path):
    def prefix():
        command = [sys.executable, "-c", "import sys; print(sys.pycache_prefix)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    with gpu_commands.kept_bytecode():
        folder = prefix()
        assert prefix() == folder == os.environ["PYTHONPYCACHEPREFIX"]
        assert Path(folder).is_dir()
    assert not Path(folder).exists()
    assert "PYTHONPYCACHEPREFIX" not in os.environ
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    with gpu_commands.kept_bytecode():
        assert prefix() == str(tmp_path)
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path)


def test_every_experiment_with_a_config_for_a_gpu_is_there():
    (section,) = gpu_commands.configs_sections(quick=False)
    configs = {path.parts[-3] for path in ROOT.glob("experiments/*/configs/gpu.yaml")}
    assert set(section.contestants) == {"lenet5/lecun1998", *(f"{name}/gpu" for name in configs)}
