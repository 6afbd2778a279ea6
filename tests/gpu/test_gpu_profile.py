"""On a CUDA device: profiles of captured and eager steps, NaNs found at the log point, the device's own numbers."""

import json

import pytest
import torch
from captured_runs import assert_same, captured, data, net, trained
from torch import nn

from etude import Callback
from etude.callbacks import DeviceStats, NaNDebugger, Profiler
from etude.callbacks.profiling.timeline import Timeline

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


class Times(Callback):
    """Time of the steps 31 to 50, by two waits outside of them."""

    def __init__(self):
        super().__init__()
        self.events, self.steps = [], 0

    def on_step_end(self, report):
        self.steps += 1
        if self.steps in (30, 50):
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_parts_add_up_to_the_steps_and_nothing_changes(capture, tmp_path, undo_determinism):
    times, profiler = Times(), Profiler(start=30, steps=20)
    config = {"epochs": 2, "log_interval": 100}
    plain = trained(net(), data(), capture=capture, config=config)
    profiled = trained(
        net(), data(), capture=capture, config=config, callbacks=[profiler, times], output_dir=tmp_path / "run"
    )
    assert_same(plain, profiled)
    profile = profiler.profile
    torch.cuda.synchronize()
    measured = times.events[0].elapsed_time(times.events[1]) / 20
    assert profile.step_ms - profile.parts.get("logging", 0.0) == pytest.approx(measured, rel=0.1)
    assert captured(profiled) == (capture == "auto") == bool(profile.eager) == ("captured" in profile.parts)
    eager = profile.eager or profile.parts
    assert min(eager[name] for name in ("forward", "backward", "optimizer")) > 0
    assert 0 < profile.matrix_ms + profile.other_ms < sum(eager.values()) * 1.2
    assert any("conv" in one.name for one in profile.operators)
    assert profile.memory["backward"].reserved >= profile.memory["backward"].allocated > 0
    assert json.loads((tmp_path / "run/profile/profile.json").read_text())["device"].startswith("cuda")


def test_events_do_not_wait(no_waiting):
    timeline, x = Timeline(torch.device("cuda")), torch.randn(2048, 2048, device="cuda")
    x @ x
    torch.cuda.synchronize()
    no_waiting(True)
    timeline.begin()
    with timeline.span("forward"):
        for _ in range(10):
            x @ x
    with timeline.span("backward"):
        for _ in range(20):
            x @ x
    timeline.end()
    no_waiting(False)
    totals = timeline.totals_ms()
    assert totals["backward"] == pytest.approx(2 * totals["forward"], rel=0.3)


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_the_first_skipped_step_is_explained_at_the_log_point(capture, undo_determinism):
    class Listen(Callback):
        shows_notices = True

        def __init__(self):
            super().__init__()
            self.messages = []

        def on_notice(self, message, facts):
            if facts.get("finding") == "non-finite":
                self.messages.append(message)

    listener, tensors = Listen(), data(bad=700)
    config = {"epochs": 2, "log_interval": 10}
    plain = trained(net(), tensors, capture=capture, config=config)
    watched = trained(net(), tensors, capture=capture, config=config, callbacks=[NaNDebugger(), listener])
    assert_same(plain, watched)
    assert captured(watched) == (capture == "auto")
    first, second = listener.messages
    assert "index 700 of the data" in first
    assert "index 700 of the data" in second
    assert "with the weights of" not in second


def test_no_step_waits_for_the_nan_debugger(no_waiting):
    """Until a step is skipped nothing is read from the device."""

    class Strict(Callback):
        def on_step_begin(self, step):
            no_waiting(step > 10)

        def on_step_end(self, report):
            no_waiting(False)

    trained(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        data(40 * 16),
        capture="auto",
        config={"epochs": 1, "log_interval": 1000, "deterministic": False},
        callbacks=[NaNDebugger(), DeviceStats(), Strict()],  # in the steps after the first ones, hooks included
    )


def test_what_the_device_uses():
    records = []

    class Records(Callback):
        def on_log(self, record):
            records.append(record)

    config = {"epochs": 1, "log_interval": 20, "deterministic": False}
    trained(net(), data(), capture="auto", config=config, callbacks=[DeviceStats(), Records()])
    assert 0 < records[-1]["gpu/memory_allocated_gb"] <= records[-1]["gpu/memory_reserved_gb"]
    if "gpu/power_w" in records[-1]:
        assert 1 < records[-1]["gpu/power_w"] < 2000
        assert 0 <= records[-1]["gpu/utilization"] <= 1
