"""The race of optimizers: its configs are valid, its budgets equal, and its curves are read from run folders."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

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
