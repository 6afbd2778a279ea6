"""The package without the rooms of its features: everything else imports and trains."""

import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

import etude
from forked_python import run_python

ROOMS = ("multimodal", "multitask")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
IMAGES = """
import torch
from etude import register
from etude.data import DataSplits, TensorData

@register("data", "noise")
def noise() -> DataSplits:
    images, labels = torch.rand(24, 1, 28, 28), torch.arange(24) % 10
    return DataSplits(TensorData(images, labels), TensorData(images, labels), num_classes=10)
"""


def runner(root, rooms):
    """Return a function that runs Python with a copy of the package, in `root`, that lacks the rooms."""
    shutil.copytree(etude.__path__[0], root / "etude", ignore=shutil.ignore_patterns(*rooms, "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(root)}

    return partial(run_python, cwd=root, env=environment)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Return a function that runs Python with a copy of the package that lacks all rooms."""
    return runner(tmp_path_factory.mktemp("without"), ROOMS)


@pytest.mark.parametrize("rooms", [ROOMS[:1], ROOMS[1:], ROOMS], ids="+".join)
def test_a_star_import_brings_what_is_there_and_the_names_of_missing_rooms_are_not(rooms, tmp_path):
    gone = tuple(f"etude.{room}." for room in rooms)
    lacking = {name for name in etude.__all__ if getattr(etude, name).__module__.startswith(gone)}
    assert lacking
    code = """
from etude import *
import etude
print(*sorted(set(dir()) & set(etude.__all__)))
print(*(name for name in sorted(NAMES) if hasattr(etude, name)))
"""
    done = runner(tmp_path, rooms)("-c", code.replace("NAMES", str(etude.__all__)))
    assert done.returncode == 0, done.stderr
    imported, present = done.stdout.splitlines()
    assert imported.split() == present.split() == sorted(set(etude.__all__) - lacking)


def test_all_other_modules_import_and_keys_of_the_rooms_are_refused(without):
    code = """
import importlib, pkgutil, sys, etude
for module in pkgutil.walk_packages(etude.__path__, "etude."):
    if module.name != "etude.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # kernels, which nothing imports without it
                raise
assert not any(name.startswith("etude.multi") for name in sys.modules)
from etude.config import Document, kinds
from etude.core import ConfigError
import etude.experiment
from etude.experiment import experiment_schema, validate_experiment
assert not hasattr(etude.experiment, "compare_tasks")
assert "lenet5" in str(experiment_schema()) and "weighting" not in kinds()
for key in ("tasks", "vocab"):
    try:
        validate_experiment(Document({"model": "lenet5", "data": "mnist", key: {}}))
    except ConfigError as error:
        print(error)
"""
    done = without("-c", code)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" (there are: ")[0].partition(" (allowed: ")[0] for line in done.stdout.splitlines()] == [
        "tasks: needs etude.multitask, which is not installed",
        "vocab: needs etude.multimodal, which is not installed",
    ]


def test_commands_of_the_rooms_are_absent(without):
    done = without("-m", "etude", "--help")
    assert "  train " in done.stdout, done.stderr
    assert "  compare " not in done.stdout
    assert without("-m", "etude", "compare", "x").returncode == 2


def test_arguments_of_a_trainer_that_need_a_room_say_so(without):
    code = """
import torch
from etude import Trainer
for argument in ({"vocab": 1}, {"curriculum": []}, {"config": {"meaningful_loss": {}}}, {"optimiser": 1}):
    try:
        Trainer(torch.nn.Linear(2, 2), torch.rand(4, 2), progress=False, **argument)
    except (TypeError, ValueError) as error:
        print(error)
"""
    vocab, curriculum, settings, typo = without("-c", code).stdout.splitlines()
    assert "'vocab'" in vocab
    assert "etude.multimodal" in vocab
    assert "curriculum" in curriculum
    assert "etude.multitask" in curriculum
    assert "meaningful_loss" in settings
    assert "etude.multimodal" in settings
    assert "'optimizer'" in typo
    assert "multimodal" not in typo


@pytest.mark.slow
def test_lenet_trains(without, tmp_path):
    shutil.copy(EXPERIMENTS / "lenet5" / "configs" / "baseline.yaml", tmp_path)
    (tmp_path / "images.py").write_text(IMAGES)
    settings = ["imports=[images.py]", "data.name=noise", "training.epochs=2", "training.batch_size=8"]
    done = without("-m", "etude", "train", tmp_path / "baseline.yaml", *settings, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "finished at step 6" in done.stdout
    done = without("-m", "etude", "resume", tmp_path / "run", "training.epochs=3")
    assert "finished at step 9" in done.stdout, done.stderr


@pytest.mark.slow
def test_tiny_lm_trains(without, tmp_path):
    pytest.importorskip("tokenizers")
    draw = random.Random(0)
    (tmp_path / "text").mkdir()
    for number in range(40):
        words = " ".join("".join(draw.choices("aeioubcdfglmnprst", k=5)) for _ in range(200))
        (tmp_path / "text" / f"part_{number}.py").write_text(words)
    settings = {
        "data.inputs": f"[{tmp_path / 'text'}]",
        "data.out": tmp_path / "tokens",
        "data.vocab_size": 300,
        "data.validation": 0.2,
        "data.length": 32,
        "model.d_model": 12,
        "scheduler.warmup_steps": 2,
        "training.max_steps": 4,
        "callbacks.0.max_new_tokens": 4,
    }
    shutil.copy(EXPERIMENTS / "tiny_lm" / "configs" / "baseline.yaml", tmp_path)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    done = without("-m", "etude", "train", tmp_path / "baseline.yaml", *overrides, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "finished at step 4" in done.stdout
