"""Sweeps that run to their end: what is tried, what is compared, and what is left in the folder."""

import itertools
import json
from pathlib import Path

import optuna
import pytest
import yaml

from etude.core import ConfigError
from etude.monitor.reading import read_config
from etude.sweep import SweepFolder
from etude.sweep.launch import TrialProcess
from etude.sweep.watch import MetricReader, RunningTrial

COMPLETE, PRUNED, FAIL = (
    optuna.trial.TrialState.COMPLETE,
    optuna.trial.TrialState.PRUNED,
    optuna.trial.TrialState.FAIL,
)


def trials(folder: str = "s"):
    return SweepFolder(folder).study().trials


def best_loss(run: Path, name: str = "val_loss", best=min) -> float:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return best(record[name] for record in records if record["split"] == "val")


def test_trials_are_run_folders_whose_settings_and_values_are_in_the_study(etude, points):
    done = etude(
        *("sweep", points, "optimizer.lr=1e-3..1e-1:log", "model.dropout=0..0.5:0.25", "training.epochs=2"),
        *("--trials", 5, "--workers", 2, "--dir", "s"),
    )
    assert done.code == 0, done.err
    assert "5 of 5 trials: 5 complete" in done.out
    assert "counts as the best" not in done.out
    for trial in trials():
        run = Path("s", f"trial-{trial.number:04d}")
        config = read_config(run)
        assert trial.value == best_loss(run)
        assert config["optimizer"]["lr"] == trial.params["optimizer.lr"]
        assert config["model"]["dropout"] == trial.params["model.dropout"] in (0.0, 0.25, 0.5)
        assert config["training"]["epochs"] == 2
        assert 1e-3 <= trial.params["optimizer.lr"] <= 1e-1
    told = json.loads(Path("s", "trials.json").read_text())  # for readers without optuna
    assert (told["metric"], told["mode"], told["total"], told["name"]) == ("val_loss", "min", 5, "points")
    assert [(one["state"], one["value"], one["params"]) for one in told["trials"]] == [
        ("complete", trial.value, trial.params) for trial in trials()
    ]
    assert [one["runs"] for one in told["trials"]] == [[f"trial-{number:04d}"] for number in range(5)]
    assert told["space"]["optimizer.lr"] == {"low": 0.001, "high": 0.1, "log": True}
    assert set(told["importance"]) <= {"optimizer.lr", "model.dropout"}
    best = min(trials(), key=lambda trial: trial.value)
    assert f"best: trial {best.number}, " in done.out
    listed = etude("runs", "list", "s", "--sort", "best")
    assert f"trial-{best.number:04d}" in listed.out.splitlines()[1]


def test_the_config_of_the_best_trial_trains_to_its_weights(etude, points, same_weights):
    assert etude("sweep", points, "optimizer.lr=0.0001,0.02", "--dir", "s").code == 0
    made = etude("sweep", "best", "s", "--out", "best.yaml")
    assert made.out == "made best.yaml; train it with: etude train best.yaml\n"
    assert etude("train", "best.yaml", "--run-dir", "again", "-q").code == 0
    last = Path("checkpoints", "last", "model.safetensors")
    assert Path("again", last).read_bytes() == Path("s", "trial-0001", last).read_bytes()
    same_weights(Path("s", "trial-0001"), "optimizer.lr=0.02")
    assert etude("sweep", "best", "s").out == Path("best.yaml").read_text()


