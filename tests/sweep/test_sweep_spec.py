"""Sweep files and words of the command line: what they mean, and one line for every mistake."""

import math
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from hypothesis import given, strategies as st
from optuna.distributions import FloatDistribution, IntDistribution

from etude.config.overrides import parse_override
from etude.config.selection import plain
from etude.core import ConfigError
from etude.experiment import load_experiment_config
from etude.sweep.check import check_sweep
from etude.sweep.folder import SweepFolder
from etude.sweep.launch import devices_of
from etude.sweep.space import ask, distribution, labels_of, pruner_of, values_of
from etude.sweep.spec import Range, SweepSpec, candidates, override, overrides_of, read_document, read_spec, validated

SWEEP = "experiment: points.yaml\nspace:\n  optimizer.lr: {low: 1e-4, high: 1e-1, log: true}\ntrials: 3\n"


def test_words_are_ranges_lists_and_values(points):
    spec = read_spec(
        "points.yaml",
        [
            "optimizer.lr=1e-4..1e-1:log",
            "model.dropout=0..0.5:0.25",
            "training.batch_size=8..64",
            "model.hidden=[4],[8, 8]",
            "optimizer.betas=[0.9, 0.95]",
            "scheduler=null,cosine",
            "training.epochs=2",
        ],
        {"trials": 3},
    )
    assert spec.space == {
        "optimizer.lr": Range(low=1e-4, high=1e-1, log=True),
        "model.dropout": Range(low=0, high=0.5, step=0.25),
        "training.batch_size": Range(low=8, high=64),
        "model.hidden": [[4], [8, 8]],
        "scheduler": [None, "cosine"],
    }
    assert spec.overrides == {"optimizer.betas": [0.9, 0.95], "training.epochs": 2}


def test_words_replace_keys_of_the_file(points):
    Path("sweep.yaml").write_text(SWEEP)
    spec = read_spec("sweep.yaml", ["optimizer.lr=0.5", "model.dropout=0.1,0.2"])
    assert (spec.space, spec.overrides) == ({"model.dropout": [0.1, 0.2]}, {"optimizer.lr": 0.5})


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer.weight_decay=0..1", FloatDistribution(0.0, 1.0)),
        ("optimizer.weight_decay=0..2:1", FloatDistribution(0.0, 2.0, step=1.0)),
        ("optimizer.weight_decay=0..1:0.25", FloatDistribution(0.0, 1.0, step=0.25)),
        ("optimizer.learning_rate=1..2:log", FloatDistribution(1.0, 2.0, log=True)),
        ("training.learning_rate=1..2", FloatDistribution(1.0, 2.0)),
        ("training.batch_size=8..64", IntDistribution(8, 64)),
        ("training.batch_size=8..64:8", IntDistribution(8, 64, step=8)),
        ("model.hidden.0=4..8", IntDistribution(4, 8)),
    ],
)
def test_a_range_with_whole_ends_is_one_of_floats_where_the_config_holds_floats(points, word, expected):
    document = read_document("points.yaml", [word], {"trials": 3})
    spec = validated(document)
    check_sweep(spec, document)
    (values,) = spec.space.values()
    assert distribution(values) == expected
    # the file of the sweep, from which it is continued, says the same
    Path("again").mkdir()
    Path("again/sweep.yaml").write_text(spec.to_yaml())
    (values,) = read_spec("again").space.values()
    assert distribution(values) == expected


def test_samplers_say_what_they_need(points, monkeypatch):
    spec = read_spec("points.yaml", ["optimizer.lr=0.1..0.2"], {"trials": 2, "sampler": "gp"})
    pruner_of(spec)
    lists = read_spec("points.yaml", ["optimizer.lr=0.1,0.2"], {"trials": 2, "sampler": "cmaes"})
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _name: None)
        with pytest.raises(ConfigError, match="pip install scipy"):
            pruner_of(spec)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match="ranges"):
        pruner_of(lists)


def test_machines_that_share_a_database_do_not_repeat_a_combination(monkeypatch):
    """Each has a lock of its own: between reading the trials and adding one, others may add theirs."""
    spec = SweepSpec(experiment="points.yaml", space={"a": [1, True, [2]], "b": [None, 0.5]})
    study = optuna.create_study()
    monkeypatch.setattr(study, "get_trials", lambda **_: [])
    found = [values_of(spec, ask(study, spec).params) for _ in range(6)]
    assert [(one["a"], one["b"]) for one in found] == [(a, b) for a in (1, True, [2]) for b in (None, 0.5)]


