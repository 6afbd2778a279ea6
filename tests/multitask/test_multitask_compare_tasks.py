"""`etude compare`: the table holds the numbers of the runs it trained, for the budget that it says."""

import json
from inspect import signature
from statistics import fmean, stdev

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st

from etude import TrainerConfig
from etude.core import ConfigError, num_samples
from etude.data import DataSplits, TensorData
from etude.distributed import World
from etude.engine.step import GradientAccumulator
from etude.experiment import compare_tasks
from etude.experiment.build import Data
from etude.multitask.compare.tables import ComparedNumber, difference_interval
from etude.multitask.compare.tasks import steps_for
from task_experiment import COMPONENTS, TASKS

STREAMS = {
    "name": "streams",
    "streams": {
        "code": {"name": "task_sequences", "keys": ["full"], "samples": 24, "test": 8},
        "functions": {"name": "task_sequences", "keys": ["quality"], "samples": 24, "seed": 2},
    },
}


@pytest.fixture
def experiment(tmp_path):
    """Write an experiment with three tasks on two streams and return its path."""

    def write(**sections):
        data = {
            "imports": [str(COMPONENTS)],
            "model": "task_trunk",
            "data": STREAMS,
            "tasks": TASKS,
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
        "quality": "validation",  # its stream has no test split
    }
    row = rows["quality", "f1"]
    for kind, folder in (("multi-task", "multi-task"), ("single-task", "quality")):
        expected = [result(out / f"seed-{seed}" / folder)["metrics"]["val_quality/f1"] for seed in (0, 1)]
        assert row["values"][kind] == pytest.approx(expected)
    for kind, folder in (("multi-task", "multi-task"), ("single-task", "writing")):
        for place, seed in enumerate((0, 1)):
            evaluated = etude("evaluate", out / f"seed-{seed}" / folder, "--checkpoint", "last")
            shown = [line.split()[1] for line in evaluated.out.splitlines() if "writing/loss" in line]
            assert shown == [f"{rows['writing', 'loss']['values'][kind][place]:.6g}"]
    better = {row["better"] for row in rows.values()}
    assert better <= {"multi-task", "single-task", "unclear", "equal"}
    line = next(line for line in outcome.out.splitlines() if line.startswith("quality") and " f1 " in line)
    values = row["values"]["multi-task"]
    assert f"{fmean(values):.4g} ± {stdev(values):.2g}" in line
    assert line.split()[-1] == row["better"]
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


TWO = {
    "writing": {"head": "language_model"},
    "annotation": {
        "labels": "full",
        "head": {"name": "token_classifier", "num_classes": 3},
        "loss": "cross_entropy",
    },
}


@pytest.mark.parametrize(
    ("samples", "batch", "training"),
    [
        (30, 16, {"epochs": 4}),
        (30, 16, {"epochs": 4, "drop_last": True}),
        (7, 16, {"epochs": 3}),
        (33, 16, {"epochs": 3, "grad_accum_steps": 2}),
        (30, 8, {"epochs": 4, "grad_accum_steps": {0: 1, 2: 3}}),
        (30, 16, {"epochs": None, "max_steps": 5}),
    ],
)
def test_single_task_models_read_as_many_samples(etude, experiment, tmp_path, samples, batch, training):
    """However epochs end: with a short batch, a step of fewer micro-batches, or in the middle."""
    path = experiment(
        data={"name": "task_sequences", "keys": ["full"], "samples": samples, "validation": 4},
        tasks=TWO,
        curriculum=None,
        weighting=None,
        scheduler=None,
        training={"batch_size": batch, "device": "cpu", **training},
    )
    outcome = etude("compare", path, "--out", "out", "-q")
    assert outcome.code == 0, outcome.err
    whole = result(tmp_path / "out/seed-0/multi-task")
    for task in TWO:
        alone = result(tmp_path / "out/seed-0" / task)
        assert alone["samples"] == {task: whole["samples"][task]}
        assert alone["step"] == whole["step"]
    assert "instead of" not in outcome.out


@pytest.mark.parametrize("draw", ["together", "alternate"])
def test_a_task_that_names_no_stream_is_compared_on_those_with_its_labels(etude, experiment, tmp_path, draw):
    tasks = {
        "annotation": TWO["annotation"],
        "quality": {
            "labels": "quality",
            "head": {"name": "sequence_classifier", "num_classes": 4},
            "loss": "multi_label",
        },
    }
    path = experiment(data=STREAMS | {"draw": draw}, tasks=tasks, curriculum=None, weighting=None, scheduler=None)
    outcome = etude("compare", path, "--out", "out", "-q")
    assert outcome.code == 0, outcome.err
    whole = result(tmp_path / "out/seed-0/multi-task")["samples"]
    for task, wanted in whole.items():
        assert 0 <= result(tmp_path / "out/seed-0" / task)["samples"][task] - wanted < 8


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 20),
    accumulation=st.one_of(st.integers(1, 4), st.just({0: 2, 3: 3})),
    wanted=st.integers(1, 500),
    drop_last=st.booleans(),
)
def test_steps_are_the_fewest_that_read_the_samples(size, batch, accumulation, wanted, drop_last):
    config = TrainerConfig(batch_size=min(batch, size), grad_accum_steps=accumulation, drop_last=drop_last)
    data = Data(DataSplits(TensorData(torch.zeros(size))), config, torch.device("cpu"), World(), "data")
    steps = steps_for(data, wanted)
    loader, accumulator, read, taken, epoch = data.loader("train"), GradientAccumulator(None, accumulation), [], 0, 0
    while taken < steps:
        for group in accumulator.group(loader.iterate(epoch), epoch):
            read.append(sum(num_samples(part) for part in group))
            taken += 1
        epoch += 1
    assert sum(read[: steps - 1]) < wanted <= sum(read[:steps])


