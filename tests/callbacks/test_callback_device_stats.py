"""Learning rates, momentum and weight decay of all groups, and what the device and the process use, in the records."""

import os

import psutil
import pytest
import torch
from torch import nn

from etude import AdamW, Callback, Trainer
from etude.callbacks import DeviceStats, LearningRateMonitor, device_stats
from etude.callbacks.profiling.trace import Trace
from etude.callbacks.recorder import memory_in_use
from etude.engine.callback import RunInfo


class Records(Callback):
    def __init__(self):
        super().__init__()
        self.records = []

    def on_log(self, record):
        self.records.append(dict(record))


def records(callback, optimizer=None, **config):
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 3), Records()
    x, y = torch.randn(64, 4), torch.arange(64) % 3
    config = {"epochs": 1, "batch_size": 8, "log_interval": 2} | config
    made = None if optimizer is None else optimizer(model)
    Trainer(model, (x, y), config=config, optimizer=made, callbacks=[callback, seen], progress=False).train()
    return seen.records


def test_one_group_of_adamw():
    found = records(LearningRateMonitor(), lambda model: AdamW(model.parameters(), 0.1, (0.8, 0.9), weight_decay=0.3))
    assert all((one["lr"], one["momentum"], one["weight_decay"]) == (0.1, 0.8, 0.3) for one in found)


def test_groups_with_and_without_a_name_follow_the_schedule():
    def optimizer(model):
        groups = [{"params": [model.weight], "name": "matrix"}, {"params": [model.bias], "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)

    found = records(LearningRateMonitor(), optimizer, scheduler_type="linear")
    assert {one["momentum/matrix"] for one in found} == {0.9}
    assert [one["weight_decay/1"] for one in found] == [0.0] * 4
    rates = [one["lr/1"] for one in found]
    assert rates == [one["lr/matrix"] for one in found] == [one["lr"] for one in found]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_groups_of_one_name_do_not_hide_each_other():
    def optimizer(model):
        groups = [
            {"params": [one], "name": "all", "lr": rate} for one, rate in [(model.weight, 0.2), (model.bias, 0.1)]
        ]
        return torch.optim.SGD([*groups, {"params": [torch.zeros(1)], "name": "all", "lr": 0.1}], lr=0.3)

    (*_, last) = records(LearningRateMonitor(), optimizer)
    assert [last[name] for name in ("lr/all", "lr/all.1", "lr/all.2")] == [0.2, 0.1, 0.1]
    (*_, last) = records(Callback(), optimizer)
    assert {name: value for name, value in last.items() if name.startswith("lr")} == {
        "lr": 0.2,
        "lr/all.1": 0.1,
        "lr/all.2": 0.1,
    }


def test_what_is_not_wanted_or_not_there_is_not_logged():
    optimizer = lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1)
    (*_, last) = records(LearningRateMonitor(log_weight_decay=False), optimizer)
    assert "lr" in last
    assert not {"momentum", "weight_decay"} & last.keys()


def test_the_process():
    *_, last = records(DeviceStats())
    assert last["cpu/memory_gb"] == pytest.approx(psutil.Process(os.getpid()).memory_info().rss / 1e9, rel=0.1)
    assert last["cpu/cores"] > 0
    assert not any(name.startswith("gpu/") for name in last)


def test_cores_are_cpu_time_by_time(monkeypatch):
    times = iter([(10.0, 1.0), (14.0, 9.0), (15.0, 9.5)])
    monkeypatch.setattr(device_stats, "_clocks", lambda: next(times))
    callback = DeviceStats()
    callback.on_train_begin(run_info("cpu"))
    assert [callback.numbers()["cpu/cores"] for _ in range(2)] == [2.0, 0.5]


def run_info(device):
    return RunInfo("run", nn.Linear(1, 1), None, None, torch.device(device), 1, 1, 1, None)


def test_a_gpu_without_its_package_still_tells_its_memory(monkeypatch, caplog):
    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(device_stats, "NVML", dict.fromkeys(device_stats.NVML, (missing, 1.0)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5e9)
    callback = DeviceStats()
    callback.on_train_begin(run_info("cuda"))
    assert "etude[gpu]" in caplog.text
    numbers = callback.numbers()
    assert (numbers["gpu/memory_allocated_gb"], numbers["gpu/memory_reserved_gb"]) == (3.0, 5.0)
    assert "gpu/power_w" not in numbers


def test_the_most_memory_since_the_start_outlives_a_profile(monkeypatch):
    """The profiler measures every part of a step, for which torch has to begin its peaks again."""
    peaks = {"allocated": 3e9, "reserved": 5e9}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peaks["reserved"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(allocated=1e9, reserved=2e9)
    )
    monkeypatch.setattr(device_stats, "NVML", {})
    monkeypatch.setattr("etude.callbacks.recorder._EARLIER", {})
    callback, trace = DeviceStats(), Trace(torch.device("cuda"))
    callback.on_train_begin(run_info("cuda"))
    with trace.span("forward"):
        pass
    assert trace.memory["forward"].allocated == 1e9
    numbers = callback.numbers()
    assert (numbers["gpu/memory_allocated_gb"], numbers["gpu/memory_reserved_gb"]) == (3.0, 5.0)
    assert memory_in_use(torch.device("cuda")) == {"memory_bytes": 3e9}


def test_a_gpu_in_the_units_of_the_names(monkeypatch):
    values = {"gpu/utilization": 50, "gpu/temperature_c": 61, "gpu/power_w": 400_000}
    nvml = {name: (lambda device, name=name: values[name], factor) for name, (_, factor) in device_stats.NVML.items()}
    monkeypatch.setattr(device_stats, "NVML", nvml)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    callback = DeviceStats()
    callback.on_train_begin(run_info("cuda"))
    numbers = callback.numbers()
    assert (numbers["gpu/utilization"], numbers["gpu/temperature_c"], numbers["gpu/power_w"]) == (0.5, 61.0, 400.0)


def test_a_sensor_that_is_lost_does_not_end_the_run(monkeypatch, caplog):
    readings = iter([400_000, 300_000])

    def power(device):
        if (value := next(readings, None)) is None:
            raise RuntimeError("GPU is lost")
        return value

    monkeypatch.setattr(device_stats, "NVML", {"gpu/power_w": (power, 1e-3)})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    callback = DeviceStats()
    callback.on_train_begin(run_info("cuda"))
    assert [callback.numbers().get("gpu/power_w") for _ in range(3)] == [300.0, None, None]
    assert caplog.text.count("no gpu/power_w from now on: GPU is lost") == 1
