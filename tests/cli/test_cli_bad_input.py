"""Whatever is wrong with the input: exit code 2 and one line that says what was found and what to do, no traceback."""

import struct

import pytest
import torch
import yaml

TRAINING = {"epochs": 2, "batch_size": 8, "device": "cpu"}


@pytest.fixture
def complaint(etude, config):
    """Train with a mistake in the config and return the line that says so."""

    def train(*overrides: str, **sections: object) -> str:
        return etude("train", config(**sections), *overrides).error

    return train


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"training": {**TRAINING, "epocs": 3}}, "toy.yaml:14: training.epocs: unknown key; did you mean 'epochs'?"),
        ({"trainning": {}}, "toy.yaml:14: trainning: unknown section; did you mean 'training'?"),
        ({"training": {**TRAINING, "dropout": 0.5}}, "training.dropout: unknown key; 'dropout' belongs to 'model'"),
        ({"model": {"name": "cli_net", "widht": 3}}, "model.widht: unknown key; did you mean 'width'?"),
        ({"training": {**TRAINING, "epochs": "ten"}}, "training.epochs: expected an integer, got 'ten'"),
        ({"training": {**TRAINING, "epochs": "3"}}, "got '3'; write 3 without quotes"),
        ({"optimizer": {"name": "adamw", "lr": "nan"}}, "optimizer.lr: expected a number, got 'nan'\n"),
        ({"training": {**TRAINING, "epochs": 2.0}}, "training.epochs: expected an integer, got 2.0; write 2"),
        ({"training": [1]}, "training: expected a mapping, got [1]"),
        ({"model": [1]}, "model: expected the name of a model, or a mapping with 'name:' (there are: "),
        ({"imports": 3}, "imports: expected a list"),
        ({"training": {**TRAINING, "batch_size": 0}}, "training.batch_size: must be at least 1, got 0"),
        ({"optimizer": {"name": "adamw", "lr": -1.0}}, "optimizer.lr: must be greater than 0, got -1.0"),
        ({"model": {"name": "cli_net", "dropout": -0.1}}, "model.dropout: must be at least 0, got -0.1"),
        (
            {"training": {**TRAINING, "precision": "fp8"}},
            "training.precision: must be 'auto', 'fp32', 'bf16' or 'fp16'",
        ),
        ({"model": "lenett5"}, "model: unknown model 'lenett5'; did you mean 'lenet5'?"),
        ({"optimizer": {"name": "adamm"}}, "unknown optimizer 'adamm'; did you mean 'adam"),
        ({"optimizer": "zzz"}, "optimizer: unknown optimizer 'zzz' (there are: adafactor, "),
        ({"scheduler": "cosin"}, "unknown scheduler 'cosin'; did you mean 'cosine'?"),
        ({"callbacks": [{"name": "early_stoping"}]}, "callbacks.0"),
        ({"model": None}, "toy.yaml: there is no `model:` section; add one"),
        ({"data": None}, "toy.yaml: there is no `data:` section; add one"),
    ],
    ids=str,
)
def test_mistake_in_a_config(complaint, sections, words):
    assert words in complaint(**sections) + "\n"


def test_unknown_key_far_from_any_other(etude, config):
    """Nothing is near enough to be meant, so the line is as long as it must be to name them all."""
    outcome = etude("train", config(training={**TRAINING, "colour": 1}))
    assert outcome.code == 2
    (line,) = outcome.errors
    assert "training.colour: unknown key (allowed: epochs, max_steps, batch_size, " in line


def test_every_mistake_has_its_line(etude, config):
    path = config(training={**TRAINING, "batch_size": 0, "epocs": 2}, optimizer={"name": "adamw", "lr": "high"})
    outcome = etude("config", "check", path)
    assert outcome.code == 2
    assert [line.split(": ")[:3] for line in outcome.errors] == [
        ["etude", "toy.yaml:9", "optimizer.lr"],
        ["etude", "toy.yaml:12", "training.batch_size"],
        ["etude", "toy.yaml:14", "training.epocs"],
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epocs=3", "command line: training.epocs: unknown key; did you mean 'epochs'?"),
        ("trainin.epochs=3", "command line: trainin: unknown section; did you mean 'training'?"),
        ("optimizer.momentum=0.9", "command line: optimizer.momentum: unknown key; it is an argument of "),
        ("training.epochs=many", "command line: training.epochs: expected an integer, got 'many'"),
        ("training.epochs=0", "command line: training.epochs: must be at least 1, got 0"),
        ("training.epochs", "cannot read 'training.epochs' as an override: write section.key=value"),
        ("training.epochs=", "'training.epochs=' has no value; write training.epochs=null to disable it"),
        ("--epochs=3", "No such option"),
    ],
)
def test_mistake_in_an_override(etude, config, override, words):
    outcome = etude("train", config(), override)
    assert outcome.code == 2
    assert words in outcome.errors[-1]
    assert override.startswith("--") or outcome.error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "broken.yaml: the file is empty; write sections such as 'model:' and 'training:'"),
        ("# nothing\n", "broken.yaml: the file is empty"),
        ("- 1\n- 2\n", "broken.yaml: expected sections such as 'model:' and 'training:' at the top, found a list"),
        (
            "just words",
            "broken.yaml: expected sections such as 'model:' and 'training:' at the top, found the single",
        ),
        ("model: [1\ndata: 2", "broken.yaml:2:5: not valid YAML"),
        ("model: a\nmodel: b\n", "broken.yaml:2: key 'model' is given twice"),
        ("!!python/object/apply:os.system ['touch pwned']", "broken.yaml"),
        (b"\xff\xfe\x00\x01", "broken.yaml: not a text file in UTF-8"),
    ],
    ids=repr,
)
def test_file_that_is_no_config(etude, tmp_path, content, words):
    (tmp_path / "broken.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in etude("train", "broken.yaml").error
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tooy.yaml", "no file 'tooy.yaml'; did you mean 'toy.yaml'?"),
        ("nowhere/toy.yaml", "no file 'nowhere/toy.yaml': its folder does not exist"),
        ("mymet/baseline", "no experiment 'mymet/baseline'; did you mean 'mynet/baseline'?"),
        ("mynet/bassline", "no experiment 'mynet/bassline'; did you mean 'mynet/baseline'?"),
    ],
)
def test_missing_file(etude, config, name, words):
    config("toy.yaml")
    config("experiments/mynet/configs/baseline.yaml")
    assert words in etude("train", name).error


