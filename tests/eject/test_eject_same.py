"""An ejected file trains to the same weights as the experiment, bit for bit, without etude."""

import ast
import contextlib
import gzip
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from etude.checkpoint import CheckpointManager
from etude.data.tokens.writer import TokenWriter
from etude.eject import ejected
from etude.experiment import load_config, train_experiment

OWN_MODELS = str(Path(__file__).with_name("own_models.py"))
TRAINING = {"epochs": 3, "batch_size": 8, "device": "cpu"}


def trained(path, run_dir):
    """The weights and metrics of a run with etude."""
    outcome = train_experiment(path, run_dir=run_dir, progress=False)
    return CheckpointManager(run_dir / "checkpoints").load("last").model_state, outcome.metrics


def run_here(made, folder):
    """The weights and the printed lines of an ejected file, run in this process."""
    made.write(folder / "plain.py")
    names, lines = {"__name__": "ejected", "__file__": str(folder / "plain.py")}, io.StringIO()
    exec(compile(made.text, "plain.py", "exec"), names)
    with contextlib.redirect_stdout(lines):
        model = names["train"]()
    return model.state_dict(), lines.getvalue()


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        assert value.contiguous().numpy().tobytes() == found[name].contiguous().numpy().tobytes(), name


def assert_same_metrics(lines, metrics):
    """The last validation of the file and of the run: two ways to add up the same numbers."""
    found = ast.literal_eval(re.findall(r"validation (\{.*\})", lines)[-1])
    assert found["loss"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    for name, value in found.items():
        assert value == pytest.approx(metrics[f"val_{name}"], rel=1e-5), name


# ------------------------------------------------------------------------------------------------ as a program


def test_lenet_as_a_program(etude, lenet, tmp_path):
    config = lenet(scheduler={"name": "cosine"}, training={**TRAINING, "grad_accum_steps": 2})
    assert_program_ends_alike(etude, config, config, tmp_path)


def test_transformer_as_a_program_from_its_run_folder(etude, language, tmp_path):
    assert_program_ends_alike(etude, language(model={"dropout": 0.2}), tmp_path / "run", tmp_path)


def assert_program_ends_alike(etude, config, source, tmp_path):
    expected, metrics = trained(config, tmp_path / "run")
    out, weights = tmp_path / "out" / "plain.py", tmp_path / "plain.safetensors"
    out.parent.mkdir()
    outcome = etude("eject", source, out)
    assert outcome.code == 0, outcome.err
    assert str(out) in outcome.out
    assert not re.search(r"^\s*(import|from) etude", out.read_text(), re.MULTILINE)
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": ""}
    blocked = (
        "import sys; sys.modules['etude'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    # the name of the program is not among its arguments there
    code = blocked.replace("import runpy;", "import runpy; path = sys.argv.pop(1);").replace("sys.argv[1]", "path")
    command = [sys.executable, "-c", code, str(out), str(weights)]
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120).stdout
    assert_same_bits(load_file(weights), expected)
    assert_same_metrics(lines, metrics)


# ------------------------------------------------------------------------------------------------ every setting


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"name": "lenet5", "dropout": 0.4, "activation": "tanh", "pooling": "average"}},
        {"model": {"name": "mlp", "hidden": [20, 10], "dropout": 0.1}},
        {"optimizer": {"name": "adamw", "lr": 0.01, "amsgrad": True}},
        {"optimizer": {"name": "adam", "lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-4, "kernel": "loop"}},
        {"optimizer": {"name": "rmsprop", "lr": 0.001, "momentum": 0.5, "centered": True}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.5, "kernel": "foreach"}},
        {"loss": {"name": "cross_entropy", "label_smoothing": 0.1}},
        {"loss": {"name": "cross_entropy", "ignore_index": 3}},
        {"training": {**TRAINING, "seed": 11, "gradient_clip_norm": 0.01}},
        {"training": {**TRAINING, "gradient_clip_norm": None}},
        {"training": {**TRAINING, "gradient_clip_value": 1e-3, "precision": "bf16"}},
        {"training": {**TRAINING, "grad_accum_steps": 3, "drop_last": True, "max_steps": 5}},
        {"training": {**TRAINING, "max_steps": 7, "validate_every_steps": 2, "validate_interval": 0}},
        {"training": {**TRAINING, "batch_size": 64, "num_threads": 1, "deterministic": False}},
    ],
    ids=str,
)
def test_lenet_with_every_setting(lenet, tmp_path, sections):
    assert_ends_alike(lenet(**sections), tmp_path)


def test_packed_digits(digits, lenet, tmp_path):
    for path in list(digits.iterdir()):
        (digits / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert_ends_alike(lenet(), tmp_path)


def test_digits_held_out_and_limited(digits, lenet, tmp_path):
    data = {"name": "mnist", "root": str(digits), "validation_size": 10, "limit": 9, "normalize": False}
    assert_ends_alike(lenet(data=data), tmp_path)


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "constant", "factor": 0.5},
        {"name": "multistep", "milestones": [1, 2], "unit": "epoch"},
        {"name": "one_cycle", "pct_start": 0.4},
        {"name": "cosine_restarts", "first_period": 2, "multiplier": 2},
        {"name": "inverse_sqrt", "warmup_steps": 3},
        {"name": "wsd", "warmup_steps": 2, "cooldown_steps": 3},
        {"name": "warmup", "warmup_steps": 2, "schedule": {"name": "polynomial", "power": 2.0}},
        {
            "name": "sequence",
            "milestones": [4],
            "schedules": ["linear", {"name": "product", "schedules": ["cosine", {"name": "step", "step_size": 3}]}],
        },
    ],
    ids=lambda one: one["name"],
)
def test_every_schedule(lenet, tmp_path, schedule):
    assert_ends_alike(lenet(scheduler=schedule), tmp_path)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"tie_embeddings": False, "d_ff": 40}},
        {"loss": {"name": "language_modeling", "label_smoothing": 0.1}},
        {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "decay_only_matrices": True}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5, "groups": [{"params": "blocks.0", "lr": 0.01}]}},
        {"optimizer": {"name": "rmsprop", "lr": 0.01, "layer_decay": 0.5}, "scheduler": None},
        {"training": {**TRAINING, "batch_size": 4, "grad_accum_steps": 3}},
        {"model": {"d_model": 96, "n_layers": 1}},  # more than 65,536 weights: another sum for their norm
    ],
    ids=str,
)
def test_transformers(language, tmp_path, sections):
    assert_ends_alike(language(**sections), tmp_path)