def test_the_best_config_does_not_keep_the_share_of_the_cores_that_a_trial_had(etude, points, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert etude("sweep", points, "optimizer.lr=0.01,0.02", "--workers", 2, "--dir", "s").code == 0
    assert read_config(Path("s/trial-0000"))["training"]["num_threads"] >= 1
    assert yaml.safe_load(etude("sweep", "best", "s").out)["training"]["num_threads"] is None


def test_a_grid_tries_every_combination_once_in_order(etude, points):
    Path("sweep.yaml").write_text(
        "experiment: points.yaml\nspace:\n  model.hidden: [[4], [4, 4]]\n  training.drop_last: [true, false]\n"
        "  scheduler: [null, cosine]\noverrides: {training.epochs: 1}\nworkers: 2\n"
    )
    done = etude("sweep", "sweep.yaml", "--dir", "s")
    assert done.code == 0, done.err
    expected = list(itertools.product([[4], [4, 4]], [True, False], [None, "cosine"]))
    found = [read_config(Path("s", f"trial-{number:04d}")) for number in range(8)]
    assert [
        (one["model"]["hidden"], one["training"]["drop_last"], (one["scheduler"] or {}).get("name")) for one in found
    ] == expected
    assert len(trials()) == 8
    Path("s").rename("moved")
    again = etude("sweep", "moved", "--trials", 20)  # there are no more combinations
    assert again.out.splitlines()[1] == "8 of 8 trials: 8 complete", again.err


def test_a_grid_is_continued_in_its_own_order(etude, points):
    words = ["optimizer.lr=0.01,0.02", "model.dropout=0.1,0.2"]
    options = ["training.epochs=1", "--sampler", "grid", "--dir", "s", "--trials"]
    assert etude("sweep", points, *words, *options, 1).code == 0
    assert etude("sweep", points, *reversed(words), *options, 4).code == 0
    found = [(one.params["optimizer.lr"], one.params["model.dropout"]) for one in trials()]
    assert found == [(0.01, 0.1), (0.01, 0.2), (0.02, 0.1), (0.02, 0.2)]


def test_a_sweep_in_two_parts_tries_what_one_in_one_part_does(etude, points):
    space = ["optimizer.lr=1e-4..1e-1:log", "model.dropout=0.0..0.5", "training.epochs=1", "--dir"]
    sampler = "sampler: {name: tpe, n_startup_trials: 2, multivariate: true, group: true}\nseed: 3\n"
    Path("sweep.yaml").write_text(f"experiment: points.yaml\nspace: {{optimizer.eps: [1e-8]}}\n{sampler}")
    assert etude("sweep", "sweep.yaml", *space, "whole", "--trials", 5).code == 0
    assert etude("sweep", "sweep.yaml", *space, "parts", "--trials", 3).code == 0
    assert etude("sweep", "parts", "--trials", 5).code == 0
    whole, parts = trials("whole"), trials("parts")
    assert [one.params for one in whole] == [one.params for one in parts]
    assert [one.value for one in whole] == [one.value for one in parts]
    assert len({one.params["optimizer.lr"] for one in whole}) == 5


def test_seeds_are_averaged(etude, points):
    words = ["optimizer.lr=0.01,0.03", "training.seed=5", "training.epochs=2"]
    done = etude("sweep", points, *words, "--seeds", 2, "--metric", "val_accuracy", "--dir", "s")
    assert done.code == 0, done.err
    for trial in trials():
        runs = [Path("s", f"trial-{trial.number:04d}", f"seed-{seed}") for seed in (0, 1)]
        assert [read_config(run)["training"]["seed"] for run in runs] == [5, 6]
        assert trial.value == sum(best_loss(run, "val_accuracy", max) for run in runs) / 2
    best = max(trials(), key=lambda trial: trial.value)
    config = yaml.safe_load(etude("sweep", "best", "s").out)
    assert config["optimizer"]["lr"] == best.params["optimizer.lr"]


def test_a_bad_trial_is_pruned_and_keeps_its_checkpoint(etude, points):
    Path("sweep.yaml").write_text(
        "experiment: points.yaml\nspace: {optimizer.lr: [0.03, 1e-7]}\n"
        "pruner: {name: median, n_startup_trials: 1, n_warmup_steps: 1}\n"
        "overrides: {training.epochs: 150, training.checkpoint_interval: 150}\n"
    )
    done = etude("sweep", "sweep.yaml", "--dir", "s")
    assert done.code == 0, done.err
    good, bad = trials()
    assert (good.state, bad.state) == (COMPLETE, PRUNED)
    assert sorted(good.intermediate_values) == list(range(150))
    assert 1 <= max(bad.intermediate_values) < 149  # the first value is warm-up
    assert Path("s/trial-0001/checkpoints/last/model.safetensors").exists()
    assert not Path("s/trial-0001/result.json").exists()
    assert "trial 1  pruned after" in done.out


def test_arguments_that_a_pruner_does_not_check_itself_are_one_line(etude, points):
    Path("sweep.yaml").write_text(
        "experiment: points.yaml\nspace: {optimizer.lr: [0.03, 0.01]}\npruner: {name: hyperband, reduction_factor: 1}\n"
    )
    assert "pruner: " in etude("sweep", "sweep.yaml", "--dir", "s").error


def test_a_failed_trial_is_recorded_with_its_reason_and_the_others_go_on(etude, points):
    done = etude("sweep", points, "model.in_features=7,8", "training.epochs=1", "--dir", "s")
    assert done.code == 0, done.err
    assert [trial.state for trial in trials()] == [FAIL, COMPLETE]
    assert "trial 0  failed: " in done.out
    assert "1 failed, 1 complete" in done.out
    log = Path("s/trial-0000/output.txt").read_text().splitlines()
    assert trials()[0].user_attrs["error"] == log[-1].removeprefix("etude: ")
    assert "Traceback" not in log


def test_a_trial_that_diverges_is_a_failed_one(etude, points):
    done = etude("sweep", points, "optimizer.lr=1e30,0.01", "optimizer.name=sgd", "--dir", "s")
    assert done.code == 0, done.err
    assert [trial.state for trial in trials()] == [FAIL, COMPLETE]
    assert "finite" in trials()[0].user_attrs["error"]


def write(records, path: Path) -> None:
    path.mkdir()
    lines = [json.dumps({"split": "val", "epoch": epoch, **one}) + "\n" for epoch, one in enumerate(records)]
    Path(path, "metrics.jsonl").write_text("".join(lines))


def test_values_of_the_last_phase_are_compared(tmp_path):
    """Losses of different tasks are not comparable, so that the best checkpoint is one of the last phase, too."""
    run = tmp_path / "run"
    write([{"val_loss": 3.0, "phase": 1.0}, {"val_loss": 5.0, "phase": 2.0}, {"val_loss": 4.0, "phase": 2.0}], run)
    reader = MetricReader(run, "val_loss")
    assert reader.read() == [3.0, 5.0, 4.0]  # what the pruner gets
    assert reader.comparable == [5.0, 4.0]


@pytest.mark.parametrize(("status", "reported"), [("finished", {0: 3.0, 1: 2.0}), ("running", {0: 3.0})])
def test_only_a_run_that_trains_is_pruned(tmp_path, status, reported):
    """One that has finished in the meantime is complete, with all of its values."""

    class Stopped(TrialProcess):
        def terminate(self):
            (tmp_path / "stopped").touch()

    run = tmp_path / "run"
    write([{"val_loss": 3.0}, {"val_loss": 2.0}], run)
    (run / "result.json").write_text(json.dumps({"status": status}))
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1))
    one = RunningTrial(study.ask(), [run], None, 0, "val_loss", "min")
    one.process = Stopped(run / "output.txt")
    one.report()
    assert study.trials[0].intermediate_values == reported
    assert one.is_pruned == (tmp_path / "stopped").exists() == (status == "running")