@pytest.mark.parametrize("name", ["line\nbreak.yaml", "\x1b[31mred.yaml"])
def test_a_name_stays_in_its_line(etude, name):
    assert ascii(name)[1:-1] in etude("train", name).error


def test_missing_file_under_extends(etude, config):
    assert "toy.yaml:14: extends: no file 'bass.yaml'" in etude("train", config(extends="bass.yaml")).error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "toy.yaml:2: imports.0: no file 'mine.py'"),
        ("def broken(:\n", "imports.0: cannot import 'mine.py': mine.py:1: "),
        ("import no_such_package\n", "imports.0: cannot import 'mine.py': No module named 'no_such_package'"),
        (
            "from etude import register\n@register('optimizer', 'adamw')\ndef adamw(params): ...\n",
            "imports.0: optimizer 'adamw' is registered twice",
        ),
    ],
)
def test_bad_imports(complaint, tmp_path, content, words):
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    assert words in complaint(imports=["mine.py"])


@pytest.mark.parametrize("name", ["..", "", ".", "a..b", ".a", "a b", "1a", "x" * 5000, "x" * 5000 + ".py"])
def test_import_of_what_names_no_module(etude, config, name):
    outcome = etude("config", "check", config(imports=[name]))
    assert outcome.code == 2
    (line,) = outcome.errors
    assert "imports.0: " in line
    assert len(line) < 1000


@pytest.mark.parametrize(
    "override",
    [
        "training.epochs=\udcff",
        "\udcff=1",
        f"training.epochs={'9' * 5000}",
        f"training.epochs={'x' * 100_000}",
        f"training.{'x' * 100_000}=1",
        f"model={'x' * 100_000}",
        f"{'x' * 100_000}=1",
        "x" * 100_000,
        f"model.width.{'x' * 100_000}=1",
        "training.epochs=1:30",
        "optimizer.lr=.inf",
        "optimizer.lr=.nan",
        "optimizer.lr=1e999",
    ],
    ids=lambda text: ascii(text)[:30],
)
def test_override_that_nothing_can_be_made_of(etude, config, override):
    outcome = etude("config", "check", config(), override)
    assert outcome.code == 2
    (line,) = outcome.errors
    assert line.startswith("etude: command line: ")
    assert len(line) < 1000


def test_import_of_a_module_that_does_not_exist(complaint):
    assert "imports.0: cannot import 'no_such_module'" in complaint(imports=["no_such_module"])


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:99", "device 'cuda:99' is not available ("),
        ("gpu", "device 'gpu' is not known to torch; use cpu, cuda or cuda:N"),
        ("meta", "device 'meta' cannot train; use cpu, cuda or cuda:N"),
        ("cuda:99999999999999999999", "device 'cuda:99999999999999999999' is not known to torch"),
        pytest.param(
            "mps",
            "device 'mps' is not available",
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="here it is"),
        ),
    ],
)
def test_unknown_device(complaint, device, words):
    assert words in complaint(f"training.device={device}")


# ------------------------------------------------------------------------------------------------ data


def test_batch_larger_than_the_data_with_drop_last(complaint):
    line = complaint("training.drop_last=true", "training.batch_size=500")
    assert "data, split train: batch_size 500 is larger than the 40 samples, so drop_last leaves no batch" in line
    assert "lower batch_size to 40 or less, or set drop_last to false" in line


def test_empty_loader(complaint):
    assert "data, split train: the data is empty" in complaint(data={"name": "cli_points", "samples": 0})


@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("declared", [True, False])
def test_labels_out_of_range(complaint, label, declared):
    """Seen before training if the data says how many classes there are, else in the step that meets them."""
    line = complaint(data={"name": "cli_bad_labels", "label": label, "declared": declared})
    assert "out of range" in line
    assert str(label) in line
    assert "3 classes" in line