@pytest.mark.parametrize("sampler", ["random", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_study_continued_by_other_processes_asks_for_the_same_trials(points, sampler):
    section = {"name": "gp", "n_startup_trials": 2} if sampler == "gp" else sampler
    spec = read_spec("points.yaml", ["optimizer.lr=1e-3..1:log", "model.dropout=0..0.5"], {"trials": 4})
    spec = SweepSpec.model_validate({**spec.identity(), "trials": 4, "sampler": section})
    found = []
    for opened in (1, 4):
        storage = optuna.storages.InMemoryStorage()
        for number in range(4):
            if number % (4 // opened) == 0:  # another process opens it
                study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
            trial = ask(study, spec)
            study.tell(trial, (math.log10(trial.params["optimizer.lr"]) + 2) ** 2 + trial.params["model.dropout"])
        found.append([one.params for one in study.trials])
    assert found[0] == found[1]
    assert len({one["optimizer.lr"] for one in found[0]}) == 4


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=3),
    max_leaves=4,
)


@given(VALUES)
def test_a_value_arrives_in_a_trial_as_it_was_written(value):
    assert parse_override(override("a.b", value)) == ("a.b", value)


@given(st.lists(VALUES, min_size=1, max_size=5, unique_by=lambda one: override("", one)))
def test_choices_come_back_from_optuna(values):
    spec = SweepSpec.model_construct(space={"key": values})
    choices = distribution(values).choices
    assert len(choices) == len(values)
    found = [
        values_of(spec, {"key": distribution(values).to_external_repr(place)})["key"] for place in range(len(values))
    ]
    assert [override("", one) for one in found] == [override("", one) for one in values]
    assert labels_of([1, True]) == ["1", "true"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("optimizer.lr", "optimizer.lrr", "sweep.yaml:3: space.optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("low: 1e-4", "low: 0", "sweep.yaml:3: space.optimizer.lr: log: true needs a positive low"),
        ("high: 1e-1", "high: 1e-5", "sweep.yaml:3: space.optimizer.lr: low must be less than high"),
        ("log: true", "lag: true", "space.optimizer.lr.lag: unknown key; did you mean 'log'?"),
        ("low: 1e-4", "low: -1.0, step: 0.1", "space.optimizer.lr: "),
        ("{low: 1e-4, high: 1e-1, log: true}", "[]", "space.optimizer.lr"),
        ("{low: 1e-4, high: 1e-1, log: true}", "[0.1, 0.1]", "space.optimizer.lr"),
        ("{low: 1e-4, high: 1e-1, log: true}", "[0.1, fast]", "sweep.yaml:3: space.optimizer.lr: "),
        ("trials: 3", "trails: 3", "sweep.yaml:4: trails: unknown section; did you mean 'trials'?"),
        ("trials: 3", "workers: 1", "the number of trials is missing; pass --trials N"),
        ("trials: 3", "trials: 0", "sweep.yaml:4: trials: "),
        ("trials: 3", "sampler: tp", "sampler"),
        ("trials: 3", "sampler: grid", "sweep.yaml:3: space.optimizer.lr: a grid needs a list"),
        ("trials: 3", "trials: 3\nsampler: {name: tpe, n_startup: 3}", "did you mean 'n_startup_trials'?"),
        ("trials: 3", "trials: 3\npruner: medain", "did you mean 'median'?"),
        (
            "trials: 3",
            "trials: 3\npruner: {name: successive_halving, reduction_factor: 1}",
            "pruner 'successive_halving': ",
        ),
        ("trials: 3", "trials: 3\nmetric: val_thing", "val_thing"),
        ("trials: 3", "trials: 3\nmode: smallest", "sweep.yaml:5: mode: must be 'min' or 'max'"),
        (
            "trials: 3",
            "trials: 3\noverrides: {training.epoch: 3}",
            "sweep.yaml:5: overrides.training.epoch: unknown key",
        ),
        ("trials: 3", "trials: 3\noverrides: {optimizer.lr: 3}", "'optimizer.lr' is in space and in overrides"),
        ("points.yaml", "pionts.yaml", "did you mean 'points.yaml'?"),
    ],
)
def test_a_mistake_in_a_sweep_file_is_one_line(etude, points, old, new, words):
    assert old in SWEEP
    Path("sweep.yaml").write_text(SWEEP.replace(old, new))
    assert words in etude("sweep", "sweep.yaml", "--dir", "s").error
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["points.yaml"], "nothing to sweep"),
        (["points.yaml", "training.epochs=3"], "nothing to sweep"),
        (["points.yaml", "optimizer.lr=1e-3..1e-1"], "pass --trials N"),
        (["points.yaml", "optimizer.lr=1..0.1", "--trials", 3], "command line: space.optimizer.lr: low must be less"),
        (["points.yaml", "optimizer.lr=0.1..1:lag", "--trials", 3], "after the colon write log"),
        (["points.yaml", "optimizer.lr=1e-3...1e-1", "--trials", 3], "two dots"),
        (["points.yaml", "optimizer.lr=a..1", "--trials", 3], "space.optimizer.lr.low: expected"),
        (["points.yaml", "training.batch_size=8..16:0.5", "--trials", 3], "training.batch_size: expected an integer"),
        (["points.yaml", "training.batch_size=8..16:9", "--trials", 3], "step 9 is more than the distance"),
        (["points.yaml", "optimizer.lrr=0.1,0.2"], "command line: optimizer.lrr: unknown key; did you mean 'lr'?"),
        (["points.yaml", "optimizer.lr="], "has no value"),
        (["points.yaml", "training.seed=1,2", "--seeds", 2], "space.training.seed: with seeds"),
        (["points.yaml", "optimizer.lr=1,2", "training.checkpoint_dir=/ck"], "checkpoint_dir is /ck, where only one"),
        (
            ["points.yaml", "optimizer.lr=1,2", "training.checkpoint_dir=../ck"],
            "is ../ck, where only one run can save",
        ),
        (["points.yaml", "=1,2"], "cannot read '=0' as an override"),
        (["pionts.yaml", "optimizer.lr=0.1,0.2"], "did you mean 'points.yaml'?"),
        (["points.yaml", "optimizer.lr=0.1,0.2", "--dir", "points.npz"], "cannot write points.npz"),
        (["points.yaml", "optimizer.lr=0.1,0.2", "--storage", "nonsense"], "--storage: cannot open the study"),
        (["points.yaml", "optimizer.lr=0.1..0.2", "--trials", 2, "--sampler", "cmaes"], "'cmaes' needs cmaes"),
        (["status", "."], "is not the folder of a sweep"),
        (["best", "nowhere"], "is not the folder of a sweep"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(etude, points, arguments, words):
    assert words in etude("sweep", *arguments).error


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lr=0.05", "optimizer={name: sgd},{name: adamw}"],
        ["optimizer.lr=0.05,0.07", "optimizer=sgd,adamw"],
        ["optimizer={name: sgd, lr: 1},{name: adamw}", "optimizer.lr=0.05,0.07"],
    ],
)
def test_a_key_of_a_section_that_is_searched_too_is_kept(points, words):
    """Whatever their order: a section that came after one of its keys would replace it without a word."""
    spec = read_spec("points.yaml", words)
    config = load_experiment_config("points.yaml", overrides=overrides_of({**spec.overrides, **spec.first_point()}))
    assert plain(config.selection("optimizer"))["lr"] == 0.05
    assert config.selection("optimizer").component.name == "sgd"
    assert check_sweep(spec, read_document("points.yaml", words)).name == "points"


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_processes_of_another_launcher_are_refused_once(etude, points, monkeypatch, rank, lines):
    """Each would try trials of its own, which would join those of the others."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    done = etude("sweep", points, "optimizer.lr=0.1,0.01", "--dir", "s")
    assert done.code == 2
    assert done.err.count("without torchrun") == len(done.err.splitlines()) == lines
    assert not Path("s").exists()


def test_a_file_named_like_a_command_is_reached_by_its_path(etude, points):
    Path("status").write_text(Path("points.yaml").read_text())
    assert "nothing to sweep" in etude("sweep", "./status").error
    assert "nothing to sweep" in etude("sweep", "run", "status").error


def test_devices_are_dealt_out_among_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [devices_of(slot, 1, 3) for slot in range(4)] == ["4", "6", "7", "4"]


def test_help_imports_neither_torch_nor_optuna():
    code = (
        "import sys\nsys.argv = ['etude', 'sweep', '--help']\nfrom etude.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(sorted({'torch', 'optuna'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "status" in done.stdout


@pytest.mark.parametrize(("low", "high", "step"), [(0.1, 0.3, 0.2), (0.0, 0.3, 0.1), (1, 4, 3), (0.7, 0.8, 0.1)])
def test_a_step_that_fits_in_spite_of_rounding(low, high, step):
    values = Range(low=low, high=high, step=step)
    assert max(candidates(values)) == high


def test_a_database_whose_tables_another_process_makes_meanwhile_is_opened(tmp_path, monkeypatch):
    create, failures = optuna.create_study, ["table studies already exists"]

    def create_study(**arguments):
        if failures:
            raise RuntimeError(failures.pop())
        return create(**arguments)

    monkeypatch.setattr(optuna, "create_study", create_study)
    folder = SweepFolder(tmp_path, f"sqlite:///{tmp_path}/all.db")
    assert folder.study("min").study_name == tmp_path.name
    failures += ["no such host", "no such host"]
    with pytest.raises(ConfigError, match="cannot open the study: no such host"):
        folder.study("min")
