"""Following a run: the lines of the display, once each, until it ends."""

import json
import time

import torch
from torch import nn

import etude
from etude.runs.tail import RunTail, follow
from made_runs import lines, make_run


def test_the_lines_are_those_of_the_display(tmp_path, capsys):
    data = (torch.randn(32, 4), torch.randint(0, 3, (32,)))
    config = etude.TrainerConfig(epochs=2, batch_size=8, log_interval=2, device="cpu", validate_every_steps=3)
    etude.Trainer(nn.Linear(4, 3), data, data, config=config, output_dir=tmp_path / "run").train()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("epoch", "step"))]
    found = list(follow(tmp_path / "run", 0))
    without_time = lambda line: line.partition(" done in")[0] + line.partition("  loss")[2].partition("samples/s")[0]
    assert [without_time(line) for line in found if line.startswith(("epoch", "step"))] == list(
        map(without_time, shown)
    )
    assert found[-1].startswith("finished after")
    assert sum(line.startswith("saved step-") for line in found) == 2


def test_only_the_last_lines(tmp_path):
    found = list(follow(make_run(tmp_path / "run"), 2))
    assert [line.split()[0] for line in found] == ["…", "epoch", "epoch", "finished"]
    assert found[0] == "… 5 earlier lines"


def test_new_lines_come_once_also_after_a_resume(tmp_path):
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0], state="running")
    tail = RunTail(folder)
    assert len(list(tail.new_lines())) == 5
    assert list(tail.new_lines()) == []
    now = time.time()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").unlink()
    again = [record for record in records if record["step"] <= 2]
    lines(folder / "metrics.jsonl", [*again, {"step": 3, "epoch": 1, "split": "train", "time": now, "loss": 1.5}])
    assert [line.split("  ")[1:] for line in tail.new_lines()] == [["step 3/4", "loss 1.5000"]]


def test_it_ends_with_the_run(tmp_path):
    folder = make_run(tmp_path / "run", [1.0, 2.0], state="running")
    found = follow(folder, poll_s=0.0)
    start = [next(found) for _ in range(4)]
    assert start[0].startswith("toy started  cpu, 1,234 parameters")
    now = time.time()
    lines(folder / "metrics.jsonl", [{"step": 3, "epoch": 1, "split": "train", "time": now, "loss": None}])
    end = {"time": now, "kind": "end", "step": 3, "status": "failed", "message": "TrainingError: \x1b[2Jnan"}
    lines(folder / "events.jsonl", [{"time": now, "kind": "warning", "message": "odd", "step": 3}, end])
    *middle, last = found
    assert middle == ["epoch 2/2  step 3/4  loss nan", "odd"]
    assert last.startswith("failed after")
    assert last.endswith("at step 3: TrainingError: \ufffd[2Jnan")


def test_a_dead_run_ends_too(tmp_path):
    found = list(follow(make_run(tmp_path / "run", [1.0], state="lost", beat_age_s=60)))
    assert "lost after" in found[-1]
    assert "etude resume" in found[-1]


def test_the_end_of_a_long_run_is_shown_as_if_all_of_it_had_been_read(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", [1.0 / step for step in range(1, 200)])
    expected = [line for line in follow(folder, 0) if not line.startswith("…")]
    monkeypatch.setattr("etude.runs.tail._END_BYTES", 2000)
    monkeypatch.setattr("etude.runs.tail._LINE_BYTES", 0)
    read = []
    monkeypatch.setattr(
        RunTail, "_line", lambda self, record, line=RunTail._line: read.append(1) or line(self, record)
    )
    found = list(follow(folder, 5))
    assert found[1:] == expected[-6:]  # the epochs before still decide which one is the best
    assert len(read) < 130  # 99 epochs and the end, not all 400 records
    assert found[0].startswith("… ")
