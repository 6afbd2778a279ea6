"""The GPU benchmark at its tiny size on the CPU, and how it goes on when a contestant fails."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_race, table
from benchmarks.gpu_race import MARK, Contestant, Section, Stopwatch, run_section
from forked_python import run_python

ROOT = Path(__file__).parents[2]


def section(contestants, **settings):
    columns = {"way": "", "ms": ".1f", "× time": ".2f"}
    return Section("Title", columns, "How.", contestants, ("ms", "× time"), lambda _: ("a", "b"), **settings)


def test_everything_that_needs_no_gpu_runs_and_the_rest_says_so(tmp_path):
    file = tmp_path / "gpu.json"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run_python("-m", "benchmarks.gpu", "--quick", "--no-peers", "--json", file, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["benchmark"] == "gpu"
    assert len(report["tables"]) == 2 + 4 + 1 + 1 + 1 + 1
    rows = [row for one in report["tables"] for row in one["rows"]]
    reasons = {row[table.NOT_RUN] for row in rows if table.NOT_RUN in row}
    assert reasons <= {"needs CUDA", "failed: RuntimeError: needs torch 2.13"}
    measured = [row for row in rows if table.NOT_RUN not in row]
    names = {next(iter(row.values())) for row in measured}
    assert names >= {
        "by hand, eager",
        "Etude, eager, fused head",
        "Etude, compile off, capture off",
        "Etude, chunked",
        "wasserstein, Etude, chunked",
        "dense mask, SDPA",
    }
    for row in measured:
        rate = next(row[unit] for unit in ("ms", "steps/s", "tokens/s") if unit in row)
        assert 0 < row["from"] <= rate <= row["to"]
    assert all(one["title"] in done.stdout and name in done.stdout for one in report["tables"] for name in names)


CHILD = """
import json, os, sys, time
for name in sys.argv[sys.argv.index("--run") + 1:]:
    print("noise of a library")
    print({mark!r} + json.dumps([name, None]), flush=True)
    if name == "dies":
        sys.exit("Traceback\\nAcceleratorError: CUDA error: illegal memory access")
    if name == "hangs":
        time.sleep(600)
    print({mark!r} + json.dumps([name, {{"ms": 2.0}}]), flush=True)