def idx_file(count: int, values: int) -> bytes:
    return bytes([0, 0, 8, 2]) + struct.pack(">2I", count, 6) + bytes(values)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "images.idx: cannot be read (No such file or directory)"),
        (b"", "images.idx: not an idx file (it begins with nothing)"),
        (b"<html>404</html>", "images.idx: not an idx file"),
        (idx_file(8, 6 * 8 - 5), "images.idx: truncated: 55 bytes, but its header (8, 6) asks for 60"),
        (idx_file(8, 6 * 8 + 1), "images.idx: too long"),
    ],
    ids=["missing", "empty", "html", "truncated", "too long"],
)
def test_damaged_data_file(complaint, tmp_path, content, words):
    if content is not None:
        (tmp_path / "images.idx").write_bytes(content)
    assert words in complaint(data={"name": "cli_file", "file": str(tmp_path / "images.idx")})


def test_corrupted_mnist_file(etude, config, tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(idx_file(8, 48))
    line = etude("train", config(data={"name": "mnist", "root": str(folder)}, model="lenet5")).error
    assert f"{folder}/train-images-idx3-ubyte is damaged: its SHA-256 is " in line
    assert line.endswith("replace or delete it")


def test_after_a_mistake_the_same_command_works(etude, config, tmp_path):
    """A run that never began leaves nothing in the way, neither in a folder that was named nor in a new one."""
    folder = tmp_path / "run"
    bad = config(data={"name": "cli_bad_labels", "declared": False})
    assert "labels out of range" in etude("train", bad, "--run-dir", folder).error
    assert "is not a run folder" in etude("resume", folder).error
    assert etude("train", config(), "--run-dir", folder, "-q").code == 0
    for setting in ("save_checkpoints=true", "checkpoint_dir=weights", "checkpoint_dir=deep/weights"):
        assert "data is empty" in etude("train", config(), "data.samples=0", f"training.{setting}").error
        assert not list((tmp_path / "runs").glob("*/*"))


# ------------------------------------------------------------------------------------------------ sizes


MLP = {"name": "mlp", "in_features": 3, "hidden": [8], "out_features": 3}


def test_sizes_that_do_not_fit(etude, config, tmp_path):
    """The most usual mistake of all: the line names the layer and its input, and the corrected command works."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    line = etude("train", config(model=MLP), "--run-dir", folder, "-q").error
    assert "Linear(in_features=3, out_features=8" in line
    assert "(8, 6) float32" in line
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "checkpoints", "notes.txt"]
    assert etude("train", config(model=MLP), "model.in_features=6", "--run-dir", folder, "-q").code == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert "Linear(in_features=3" in etude("train", config(model=MLP), "-q").error
    assert not list((tmp_path / "runs").glob("*/*"))


def test_evaluation_of_data_that_does_not_fit(etude, run, tmp_path):
    images = tmp_path / "images.idx"
    images.write_bytes(bytes([0, 0, 8, 2]) + struct.pack(">2I", 8, 5) + bytes(40))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] = {"name": "cli_file", "file": str(images)}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    line = etude("evaluate", run, "--split", "train").error
    assert "Linear(in_features=6" in line
    assert "(8, 5) float32" in line


def test_a_mistake_in_own_code_keeps_its_traceback_and_frees_the_folder(etude, config, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyError, match="missing"):
        etude("train", config(model="cli_broken"), "--run-dir", folder, "-q")
    assert etude("train", config(), "--run-dir", folder, "-q").code == 0
    with pytest.raises(KeyError, match="missing"):
        etude("train", config(model="cli_broken"), "-q")
    assert not list((tmp_path / "runs").glob("*/*"))


def test_a_failure_after_steps_leaves_the_run(etude, config, tmp_path):
    folder = tmp_path / "run"
    model = {"name": "cli_broken", "good_steps": 7}
    overrides = ["training.save_every_steps=2", "training.sanity_val_batches=0", "training.validate_interval=0"]
    with pytest.raises(KeyError, match="missing"):
        etude("train", config(model=model), "--run-dir", folder, "-q", *overrides)
    before = sorted(folder.rglob("*"))
    assert "already holds a run" in etude("train", config(), "--run-dir", folder).error
    assert sorted(folder.rglob("*")) == before
    assert (folder / "config.yaml").exists()


# ------------------------------------------------------------------------------------------------ new


@pytest.mark.parametrize("name", ["my-experiment", "1st", "class", "a/b", ""])
def test_name_that_cannot_be_an_experiment(etude, tmp_path, name):
    assert "is not a valid experiment name; use letters, digits and _" in etude("new", name).error
    assert not (tmp_path / "experiments").exists()


def test_experiment_that_is_there_already(etude):
    assert etude("new", "mine").code == 0
    assert "mine exists already; choose another name" in etude("new", "mine").error


def test_unwritable_experiments_folder(etude, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot create file/mine: " in etude("new", "mine", "--root", "file").error
