"""`etude compare`: the table holds the numbers of the runs it trained, for the budget that it says."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml

from etude.experiment import RunOutcome

COMPONENTS = Path(__file__).parents[1] / "experiment" / "task_components.py"


@pytest.fixture
def experiment(tmp_path):
    """Write an experiment with three tasks on two streams and return its path."""

    def write(**sections):
        data = {
            "imports": [str(COMPONENTS)],
            "model": "task_trunk",
            "data": {
                "name": "streams",
                "streams": {
                    "code": {"name": "task_sequences", "keys": ["full"], "samples": 24, "test": 8},
                    "functions": {"name": "task_sequences", "keys": ["quality"], "samples": 24, "seed": 2},
                },
            },
            "tasks": {
                "writing": {"data": "code", "head": "language_model"},
                "annotation": {
                    "data": "code",
                    "labels": "full",
                    "head": {"name": "token_classifier", "num_classes": 3},
                    "loss": "cross_entropy",
                    "metrics": ["f1"],
                },
                "quality": {
                    "data": "functions",
                    "labels": "quality",
                    "head": {"name": "sequence_classifier", "num_classes": 4},
                    "loss": "multi_label",
                    "weight": 0.5,
                    "metrics": ["f1"],
                },
            },
            "weighting": "uncertainty",
            "curriculum": [
                {"name": "first", "start": 1, "tasks": ["writing"]},
                {"name": "all", "start": 2, "tasks": "all", "ramp": {"epochs": 0}},
            ],
            "scheduler": {"name": "warmup_cosine", "warmup_steps": 9},
            "training": {"epochs": 3, "batch_size": 8, "device": "cpu"},
            **sections,
        }
        path = tmp_path / "toy.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_table_holds_the_numbers_of_the_runs(etude, experiment, tmp_path):
    outcome = etude("compare", experiment(), "--out", "out", "--seeds", "0,1", "-q")
    assert outcome.code == 0, outcome.err
    out = tmp_path / "out"
    comparison = json.loads((out / "compare.json").read_text())
    rows = {(row["task"], row["number"]): row for row in comparison["rows"]}
    assert {row["task"]: row["split"] for row in rows.values()} == {
        "writing": "test",
        "annotation": "test",
        "quality": "validation",  # its stream has no test part
    }
    row = rows["quality", "f1"]
    for kind, folder in (("multi", "multi-task"), ("single", "quality")):
        expected = [result(out / f"seed-{seed}" / folder)["metrics"]["val_quality/f1"] for seed in (0, 1)]
        assert row[kind] == pytest.approx(expected)
    for kind, folder in (("multi", "multi-task"), ("single", "writing")):
        for place, seed in enumerate((0, 1)):
            evaluated = etude("evaluate", out / f"seed-{seed}" / folder, "--checkpoint", "last")
            shown = [line.split()[1] for line in evaluated.out.splitlines() if "writing/loss" in line]
            assert shown == [f"{rows['writing', 'loss'][kind][place]:.6g}"]
    better = {row["better"] for row in rows.values()}
    assert better <= {"multi-task", "single-task", "unclear", "equal"}
    line = next(line for line in outcome.out.splitlines() if line.startswith("quality") and " f1 " in line)
    assert f"{fmean(row['multi']):.4g} ± {stdev(row['multi']):.2g}" in line
    assert line.split()[-1] == row["better"]
    assert line.split()[-2] == f"{fmean(row['multi']) - fmean(row['single']):+.4g}"
    assert f"| {row['better']} |" in (out / "compare.md").read_text()


def test_share_of_the_budget(etude, experiment, tmp_path):
    assert etude("compare", experiment(), "--out", "out", "-q").code == 0
    whole = result(tmp_path / "out/seed-0/multi-task")
    # An epoch is 48 samples: the first of code, then as much of code as of functions.
    assert whole["samples"] == {"writing": 96, "annotation": 48, "quality": 48}
    for task, samples in whole["samples"].items():
        alone = result(tmp_path / "out/seed-0" / task)
        assert alone["samples"] == {task: samples}
        assert alone["step"] == samples // 8
        config = yaml.safe_load((tmp_path / "out/seed-0" / task / "config.yaml").read_text())
        assert list(config["tasks"]) == [task]
        assert "curriculum" not in config
        assert "weighting" not in config
        assert config["scheduler"]["warmup_steps"] == round(9 * alone["step"] / whole["step"])
        assert set(config["data"]["streams"]) == {"functions" if task == "quality" else "code"}


def test_whole_budget(etude, experiment, tmp_path):
    assert etude("compare", experiment(), "--out", "out", "--budget", "whole", "-q").code == 0
    steps = {path.parent.name: result(path.parent)["step"] for path in tmp_path.glob("out/seed-0/*/result.json")}
    assert steps == dict.fromkeys(["multi-task", "writing", "annotation", "quality"], 18)


def test_finished_runs_are_not_trained_again(etude, experiment, tmp_path):
    path = experiment()
    first = etude("compare", path, "--out", "out", "-q")
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/seed-*/*/result.json")}
    assert len(stamps) == 4
    (tmp_path / "out/seed-0/quality/result.json").unlink()  # as if it had been killed
    again = etude("compare", path, "--out", "out", "-q")
    assert again.out == first.out
    changed = [file.parent.name for file, stamp in stamps.items() if file.stat().st_mtime_ns != stamp]
    assert changed == ["quality"]
    other = etude("compare", path, "training.epochs=4", "--out", "out", "-q")
    assert "out/seed-0/multi-task holds a run of another configuration; choose another --out" in other.errors[-1]
    assert other.code == 2


def test_stopped_it_says_how_to_go_on(etude, experiment, monkeypatch):
    def stopped(config, *, run_dir, progress):
        return RunOutcome(run_dir, "interrupted", step=3, epoch=0)

    with monkeypatch.context() as patch:
        patch.setattr("etude.experiment.compare.train_experiment", stopped)
        outcome = etude("compare", experiment(), "--out", "out", "-q")
    assert outcome.code == 130
    assert outcome.errors[-1].endswith("what was trained is kept; run the same command again to go on")


@pytest.mark.parametrize(
    ("arguments", "sections", "words"),
    [
        (["--budget", "hole"], {}, "budget 'hole' is not known; did you mean 'whole'? (known: share, whole)"),
        (
            ["--seeds", "1,0,1"],
            {},
            "--seeds 1,0,1: a seed is there twice, which would look like agreement; give each once",
        ),
        (["--seeds", "0,x"], {}, "--seeds 0,x: give whole numbers separated by commas, such as 0,1,2"),
        (
            ["training.epochs=1"],
            {"tasks": None, "curriculum": None, "weighting": None},
            "toy.yaml:19: tasks: there must be two tasks or more to compare a model of all with models of each",
        ),
        (
            ["data.streams.functions.validation=0"],
            {},
            "tasks.quality: its data has neither a validation nor a test part, so there is nothing to compare",
        ),
    ],
    ids=str,
)
def test_mistake_is_one_line(etude, experiment, arguments, sections, words):
    assert words in etude("compare", experiment(**sections), *arguments).error
