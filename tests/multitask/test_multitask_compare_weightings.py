"""`etude compare --weightings`: the same experiment with every weighting and seed, in one table."""

import json
from importlib.util import find_spec
from statistics import fmean, stdev

import pytest
import yaml

from etude.experiment import compare_weightings
from etude.multitask.compare.tables import ComparedNumber
from task_experiment import COMPONENTS


@pytest.fixture
def experiment(tmp_path):
    """Write an experiment with two tasks and return its path."""
    data = {
        "imports": [str(COMPONENTS)],
        "model": "task_trunk",
        "data": {"name": "task_sequences", "keys": ["full", "quality"], "samples": 24},
        "tasks": {
            "annotation": {
                "labels": "full",
                "head": {"name": "token_classifier", "num_classes": 3},
                "loss": "cross_entropy",
                "metrics": ["f1"],
            },
            "quality": {
                "labels": "quality",
                "head": {"name": "sequence_classifier", "num_classes": 4},
                "loss": "multi_label",
            },
        },
        "weighting": {"name": "dwa", "temperature": 1.5},
        "training": {"epochs": 1, "batch_size": 8, "device": "cpu"},
    }
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_every_weighting_and_seed_is_trained_once_and_tabulated(etude, experiment, tmp_path):
    names = ["static", "dwa", "pcgrad", *(["mgda"] if find_spec("torchjd") is not None else [])]
    command = ["compare", "--weightings", ",".join(names), experiment, "--seeds", "2", "--out", "out", "-q"]
    outcome = etude(*command)
    assert outcome.code == 0, outcome.err
    out = tmp_path / "out"
    found = {path.parent.relative_to(out).as_posix() for path in out.glob("*/*/result.json")}
    assert found == {f"seed-{seed}/{name}" for seed in (0, 1) for name in names}
    for name in names:
        config = yaml.safe_load((out / "seed-1" / name / "config.yaml").read_text())
        assert config["weighting"]["name"] == name
        assert config["training"]["seed"] == 1
    # The weighting that the experiment names keeps its settings.
    assert yaml.safe_load((out / "seed-0/dwa/config.yaml").read_text())["weighting"]["temperature"] == 1.5

    comparison = json.loads((out / "compare.json").read_text())
    assert (comparison["weightings"], comparison["seeds"]) == (names, [0, 1])
    rows = {(row["task"], row["number"]): row for row in comparison["rows"]}
    assert {("annotation", "loss"), ("annotation", "f1"), ("quality", "loss")} <= set(rows)
    losses = rows["quality", "loss"]["values"]
    for name in names:
        expected = [
            json.loads((out / f"seed-{seed}" / name / "result.json").read_text())["metrics"]["val_quality/loss"]
            for seed in (0, 1)
        ]
        assert losses[name] == pytest.approx(expected)
    assert rows["quality", "loss"]["better"] in (*names, "unclear", "equal")
    line = next(line for line in outcome.out.splitlines() if line.startswith("quality") and " loss " in line)
    for name in names:
        assert f"{fmean(losses[name]):.4g} ± {stdev(losses[name]):.2g}" in line
    assert line.count("±") == len(names)
    assert (out / "compare.md").read_text().count("| quality |") == sum(task == "quality" for task, _ in rows)

    # Started again, nothing that is finished is trained again.
    stamps = {file: file.stat().st_mtime_ns for file in out.glob("*/*/result.json")}
    (out / "seed-1/pcgrad/result.json").unlink()  # as if it had been killed
    again = etude(*command)
    assert again.out == outcome.out
    changed = [file.parent.name for file, stamp in stamps.items() if file.stat().st_mtime_ns != stamp]
    assert changed == ["pcgrad"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weightings", "static,pcgard"], "unknown weighting 'pcgard'; did you mean 'pcgrad'?"),
        (["--weightings", "static,static"], "weightings static, static: list each once"),
        (["--weightings", ","], "weightings (none): list each once"),
        (["--weightings", "static,null"], "unknown weighting 'null'"),
        (["--weightings", "static", "--seeds", "0"], "--seeds 0"),
        (["--weightings", "static", "training.save_checkpoints=false"], "training.save_checkpoints"),
        (["--weightings", "static", "tasks=null", "weighting=null"], "tasks: there are no tasks"),
    ],
    ids=str,
)
def test_mistakes_are_refused_before_anything_is_trained(etude, experiment, tmp_path, arguments, words):
    outcome = etude("compare", experiment, *arguments, "--out", "out", "-q")
    assert outcome.code == 2
    assert words in outcome.error
    assert not list(tmp_path.glob("out/**/config.yaml"))


def test_stopped_it_says_how_to_go_on(etude, experiment, tmp_path):
    command = ["compare", experiment, "callbacks=[stop_by_signal]", "--weightings", "static", "--out", "out", "-q"]
    outcome = etude(*command)
    assert outcome.code == 130
    assert outcome.errors[-1].endswith("run the same command again to continue")
    assert etude(*command).code == 0
    comparison = compare_weightings(
        experiment, ["static"], ["callbacks=[stop_by_signal]"], out=tmp_path / "out", progress=False
    )
    assert json.loads((tmp_path / "out/compare.json").read_text())["seeds"] == list(comparison.seeds)


@pytest.mark.parametrize(("number", "best"), [("loss", "b"), ("f1", "a"), ("rmse_depth", "b")])
def test_the_best_of_several_is_the_lowest_of_errors_and_the_highest_of_scores(number, best):
    several = {"a": (2.0, 2.01, 2.02), "c": (1.5, 1.51, 1.52), "b": (1.0, 1.01, 1.02)}
    assert ComparedNumber("t", number, "test", several).better == best
    nan = float("nan")
    assert ComparedNumber("t", number, "test", {"a": (nan, 2.0), "b": (nan, 1.0)}).better == "unclear"
    assert ComparedNumber("t", number, "test", {"a": (1.0, 2.0), "b": (2.0, 1.0)}).better == "unclear"
    assert ComparedNumber("t", number, "test", {"a": (1.0, 2.0)}).better == "unclear"
