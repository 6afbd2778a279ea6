"""Monitor: the live state of a run, as other processes read it; and the readers below it."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import etude
from etude.callbacks import Telemetry
from etude.core import Clock, RunFolderError
from etude.monitor import Monitor, Validated
from etude.monitor.heartbeat import Heartbeat
from etude.monitor.reading import Follower, find_runs, flat, last_records

SCRIPT = """
import sys, torch, etude
from torch import nn
from etude.callbacks import Callback
class Ready(Callback):
    def on_log(self, record):
        print(record["step"], flush=True)
        if record["step"] == 4: sys.stdin.read()
data = (torch.randn(32, 4), torch.randint(0, 3, (32,)))
config = etude.TrainerConfig(epochs=2, batch_size=8, log_interval=2, device="cpu")
etude.Trainer(
    nn.Linear(4, 3), data, data, config=config, callbacks=[Ready()], output_dir=sys.argv[1], progress=False
).train()
"""


def quick(folder, **settings):
    data = (torch.randn(32, 4), torch.randint(0, 3, (32,)))
    config = etude.TrainerConfig(epochs=2, batch_size=8, log_interval=2, device="cpu", **settings)
    return lambda *callbacks: etude.Trainer(
        nn.Linear(4, 3), data, data, config=config, output_dir=folder, callbacks=list(callbacks), name="toy"
    )


def test_a_finished_run(tmp_path):
    quick(tmp_path / "run")().train()
    status = Monitor(tmp_path / "run").read()
    assert (status.name, status.state, status.step, status.total_steps, status.epoch) == ("toy", "finished", 8, 8, 2)
    assert (status.progress, status.left_s, status.resumes) == (1.0, None, 0)
    assert (status.monitor, status.mode) == ("val_loss", "min")
    assert status.best is not None
    assert status.best["value"] == pytest.approx(min(v for k, v in status.metrics.items() if k == "val_loss"))


def test_log_points_say_how_much_memory_is_in_use(tmp_path):
    quick(tmp_path / "run")().train()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(("memory_bytes" in record) == (record["split"] == "train") for record in records)
    resident = psutil.Process().memory_info().rss
    assert records[0]["memory_bytes"] == pytest.approx(resident, rel=0.5)


def test_a_run_is_seen_from_inside_and_its_failure_after_it(tmp_path):
    seen = []

    def fail(event):
        seen.append(Monitor(tmp_path / "run").read())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path / "run")(Telemetry(fail, [Validated])).train()
    assert [(one.state, one.total_steps) for one in seen] == [("running", 8)]
    after = Monitor(tmp_path / "run").read()
    assert (after.state, after.step) == ("interrupted", 4)


def test_a_killed_run_is_lost_once_its_heartbeat_is_old(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert [process.stdout.readline() for _ in range(2)] == ["2\n", "4\n"]
    monitor = Monitor(folder)
    assert monitor.read().state == "running"
    assert (monitor.read().step, monitor.read().metrics["loss"] > 0) == (2, True)  # callbacks come first
    process.send_signal(signal.SIGKILL)
    with process:
        pass
    beat = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**beat, "time": time.time() - 21}))
    assert monitor.read().state == "lost"


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        Monitor(tmp_path)


def test_heartbeats_show_a_step_that_does_not_end(tmp_path):
    clock = Clock(step=7)
    heart = Heartbeat(tmp_path / "status.json", clock, 100, interval_s=0.01)
    first = json.loads((tmp_path / "status.json").read_text())
    deadline = time.monotonic() + 30
    while (beat := json.loads((tmp_path / "status.json").read_text()))["time"] == first["time"]:
        assert time.monotonic() < deadline
    assert beat["step_time"] == first["step_time"]
    clock.step = 9
    heart.end("failed")
    last = json.loads((tmp_path / "status.json").read_text())
    assert (last["step"], last["state"], last["step_time"] > first["step_time"]) == (9, "failed", True)


def test_a_heartbeat_that_cannot_be_written_is_no_error(tmp_path):
    Heartbeat(tmp_path / "missing/status.json", Clock()).end("finished")


def test_runs_are_found_below_a_folder_and_not_inside_runs(tmp_path):
    for name in ("a/1", "a/2", "b", "a/1/export/copy", "checkpoints/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
        (tmp_path / name / "events.jsonl").touch()
    (tmp_path / "only-a-config").mkdir()
    (tmp_path / "only-a-config/config.yaml").touch()
    assert [str(one.relative_to(tmp_path)) for one in find_runs(tmp_path)] == ["a/1", "a/2", "b"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]


@given(st.integers(0, 12), st.integers(1, 40), st.data())
def test_a_follower_gives_every_whole_line_once(tmp_path_factory, count, size, data):
    path = tmp_path_factory.mktemp("follow") / "metrics.jsonl"
    whole = b"".join(b'{"step": %d}\n' % step for step in range(count))
    follower, read, written = Follower(path), [], 0
    while written < len(whole):
        written = min(len(whole), written + data.draw(st.integers(1, 30)))
        path.write_bytes(whole[:written])
        while new := follower.read(size):
            read += new
    assert [one["step"] for one in read] == list(range(count))
    assert follower.restarts == 0


def test_a_follower_begins_again_when_the_file_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    follower = Follower(path)
    assert len(follower.read()) == 2
    (tmp_path / "new").write_text('{"step": 1}\n')
    (tmp_path / "new").replace(path)
    assert (follower.read(), follower.restarts) == ([{"step": 1}], 1)


def test_the_last_records_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)) + '{"step": 10')
    records = last_records(path, 200)
    assert records[-1] == {"step": 999}
    assert 10 < len(records) < 20
    assert last_records(tmp_path / "none") == []


def test_configs_by_dotted_key():
    assert flat({"a": {"b": {"c": 1}, "d": None}, "e": [1, 2]}) == {"a.b.c": 1, "a.d": None, "e": "[1, 2]"}


def test_reading_does_not_import_torch():
    code = (
        "import sys; from etude.monitor import Monitor; from etude.monitor.reading import find_runs; "
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lines_that_are_too_long_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.monitor.reading.MOST_BYTES", 100)
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"long": "' + "x" * 250)
    follower, found = Follower(path), []
    for more in ("", "x" * 300, 'x"}\n{"step": 2}\n', '{"step": 3}\n'):
        with path.open("a") as file:
            file.write(more)
        for _ in range(4):
            found += follower.read(50)
    assert found == [{"step": 1}, {"step": 2}, {"step": 3}]