"""


def test_a_child_that_dies_or_hangs_costs_one_row(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(mark=MARK))
    monkeypatch.setattr(gpu_race, "CHILD", (sys.executable, str(script)))
    monkeypatch.setattr(gpu_race, "LONGEST_S", 1.0)
    names = ("a", "dies", "b", "hangs", "c")
    one = section({name: Contestant(lambda: None, cuda=False) for name in names})
    found = dict(run_section(one, ["--quick"], peers=True))
    assert [name for name in names if found[name] == {"ms": 2.0}] == ["a", "b", "c"]
    assert "illegal memory access" in found["dies"][table.NOT_RUN]
    assert "1 s" in found["hangs"][table.NOT_RUN]


def test_a_child_that_says_nothing_is_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr(gpu_race, "CHILD", (sys.executable, "-c", "pass"))
    one = section({name: Contestant(lambda: None, cuda=False) for name in "ab"}, alone=True)
    assert [name for name, numbers in run_section(one, ["--quick"], peers=True) if table.NOT_RUN in numbers] == [
        "a",
        "b",
    ]


@pytest.mark.slow
def test_results_of_a_child_process_are_those_of_the_section(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = ["the three products alone", "Etude, chunked"]
    arguments = ["--quick", "--only=linear", "--section=0", "--run", *names]
    found = dict(gpu_race.in_child(arguments))
    assert list(found) == names
    assert all(numbers["ms"] > 0 for numbers in found.values())


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_contestant_that_fails_is_a_row_and_peers_can_be_left_out(rounds):
    def run():
        return (lambda: None) if rounds else {"ms": 1.0}

    contestants = {
        "a": Contestant(run, cuda=False),
        "fails": Contestant(lambda: 1 / 0, cuda=False),
        "absent": Contestant(run, ("no_such_module",), cuda=False),
        "peer": Contestant(run, cuda=False, is_peer=True),
    }
    found = dict(run_section(section(contestants, rounds=rounds), [], peers=False))
    assert found["a"]["ms"] > 0
    assert "ZeroDivisionError" in found["fails"][table.NOT_RUN]
    assert found["absent"] == {table.NOT_RUN: table.NOT_INSTALLED}
    assert "peer" not in found


def test_calls_in_a_row_are_timed_without_the_wait_for_the_device(monkeypatch):
    clock, rows = [0.0], []

    def now(_device):
        clock[0] += 0.0005  # waiting, and launching the first call
        rows.append(0)
        return clock[0]

    def takes(seconds):
        def step():
            clock[0] += seconds
            rows[-1] += 1

        return step

    monkeypatch.setattr(gpu_race, "now", now)
    seconds = {"short": 0.001, "long": 0.5}
    contestants = {name: Contestant(lambda one=one: takes(one), cuda=False) for name, one in seconds.items()}
    found = dict(section(contestants, rounds=3).measure(list(contestants)))
    assert 1.0 < found["short"]["ms"] < 1.05
    assert 500 < found["long"]["ms"] < 501
    assert rows[-12::2] == [32, 1] * 3  # the two take turns


@pytest.mark.slow
def test_parts_run_one_at_a_time_go_into_one_file(tmp_path, monkeypatch, capsys):
    file, measured = tmp_path / "gpu.json", {"ms": 1.0}

    def part(title):
        one = section({"a": Contestant(lambda: dict(measured), cuda=False)})
        return lambda quick: [dataclasses.replace(one, title=title)]

    for name in ("linear", "meaningful", "documents"):
        monkeypatch.setitem(gpu.PARTS, name, part(f"Of {name}"))

    def run(*names):
        gpu.main(["--quick", "--json", str(file), *(f"--only={name}" for name in names)])
        return {one["title"]: one["rows"][0]["ms"] for one in json.loads(file.read_text())["tables"]}

    assert run("linear", "meaningful") == {"Of linear": 1.0, "Of meaningful": 1.0}
    measured["ms"] = 2.0
    assert run("documents", "linear") == {"Of linear": 2.0, "Of meaningful": 1.0, "Of documents": 2.0}
    assert list(run("meaningful")) == ["Of linear", "Of meaningful", "Of documents"]
    text = json.loads(file.read_text())
    file.write_text(json.dumps({**text, "quick": False}))
    assert run("linear") == {"Of linear": 2.0}  # tiny sizes and real ones do not mix


def test_ratios_are_to_the_best_of_the_references():
    rows = [
        {"way": "a", "ms": 4.0},
        {"way": "b", "ms": 2.0},
        {"way": "c", "ms": 3.0},
        {"way": "d", table.NOT_RUN: "x"},
    ]
    found = section({}).with_ratios(rows)
    assert [row.get("× time") for row in found] == [2.0, 1.0, 1.5, None]
    assert section({}).with_ratios(rows[2:]) == rows[2:]  # both references have failed


def test_the_stopwatch_times_stretches_after_the_warm_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(gpu_race, "now", lambda _: clock[0])
    watch = Stopwatch(warmup=3, stretch=2, rounds=2)
    watch.begin = 0.0
    for step in range(watch.num_steps):
        clock[0] += 100.0 if step < 3 else 0.5
        watch()
    numbers = watch.numbers("tokens/s", per_step=8)
    assert numbers["tokens/s"] == numbers["from"] == numbers["to"] == 16.0
    assert numbers["ready s"] == 300.0
    short = Stopwatch(warmup=3, stretch=2, rounds=2)
    short()
    with pytest.raises(RuntimeError, match="1 of 7"):
        short.numbers("tokens/s", per_step=8)
