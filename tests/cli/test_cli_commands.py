"""The commands, each doing what its help says."""

import json
import math
import os
import runpy
import subprocess
import sys

import pytest
import yaml
from cli_components import Net, SignDescent
from safetensors.torch import load_file

from etude.cli.main import _print_metrics
from etude.experiment import load_experiment_config
from forked_python import run_python
from run_files import weights


def metrics(folder, split):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["split"] == split]


# ------------------------------------------------------------------------------------------------ train, resume


def test_train_leaves_a_complete_run_folder(etude, config, tmp_path):
    outcome = etude("train", config(), "--run-dir", "run")
    assert outcome.code == 0
    assert outcome.err == ""
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock", "config.yaml", "metrics.jsonl", "events.jsonl", "env.json", "checkpoints", "result.json", "status.json"
    }  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"], result["epoch"]) == ("finished", 10, 2)
    lines = outcome.out.splitlines()
    assert "finished at step 10; run folder run" in lines
    shown = dict(line.split()[:2] for line in lines if line.startswith("  val_"))
    assert float(shown["val_loss"]) == pytest.approx(result["metrics"]["val_loss"], rel=1e-5)
    assert len(metrics(folder, "epoch")) == 2


def test_train_chooses_a_new_folder_each_time(etude, config, tmp_path):
    for _ in range(2):
        assert etude("train", config("mine.yaml"), "training.epochs=1", "-q").code == 0
    assert len([path for path in (tmp_path / "runs" / "mine").iterdir() if (path / "result.json").exists()]) == 2


def test_quiet_shows_only_the_outcome(etude, config):
    lines = etude("train", config(), "--run-dir", "run", "-q").out.splitlines()
    assert [line.split()[0] for line in lines] == ["finished", "val_loss", "val_accuracy", "data_wait", "best"]