@pytest.mark.parametrize(
    ("code", "words"), [(1, "it broke"), (130, "stopped by a signal"), (-9, "killed by signal 9"), (7, "it broke")]
)
def test_the_reason_of_a_failure_is_no_hint_about_ctrl_c(tmp_path, code, words):
    study = optuna.create_study()
    one = RunningTrial(study.ask(), [tmp_path], None, 0, "val_loss", "min")
    one.process = TrialProcess(tmp_path / "output.txt")
    last = "stopping after this step; press Ctrl-C again to stop at once" if code == 130 else "etude: it broke"
    (tmp_path / "output.txt").write_text(f"first\n{last}\n")
    assert one.last_words(code) == words


def test_a_metric_of_a_later_phase_is_waited_for(tmp_path):
    run = tmp_path / "run"
    write([{"val_loss": 3.0, "phase": 1.0}], run)
    reader = MetricReader(run, "val_b/loss")
    assert reader.read() == []
    with pytest.raises(ConfigError, match=r"no 'val_b/loss'.*val_loss\)"):
        reader.refuse()
    with Path(run, "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "val_loss": 4, "val_b/loss": 1.0, "phase": 2.0}\n')
    assert reader.read() == reader.comparable == [1.0]


def test_accuracy_has_two_names(tmp_path):
    write([{"val_accuracy": 0.5}, {"val_accuracy": 0.7}], tmp_path / "run")
    assert MetricReader(tmp_path / "run", "val_acc").read() == [0.5, 0.7]


def test_a_sweep_in_which_everything_fails_ends(etude, points):
    done = etude("sweep", points, "model.in_features=5,6,7,9,10,11", "--dir", "s")
    assert "the first 3 trials failed" in done.error
    assert len(trials()) == 3


def test_failures_after_trials_of_an_earlier_part_that_succeeded_do_not_end_the_sweep(etude, points):
    words = ["model.in_features=8,5,6,7", "training.epochs=1", "--sampler", "grid", "--dir", "s"]
    assert etude("sweep", points, *words, "--trials", 1).code == 0
    done = etude("sweep", "s", "--trials", 4)
    assert done.code == 0, done.err
    assert "1 complete, 3 failed" in done.out


def test_a_short_sweep_in_which_everything_fails_is_an_error(etude, points):
    done = etude("sweep", points, "model.in_features=5,6", "--mode", "max", "--dir", "s")
    assert "the largest 'val_loss' counts as the best, because mode is max" in done.out
    assert "all trials failed (2)" in done.error
    assert [trial.state for trial in trials()] == [FAIL, FAIL]


def test_an_unknown_metric_ends_the_sweep_with_the_nearest_name(etude, points):
    done = etude("sweep", points, "optimizer.lr=0.01,0.02", "--metric", "val_los", "--mode", "min", "--dir", "s")
    assert "'val_los'; did you mean 'val_loss'?" in done.error


@pytest.mark.parametrize("epochs", [1, 50])
def test_a_trial_without_the_metric_of_the_others_is_a_failed_one(etude, points, epochs):
    words = ["data.validation=0.2,0,0.3", f"training.epochs={epochs}", "--dir", "s"]
    done = etude("sweep", points, *words)
    assert done.code == 0, done.err
    assert "trial 1  failed: metric: the runs report no 'val_loss'" in done.out
    assert [trial.state for trial in trials()] == [COMPLETE, FAIL, COMPLETE]


def test_a_database_holds_the_study(etude, points):
    options = ["--storage", "sqlite:///s.db"]
    done = etude("sweep", points, "optimizer.lr=0.01,0.02", "training.epochs=1", "--dir", "s", *options)
    assert done.code == 0, done.err
    assert "2 of 2 trials" in etude("sweep", "status", "s", *options).out
    assert not Path("s/journal.jsonl").exists()
    assert "--storage" in etude("sweep", "status", "s").error


def test_status_and_plot(etude, points):
    words = ["optimizer.lr=0.0001,0.001,0.01", "model.dropout=0.0,0.2", "training.epochs=1"]
    assert etude("sweep", points, *words, "--dir", "s").code == 0
    shown = etude("sweep", "status", "s").out.splitlines()
    assert shown[0].split() == ["trial", "state", "val_loss", "done", "time", "optimizer.lr", "model.dropout"]
    assert shown[3].split()[:2] == ["2", "complete"]
    assert shown[-2] == "6 of 6 trials: 6 complete"
    found = json.loads(etude("sweep", "status", "s", "--json").out)
    assert [(one["state"], one["value"]) for one in found] == [("complete", trial.value) for trial in trials()]
    plotted = etude("sweep", "plot", "s").out
    assert "best so far" in plotted
    rows = [line.split() for line in plotted.partition("importance of settings\n")[2].splitlines()]
    assert [row[0] for row in rows] == ["optimizer.lr", "model.dropout"]
    assert ".png" in etude("sweep", "plot", "s", "--out", "x.jpg").error


def test_pictures(etude, points):
    pytest.importorskip("matplotlib")
    words = ["optimizer.lr=1e-4..1e-1:log", "model.hidden=[4],[8]", "training.epochs=1"]
    assert etude("sweep", points, *words, "--trials", 4, "--dir", "s").code == 0
    assert etude("sweep", "plot", "s", "--out", "x.svg").code == 0
    text = Path("x.svg").read_text()
    assert "<svg" in text
