"""The numbers of the variable stars' page, and its configs, scripts, tables and picture."""

import importlib.util
import json
import math
import sys
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from star_catalogue import EXPERIMENT, OPTIONS
from stars import LENGTH, read_truth
from stars.curves import PHASES, joined, read_off
from stars.evaluate import measure, open_split, runner
from stars.layout import UNITS

from etude.config.imports import import_user_modules
from etude.config.registry import lookup
from etude.experiment import load_experiment_config

# --- numbers


def oracle(held, sharpness=200.0):
    """A model that knows every next token."""

    def logits(tokens):
        following = held.tokens[:, 1 : tokens.shape[1] + 1]
        return sharpness * torch.nn.functional.one_hot(following, held.vocab.vocab_size).float()

    return logits


def test_a_model_that_knows_all_is_as_good_as_the_tokens(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(oracle(held), held, train)
    for modality in UNITS:
        assert numbers[f"rmse/{modality}"] == pytest.approx(numbers[f"floor/{modality}"], rel=1e-5)
        assert numbers[f"rmse_top/{modality}"] == pytest.approx(numbers[f"floor/{modality}"], rel=1e-5)
        assert numbers[f"floor/{modality}"] < numbers[f"mean/{modality}"]
    assert numbers["rmse_free/image"] == pytest.approx(numbers["floor/image"], rel=1e-5)
    assert numbers["ce"] == pytest.approx(0, abs=1e-6)
    assert (numbers["accuracy"], numbers["balanced_accuracy"]) == (1, 1)


def test_a_model_that_knows_nothing_says_the_mean_of_the_codebook(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(lambda tokens: torch.zeros(*tokens.shape, held.vocab.vocab_size), held, train)
    assert numbers["ce"] == pytest.approx(math.log(held.vocab.vocab_size))
    for modality, columns in (("magnitude", ["I"]), ("amplitude", ["log A1", "log A2", "log A3"])):
        centre = held.tokenizers[modality].values.double().mean().item()
        true = np.concatenate([held.truth[name] for name in columns]).astype(float)
        assert numbers[f"rmse/{modality}"] == pytest.approx(np.sqrt(np.nanmean((true - centre) ** 2)), rel=1e-5)
    mean = read_off(joined(np.tile(held.tokenizers["image"].values.double().mean(0).numpy(), (1, PHASES // 4, 1))))
    in_mag = (mean - held.truth["curve"]) * 10 ** held.truth["log A1"].astype(float)[:, None]
    assert numbers["rmse/image"] == pytest.approx(np.sqrt(np.nanmean(in_mag**2)), rel=1e-5)
    assert numbers["accuracy"] == pytest.approx((held.truth["class"] == 0).mean())
    assert numbers["balanced_accuracy"] == pytest.approx(1 / len(held.classes))


def test_references_are_those_of_the_training_split(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(oracle(held), held, train)
    expected = np.sqrt(np.mean((held.truth["I"] - train.truth["I"].mean(dtype=float)) ** 2))
    assert numbers["mean/magnitude"] == pytest.approx(expected, rel=1e-5)
    size = held.vocab.range_of("place").size
    counts = np.bincount(train.tokens[:, 1] - held.vocab.range_of("place").base, minlength=size) + 1
    chances = counts / (counts.sum() + 1)  # one more for MISS
    codes = held.tokens[:, 1] - held.vocab.range_of("place").base
    assert numbers["marginal/place"] == pytest.approx(-np.log(chances[codes]).mean())


# --- the experiment


def script(name):
    """Return a script of the experiment as a module."""
    spec = importlib.util.spec_from_file_location(f"variable_stars_{name}", EXPERIMENT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overrides(made):
    """Return settings that make the experiment small."""
    out, root, _ = made
    data = {**OPTIONS.facts(), "out": out, "root": root, "download": "false"}
    small = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "training.epochs": 2}
    small |= {"training.batch_size": 32, "scheduler.warmup_steps": 1, "training.num_threads": 1}
    small |= {"training.device": "cpu", "training.log_interval": 2}
    return [f"{key}={value}" for key, value in {**{f"data.{k}": v for k, v in data.items()}, **small}.items()]


@pytest.mark.parametrize("way", ["both", "ce", "meaningful"])
def test_config_files_are_right(way):
    config = load_experiment_config(EXPERIMENT / "configs" / f"{way}.yaml")
    loss = config.selection("loss")
    arguments = loss.defaults | loss.arguments
    assert arguments["use_ce"] == (way != "meaningful")
    assert bool(arguments["weights"]) == (way != "ce")
    assert arguments["weight"] == (0 if way == "ce" else 0.1)


def test_component_gives_the_vocabulary_and_the_codebooks(made):
    import_user_modules(["components.py"], EXPERIMENT)
    load = lookup("data", "variable_stars").factory
    splits = load(out=str(made[0]), **OPTIONS.facts())
    assert splits.token_schema.vocab.range_of("class").size == 5
    assert set(splits.token_schema.codebooks) == {*UNITS, "class"}
    assert torch.equal(splits.token_schema.codebooks["class"], torch.eye(5))
    batch = next(iter(splits.make_loader("train", 4)))
    assert batch["input_ids"].shape == batch["types"].shape == (4, LENGTH)
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])


def test_the_script_in_python_trains_with_the_meaningful_loss(made, monkeypatch):
    import_user_modules(["components.py"], EXPERIMENT)
    component = types.SimpleNamespace(load_variable_stars=lookup("data", "variable_stars").factory)
    monkeypatch.setitem(sys.modules, "components", component)  # other experiments have a module of this name too
    options = {**OPTIONS.facts(), "root": str(made[1]), "download": False}
    numbers = script("train_in_python").train(1, str(made[0]), **options)
    assert {"loss_ce", "loss_period", "loss_total"} <= numbers.keys()


def test_from_runs_to_tables_and_picture(made, tmp_path, capsys):
    compare, report = (script(name) for name in ("compare", "report"))
    arguments = ["--out", str(tmp_path / "runs"), "--seeds", "1", *overrides(made)]
    assert compare.main(arguments) == 0
    table = capsys.readouterr().out
    for words in ("| all tokens |", "period (dex), expected value", "image (mag), drawn freely", "balanced accuracy"):
        assert words in table
    picture = ElementTree.fromstring((tmp_path / "runs" / "curves.svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3 * 3 * 3  # classes, runs, curves
    numbers = json.loads((tmp_path / "runs" / "both-0" / "numbers.json").read_text())
    assert f"{numbers['rmse/period']:.4f}" in table
    assert report.main([str(tmp_path / "runs" / f"{way}-0") for way in ("both", "ce", "meaningful")]) == 0
    assert capsys.readouterr().out == table


def test_numbers_are_those_of_the_trained_weights(made, tmp_path):
    from stars.runs import finished_run, numbers_of, trained_model

    from etude.experiment import evaluate_run

    run = finished_run("both", 3, tmp_path, overrides(made))
    numbers = numbers_of(run)
    held = open_split(made[0], "test")
    result = evaluate_run(run, which="last").metrics
    assert numbers["ce"] == pytest.approx(result["loss_ce"], rel=1e-4)
    model = trained_model(run).model
    guess = runner(model, held.vocab)(held.tokens[:, :-1])
    chosen = guess[:, -1, held.vocab.range_of("class").slice].argmax(-1)
    assert numbers["accuracy"] == pytest.approx((chosen.numpy() == read_truth(made[0], "test")["class"]).mean())