def test_the_same_config_gives_the_same_weights_and_another_seed_others(etude, config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert etude("train", config(), "--run-dir", name, "-q", f"training.seed={seed}").code == 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_only_samples_of_text_are_shown(etude, config):
    path = config(callbacks=[{"name": "csv_logger", "filename": "samples.txt"}])
    outcome = etude("train", path, "--run-dir", "runs/1")
    assert outcome.code == 0
    assert "epoch_s" not in outcome.out
    assert "sampled from the model" not in outcome.out


def test_overwrite_starts_anew(etude, config, run):
    before = weights(run)
    assert etude("train", config(), "--run-dir", run, "--overwrite", "-q", "training.seed=1").code == 0
    assert weights(run) != before
    assert len(metrics(run, "epoch")) == 2


def test_resume_makes_a_finished_run_longer(etude, config, run, tmp_path):
    """Two epochs and then two more are four epochs at once, where the schedule does not look ahead."""
    outcome = etude("resume", run, "training.epochs=4", "-q")
    assert outcome.code == 0, outcome.err
    assert etude("train", config(), "training.epochs=4", "--run-dir", "straight", "-q").code == 0
    assert weights(run) == weights(tmp_path / "straight")
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["epochs"] == 4
    assert [record["epoch"] for record in metrics(run, "epoch")] == [0, 1, 2, 3]


@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.learning_rate", "training.learning_rate"])
def test_resume_with_another_learning_rate(etude, run, key):
    assert etude("resume", run, "training.epochs=3", f"{key}=0.5", "-q").code == 0
    assert [record["lr"] for record in metrics(run, "epoch")] == [0.01, 0.01, 0.5]


def test_a_learning_rate_that_no_checkpoint_has_yet_is_that_of_the_config(etude, run):
    """As after a resume with another rate that was killed before it saved."""
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.5"))
    assert etude("resume", run, "training.epochs=3", "-q").code == 0
    assert [record["lr"] for record in metrics(run, "epoch")] == [0.01, 0.01, 0.5]


@pytest.mark.parametrize(
    ("override", "warns"),
    [
        ("loss.label_smoothing=0.5", True),
        ("validation_loss={name: cross_entropy, label_smoothing: 0.5}", True),
        ("validation_loss=cross_entropy", False),
        ("optimizer.lr=0.5", False),
    ],
)
def test_values_of_another_loss_are_compared_with_a_warning(etude, config, override, warns):
    assert etude("train", config(loss="cross_entropy"), "--run-dir", "run", "-q").code == 0
    for epochs, overrides, says in ((3, (override,), warns), (4, (), False)):
        outcome = etude("resume", "run", f"training.epochs={epochs}", *overrides, "-q")
        assert outcome.code == 0
        assert ("val_loss" in outcome.err) == says


# ------------------------------------------------------------------------------------------------ evaluate


@pytest.mark.parametrize(("which", "epoch"), [("last", 1), ("10", 1), ("5", 0)])
def test_evaluate_gives_the_numbers_of_the_validation(etude, run, which, epoch):
    outcome = etude("evaluate", run, "--split", "validation", "--checkpoint", which)
    assert outcome.code == 0, outcome.err
    shown = dict(line.split()[:2] for line in outcome.out.splitlines()[1:])
    recorded = metrics(run, "val")[epoch]
    assert float(shown["loss"]) == pytest.approx(recorded["val_loss"], rel=1e-5)
    assert float(shown["accuracy"]) == pytest.approx(recorded["val_accuracy"], rel=1e-5)


def test_evaluate_takes_the_best_checkpoint_and_the_test_split(etude, run):
    best = min(metrics(run, "val"), key=lambda record: record["val_loss"])
    outcome = etude("evaluate", run)
    assert outcome.out.splitlines()[0] == f"{run}/checkpoints/step-{best['step']:08d} on the test split:"
    other = etude("evaluate", run, "--split", "train")
    assert outcome.out.splitlines()[1:] != other.out.splitlines()[1:]


def test_evaluate_changes_nothing(etude, run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert etude("evaluate", run).code == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


# ------------------------------------------------------------------------------------------------ list, new


def test_list_names_experiments_and_components(etude):
    etude("new", "mine")
    outcome = etude("list")
    assert outcome.code == 0
    assert "mine/baseline" in outcome.out
    by_kind = dict(line.split(": ", 1) for line in outcome.out.splitlines() if ": " in line)
    assert {"adamw", "sgd"} <= set(by_kind["optimizer"].split(", "))
    assert "lenet5" in by_kind["model"].split(", ")


def test_a_new_experiment_trains_as_it_is(etude, tiny_mnist, tmp_path):
    outcome = etude("new", "first_try")
    assert outcome.code == 0
    command = outcome.out.strip().partition("train it with: ")[2].split()
    assert command == ["etude", "train", "first_try/baseline"]
    outcome = etude(*command[1:], "-q")
    assert outcome.code == 0, outcome.err
    (folder,) = (tmp_path / "runs" / "first_try" / "baseline").iterdir()
    assert len(metrics(folder, "epoch")) == 3
    assert "EXPERIMENT_NAME" not in "".join(
        path.read_text() for path in (tmp_path / "experiments" / "first_try").rglob("*.*") if path.suffix != ".pyc"
    )


def test_the_script_of_a_new_experiment_trains_it(etude, tiny_mnist, tmp_path, capsys):
    assert etude("new", "second_try").code == 0
    script = runpy.run_path(str(tmp_path / "experiments" / "second_try" / "examples" / "train.py"))
    script["main"](["training.epochs=1"])
    assert "finished" in capsys.readouterr().out
    assert len([*(tmp_path / "runs" / "second_try" / "baseline").iterdir()]) == 1


# ------------------------------------------------------------------------------------------------ config


def test_config_show_loads_back_to_the_same(etude, config, tmp_path):
    path = config(
        scheduler={"name": "warmup_cosine", "warmup_steps": 3},
        callbacks=[{"name": "early_stopping", "patience": 4}, {"name": "cli_diary"}],
        training={"num_epochs": 3, "log_every": 7, "grad_clip": 0.5, "grad_accum_steps": {0: 1, 2: 4}},
    )
    shown = etude("config", "show", path)
    assert shown.code == 0, shown.err
    again = tmp_path / "again.yaml"
    again.write_text(shown.out)
    assert load_experiment_config(again).to_dict() == load_experiment_config(path).to_dict()
    assert yaml.safe_load(etude("config", "show", again).out) == yaml.safe_load(shown.out)
    training = yaml.safe_load(shown.out)["training"]
    assert training["log_interval"] == 7
    assert training["gradient_clip_norm"] == 0.5
    assert training["seed"] == 0  # a default


def test_the_run_folder_holds_what_config_show_shows(etude, config, run):
    assert yaml.safe_load((run / "config.yaml").read_text()) == yaml.safe_load(etude("config", "show", config()).out)


def test_overrides_reach_the_run(etude, config, tmp_path):
    arguments = [
        "model.width=5",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
        "training.max_steps=3",
        "scheduler=cosine",
    ]
    assert etude("train", config(), *arguments, "--run-dir", "run", "-q").code == 0
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["optimizer"]["name"] == "sgd"
    assert resolved["scheduler"]["name"] == "cosine"
    assert load_file(tmp_path / "run" / "checkpoints" / "last" / "model.safetensors")["0.weight"].shape == (5, 6)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 3


def test_extends(etude, config, tmp_path):
    config("base.yaml")
    (tmp_path / "variant.yaml").write_text("extends: base.yaml\nmodel: {width: 3}\ntraining: {epochs: 1}\n")
    resolved = yaml.safe_load(etude("config", "show", "variant.yaml").out)
    base = yaml.safe_load(etude("config", "show", "base.yaml").out)
    assert (resolved["model"]["width"], resolved["training"]["epochs"]) == (3, 1)
    assert resolved["training"]["batch_size"] == base["training"]["batch_size"] == 8
    assert resolved["model"]["dropout"] == base["model"]["dropout"]


def test_json_is_as_good_as_yaml(etude, config, tmp_path):
    data = yaml.safe_load(config().read_text())
    (tmp_path / "same.json").write_text(json.dumps(data))
    for name in ("toy.yaml", "same.json"):
        assert etude("train", name, "--run-dir", name.replace(".", "-"), "-q").code == 0
    assert weights(tmp_path / "toy-yaml") == weights(tmp_path / "same-json")


def test_config_check(etude, config):
    outcome = etude("config", "check", config())
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("toy.yaml: fine\n")


def test_config_schema_accepts_what_loads_and_refuses_what_does_not(etude, config):
    import jsonschema
    from cli_components import __file__ as components

    schema = json.loads(etude("config", "schema", "--import", components).out)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)  # which takes longer than all else here
    validator = kind(schema)
    good = yaml.safe_load(config().read_text())
    validator.validate(good)
    for section, key, value in (("training", "epocs", 1), ("training", "epochs", "ten"), ("model", "width", 0)):
        assert not validator.is_valid({**good, section: {**good[section], key: value}})


# ------------------------------------------------------------------------------------------------ users' own parts


def test_components_of_the_users_own(etude, config, tmp_path):
    path = config(
        model={"name": "cli_net", "width": 11},
        optimizer={"name": "cli_sign_descent", "lr": 0.02},
        loss={"name": "cli_margin", "scale": 3.0},
        callbacks=[{"name": "cli_diary", "file": "notes.txt"}],
    )
    outcome = etude("train", path, "--run-dir", "run", "-q")
    assert outcome.code == 0, outcome.err
    notes = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    assert [note.split(":")[0] for note in notes] == ["epoch 0", "epoch 1"]
    assert "val_loss" in notes[0]
    saved = load_file(tmp_path / "run" / "checkpoints" / "last" / "model.safetensors")
    assert set(saved) == set(Net(width=11).state_dict())
    losses = [record["loss"] for record in metrics(tmp_path / "run", "epoch")]
    assert losses[1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


def test_sign_descent_moves_every_weight_by_the_learning_rate(etude, config, tmp_path):
    """The user's optimizer is the one that ran: after one step each weight has moved by exactly ±lr or not at all."""
    arguments = ["training.max_steps=1", "optimizer.name=cli_sign_descent", "optimizer.lr=0.25", "-q"]
    import torch

    torch.manual_seed(0)
    before = Net().state_dict()
    assert etude("train", config(), *arguments, "--run-dir", "run").code == 0
    after = load_file(tmp_path / "run" / "checkpoints" / "last" / "model.safetensors")
    moves = torch.cat([(after[name] - before[name]).flatten().abs() for name in before])
    assert torch.all((moves < 1e-6) | ((moves - 0.25).abs() < 1e-6))
    assert (moves > 0.2).any()
    assert SignDescent.__name__ == "SignDescent"


# ------------------------------------------------------------------------------------------------ help and start-up

COMMANDS = [
    "",
    "train",
    "resume",
    "evaluate",
    "compare",
    "list",
    "new",
    "config",
    "config show",
    "config check",
    "config schema",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(etude, command):
    outcome = etude(*command.split(), "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.startswith(f"Usage: etude {command}".rstrip())


def test_help_names_every_command(etude):
    text = etude("--help").out
    assert all(f"  {command} " in text for command in COMMANDS if command and " " not in command)


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "toy.yaml", "--rundir", "x"], ["config"]])
def test_usage_errors(etude, arguments):
    outcome = etude(*arguments)
    assert outcome.code == 2
    assert "Usage: etude" in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_loads_no_torch():
    loaded = python(
        "import sys; sys.argv = ['etude', '--help']\n"
        "from etude.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded', *sys.modules)"
    ).split()
    assert "loaded" in loaded
    assert not {"torch", "numpy", "pydantic", "yaml"} & set(loaded)


def test_help_is_quick():
    """It takes about 0.15 s of one core; the bound allows for a slow machine and still notices an import of torch."""
    process = subprocess.Popen([sys.executable, "-m", "etude", "--help"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 1.0


@pytest.mark.parametrize("statement", ["import etude", "from etude import Trainer, Callback, DataLoader, register"])
def test_import_is_light(statement):
    heavy = {"rich", "yaml", "typer"} | ({"pydantic", "torch"} if statement == "import etude" else set())
    code = f"{statement}; import sys; print(*sys.modules)"
    loaded = set((python(code) if "torch" in heavy else run_python("-c", code).stdout).split())
    assert "etude" in loaded
    assert heavy & loaded == set()


def test_error_rates_are_shown_for_classes_and_not_for_tokens(capsys):
    _print_metrics({"val_accuracy": 0.9})
    _print_metrics({"val_accuracy": 0.2, "val_perplexity": 34.0})
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.split("   ")[-1] == "(10.00 % error)"
    assert second.split() == ["val_accuracy", "0.2"]


def test_the_rooms_of_features_are_imported_for_their_own_commands_only(etude):
    loaded = python(
        "import sys; from etude.cli.main import main; sys.argv = ['etude', 'list']\n"
        "try: main()\nexcept SystemExit: pass\nprint('loaded', *sys.modules)"
    ).split("loaded ")[1]
    assert "etude.cli.main" in loaded.split()
    assert not [name for name in loaded.split() if name.startswith("etude.multitask.compare")]
    assert "compare" in etude("--help").out
    assert "Did you mean 'compare'" in etude("compar").err
