"""The race of optimizers: its configs are valid, its budgets equal, and its curves are read from run folders."""

import json
import sys
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.experiment import load_experiment_config

EXPERIMENT = Path(__file__).parents[1]
sys.path.insert(0, str(EXPERIMENT))
try:
    import draw_curves
    import race
finally:
    sys.path.remove(str(EXPERIMENT))


@pytest.mark.parametrize("name", race.PROBLEMS)
def test_budgets_are_equal_and_all_configs_are_valid(name):
    problem = race.PROBLEMS[name]
    assert {len(rates) for rates in problem.rates.values()} == {6}
    assert set(problem.rates) == set(draw_curves.COLOURS)
    for optimizer, rates in problem.rates.items():
        assert list(rates) == sorted(set(rates))
        config = load_experiment_config(
            problem.experiment, overrides=race.overrides(problem, optimizer, rates[0], seed=2)
        ).to_dict()
        assert config["optimizer"]["name"] == optimizer
        assert config["optimizer"]["lr"] == rates[0]
        assert config["training"]["seed"] == 2
        assert config["optimizer"]["weight_decay"] > 0


def test_curves_are_read_from_a_run_folder(tmp_path):
    records = [
        {"step": 10, "split": "train", "samples": 80, "samples_per_s": 32.0},
        {"step": 10, "split": "val", "val_loss": 2.0, "val_accuracy": 0.5},
        {"step": 20, "split": "train", "samples": 160, "samples_per_s": 32.0},
        {"step": 20, "split": "val", "val_loss": 1.0, "val_accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found = race.read(tmp_path, ("tiny_lm", "adamw", 0.1, 0))
    assert (found.steps, found.losses, found.accuracies, found.seconds) == (
        [10, 20],
        [2.0, 1.0],
        [0.5, 0.75],
        [2.5, 5.0],
    )
    assert draw_curves.first_below(race.asdict(found), 1.5) == (15, 3.75)
    assert draw_curves.first_below(race.asdict(found), 0.5) is None
    assert draw_curves.first_below(race.asdict(found), 3.0) == (10, 2.5)  # not later than the first validation


def test_a_row_has_no_run_of_another_optimizer(monkeypatch, tmp_path, capsys):
    """Even if a seed, or every one, diverges when it is trained again."""
    monkeypatch.setattr(race, "ProcessPoolExecutor", lambda *_: nullcontext(SimpleNamespace(map=map)))
    trained = []

    def train(run, out):
        trained.append(run)
        again = trained.count(run) > 1 or run[3] > 0
        diverges = again and (run[1] == "muon" or (run[1], run[3]) == ("sgd", 2))
        return None if diverges else race.Result(*run, [1], [1.0 if run[1] == "sgd" else 5.0], [0.0], [1.0])

    monkeypatch.setattr(race, "train", train)
    assert len(race.race(["lenet5"], 1, tmp_path)["final"]) == 3 + 0 + 3 + 2
    rows = dict(line.split(" | ")[1::2][:2] for line in capsys.readouterr().out.splitlines())
    assert rows == {
        "adamw": "5.0000 (5.0000 … 5.0000)",
        "muon": "diverged",
        "schedule_free_adamw": "5.0000 (5.0000 … 5.0000)",
        "sgd": "1.0000 (1.0000 … 1.0000), 2 of 3 seeds",
    }


def test_the_picture_has_a_line_for_each_optimizer():
    runs = [
        race.asdict(race.Result(problem, name, 0.1, seed, [1, 2], [2.0, 1.0 + seed], [0, 0], [0.5, 1.0]))
        for problem in race.PROBLEMS
        for name in draw_curves.COLOURS
        for seed in race.SEEDS
    ]
    root = ET.fromstring(draw_curves.draw(runs))
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == len(draw_curves.COLOURS) * (1 + 2 * len(race.PROBLEMS))


def test_a_misspelt_problem_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        race.main(["--problems", "tiny_lm,lenet", "--out", str(tmp_path / "race")])
    assert "unknown problem 'lenet'; there are: tiny_lm, lenet5" in capsys.readouterr().err
    assert not (tmp_path / "race").exists()