def test_more_blocks_than_are_sorted(language, tmp_path):
    """Orders of more than 65,536 samples are computed in another way."""
    with TokenWriter(tmp_path / "many" / "train.bin", meta={"vocab_size": 60}) as writer:
        writer.add(np.arange(140_000) % 60)
    config = language(data={"root": str(tmp_path / "many"), "length": 2})
    assert "permuted" in ejected(load_config(config)).text
    assert_ends_alike(config, tmp_path, validates=False)


def test_flat_token_files_without_validation(language, tmp_path):
    folder = tmp_path / "flat"
    folder.mkdir()
    (folder / "train.bin").write_bytes((torch.arange(400) * 7 % 60).to(torch.uint16).numpy().tobytes())
    data = {"root": str(folder), "dtype": "uint16", "vocab_size": 60}
    assert_ends_alike(language(data=data), tmp_path, validates=False)


@pytest.mark.parametrize("loss", ["mse", "l1", {"name": "huber", "delta": 0.5}], ids=str)
def test_regression_on_a_table(lenet, tmp_path, loss):
    draw = np.random.default_rng(3)
    rows = [
        f"{a:.4f},{'xyz'[k]},{a * 2 - k:.4f}"
        for a, k in zip(draw.normal(size=50), draw.integers(0, 3, 50), strict=True)
    ]
    (tmp_path / "table.csv").write_text("\n".join(["a,kind,target", *rows]))
    model = {"name": "mlp", "hidden": [9], "dropout": 0.1}
    data = {"name": "csv", "path": str(tmp_path / "table.csv"), "target": "target"}
    assert_ends_alike(lenet(model=model, data=data, loss=loss), tmp_path)


def test_classes_of_arrays(lenet, tmp_path):
    draw = np.random.default_rng(4)
    np.savez(tmp_path / "arrays.npz", x=draw.normal(size=(70, 3)), y=draw.integers(0, 4, 70))
    data = {"name": "arrays", "path": str(tmp_path / "arrays.npz"), "validation": 0.2}
    assert_ends_alike(lenet(model={"name": "mlp", "hidden": [9]}, data=data), tmp_path)


def assert_ends_alike(config, tmp_path, *, validates=True):
    expected, metrics = trained(config, tmp_path / "run")
    found, lines = run_here(ejected(load_config(config)), tmp_path)
    assert_same_bits(found, expected)
    if validates:
        assert_same_metrics(lines, metrics)


# ------------------------------------------------------------------------------------------------ models of the user


def test_a_model_of_the_user_with_what_it_uses(lenet, tmp_path):
    config = lenet(imports=[OWN_MODELS], model={"name": "own_net", "rate": 0.25})
    text = ejected(load_config(config)).text
    assert "class Stem" in text
    assert "WIDTH = 12" in text
    assert "register" not in text
    assert_ends_alike(config, tmp_path)


def test_a_skipped_update_restores_buffers(lenet, tmp_path):
    """The first step makes the weights so large that the next one is not finite."""
    training = {**TRAINING, "epochs": None, "max_steps": 3}
    optimizer = {"name": "sgd", "lr": 1e30}
    config = lenet(imports=[OWN_MODELS], model={"name": "own_net"}, optimizer=optimizer, training=training)
    assert_ends_alike(config, tmp_path, validates=False)


# ------------------------------------------------------------------------------------------------ how it reads


MATRICES = {"name": "adamw", "decay_only_matrices": True}


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("lenet", {"scheduler": {"name": "warmup", "warmup_steps": 2, "schedule": "one_cycle"}}),
        ("lenet", {"training": {**TRAINING, "grad_accum_steps": 2, "gradient_clip_value": 0.1, "precision": "bf16"}}),
        ("lenet", {"training": {**TRAINING, "drop_last": True, "grad_accum_steps": 2, "validate_every_steps": 3}}),
        ("lenet", {"imports": [OWN_MODELS], "model": "own_net", "description": 'A "quoted" \\ ' + "very long " * 30}),
        ("lenet", {"model": {"name": "lenet5", "activation": "tanh", "dropout": 0.5}}),
        ("language", {"optimizer": MATRICES}),
        ("language", {"optimizer": {**MATRICES, "groups": [{"params": "blocks.0", "lr": 0.5}]}}),
    ],
)
def test_the_file_passes_the_linter(request, kind, sections):
    root, ruff = Path(__file__).parents[2], Path(sys.executable).with_name("ruff")
    text = ejected(load_config(request.getfixturevalue(kind)(**sections))).text
    # with the rules for experiments, whose scripts print
    where = ["--config", str(root / "pyproject.toml"), "--stdin-filename", "experiments/plain/train.py", "-"]
    for command in (["check", "--quiet"], ["format", "--diff", "--quiet"]):
        found = subprocess.run([ruff, *command, *where], input=text, capture_output=True, text=True, cwd=root)
        assert found.returncode == 0, found.stdout + found.stderr
    assert len(text.splitlines()) <= 300