def test_the_note_says_where_steps_do_not_fit(etude, experiment, tmp_path):
    outcome = etude("compare", experiment(data=STREAMS | {"draw": "together"}), "--out", "out", "-q")
    assert outcome.code == 0, outcome.err
    whole = result(tmp_path / "out/seed-0/multi-task")["samples"]
    (note,) = [line for line in outcome.out.splitlines() if line.startswith("budget share")]
    for task, wanted in whole.items():
        read = result(tmp_path / "out/seed-0" / task)["samples"][task]
        assert 0 <= read - wanted < 8
        assert (f"{task} {read:,} instead of {wanted:,}" in note) == (read != wanted)


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


def test_stopped_it_says_how_to_go_on(etude, experiment, tmp_path):
    path = experiment(callbacks=["stop_by_signal"])
    outcome = etude("compare", path, "--out", "out", "-q")
    assert outcome.code == 130
    assert outcome.errors[-1].endswith("trained runs are kept; run the same command again to continue")
    assert not (tmp_path / "out/compare.json").exists()
    again = etude("compare", path, "--out", "out", "-q")
    assert again.code == 0, again.err
    assert (tmp_path / "out/compare.json").exists()


def test_in_python_the_arguments_are_those_of_the_command(etude, experiment, tmp_path, monkeypatch):
    assert list(signature(compare_tasks).parameters)[:2] == ["experiment", "overrides"]
    path, said = experiment(), []
    comparison = compare_tasks(
        path, ["training.epochs=2"], out="there", budget="whole", seeds=[3], progress=False, tell=said.append
    )
    assert len(said) == 4
    assert comparison.seeds == (3,)
    shown = etude("compare", path, "training.epochs=2", "--out", "there", "--budget", "whole", "--seeds", "3,", "-q")
    assert shown.out == comparison.to_text() + "\n"
    assert comparison.to_markdown() == (tmp_path / "there/compare.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sections", "words"),
    [
        (["--budget", "hole"], {}, "unknown budget 'hole'; did you mean 'whole'? (there are: share, whole)"),
        (
            ["--seeds", "1,0,1"],
            {},
            "--seeds 1,0,1: pass distinct integers separated by commas",
        ),
        (["--seeds", "0,x"], {}, "--seeds 0,x: pass distinct integers separated by commas"),
        (
            ["training.epochs=1"],
            {"tasks": None, "curriculum": None, "weighting": None},
            "toy.yaml:19: tasks: there must be two tasks or more to compare a model of all with models of each",
        ),
        (["--seeds", "0,²"], {}, "--seeds 0,²: pass distinct integers separated by commas"),
        (["--seeds", "9" * 5000], {}, "distinct integers separated by commas"),
        (["--seeds", "9" * 20], {}, "distinct integers separated by commas"),
        (["--seeds", f"{2**63},"], {}, "distinct integers separated by commas"),
        (
            ["training.save_checkpoints=false"],
            {},
            "training.save_checkpoints: a comparison evaluates the last checkpoint of every model; set it to true",
        ),
        (
            ["data.streams.functions.validation=0"],
            {},
            "tasks.quality: its data has neither a validation nor a test split",
        ),
    ],
    ids=str,
)
def test_mistake_is_one_line(etude, experiment, arguments, sections, words):
    assert words in etude("compare", experiment(**sections), *arguments).error


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([0.5], "unclear"),
        ([1e-4], "unclear"),
        ([0.0], "unclear"),
        ([0.0, 0.0], "equal"),
        ([0.1, -0.1], "unclear"),
        ([0.10, 0.08], "unclear"),  # two seeds tell little about their own spread
        ([0.100, 0.101], "more"),
        ([0.10, 0.08, 0.09], "more"),
        ([0.2, 0.01, 0.02], "unclear"),
        ([-0.10, -0.08, -0.09], "less"),
        ([0.1, float("nan"), 0.1], "unclear"),
    ],
)
@pytest.mark.parametrize(
    ("number", "lower"), [("f1", False), ("loss", True), ("rmse_depth", True), ("accuracy", False)]
)
def test_only_seeds_that_agree_make_a_difference(pairs, verdict, number, lower):
    values = {"multi-task": tuple(0.5 + pair for pair in pairs), "single-task": (0.5,) * len(pairs)}
    row = ComparedNumber("t", number, "test", values)
    better = {"more": ("multi-task", "single-task"), "less": ("single-task", "multi-task")}
    assert row.better == (better[verdict][lower] if verdict in better else verdict)


def test_the_interval_is_that_of_a_paired_t_test():
    from scipy.stats import ttest_rel

    draw = torch.Generator().manual_seed(0)
    for seeds in (2, 3, 5, 10, 16):
        multi, single = torch.rand(2, seeds, generator=draw, dtype=torch.float64).tolist()
        interval = ttest_rel(multi, single).confidence_interval(0.95)
        assert difference_interval(multi, single) == pytest.approx(tuple(interval), abs=1e-3)


def test_several_processes_are_refused(experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        compare_tasks(experiment(), out=tmp_path / "out")
