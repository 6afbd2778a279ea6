"""`etude config check` refuses what `etude train` refuses before its first step, in the same words."""

import sys

import pytest
import torch
from cli_components import CLASSES, FEATURES

TRAINING = {"epochs": 2, "batch_size": 8, "device": "cpu"}
STREAMS = {"name": "streams", "streams": {"a": {"name": "cli_points"}, "b": {"name": "cli_points"}}}
TRANSFORMER = {"name": "transformer_lm", "vocab_size": 50, "d_model": 32, "n_layers": 1, "n_heads": 2}
BAD = {
    "no model": {"model": None},
    "no data": {"data": None},
    "unknown device": {"training": {**TRAINING, "device": "cudaa"}},
    "missing device": {"training": {**TRAINING, "device": "cuda:99"}},
    "empty accumulation": {"training": {**TRAINING, "grad_accum_steps": {}}},
    "late accumulation": {"training": {**TRAINING, "grad_accum_steps": {3: 2}}},
    "nesterov": {"optimizer": {"name": "sgd", "nesterov": True}},
    "two averages": {"optimizer": "schedule_free_adamw", "training": {**TRAINING, "ema": 0.9}},
    "fused rmsprop": {"optimizer": {"name": "rmsprop", "kernel": "fused"}},
    "refusing optimizer": {"optimizer": {"name": "cli_choosy", "groups": 3}},
    "refusing model": {"model": {"name": "cli_choosy", "width": 7}},
    "no parameters": {"model": "cli_frozen"},
    "heads": {"model": {**TRANSFORMER, "n_heads": 5}},
    "layers without end": {"model": {**TRANSFORMER, "n_layers": 10**12}},
    "no such blocks": {"training": {**TRAINING, "activation_checkpointing": "encoder.*"}},
    "no blocks": {"training": {**TRAINING, "activation_checkpointing": True}},
    "milestones": {"scheduler": {"name": "multistep", "milestones": [5, 3]}},
    "milestones in epochs": {"scheduler": {"name": "multistep", "milestones": [5, 5], "unit": "epoch"}},
    "sequence": {"scheduler": {"name": "sequence", "schedules": ["constant"], "milestones": [3]}},
    "product": {"scheduler": {"name": "product", "schedules": []}},
    "unknown stream": {"data": {**STREAMS, "weights": {"a": 1, "c": 2}}},
    "negative stream": {"data": {**STREAMS, "weights": {"a": 1, "b": -2}}},
    "zero streams": {"data": {**STREAMS, "weights": {"a": 0, "b": 0}}},
    "no streams": {"data": {"name": "streams", "streams": {}}},
    "stream names": {"data": {"name": "streams", "streams": {"a b": {"name": "cli_points"}}}},
    "streams in streams": {"data": {"name": "streams", "streams": {"a": STREAMS}}},
    "workers of streams": {"data": STREAMS, "training": {**TRAINING, "num_workers": 2}},
    "mixture": {"data": {"name": "token_mixture", "roots": {"a": "nowhere"}, "weights": {"b": 1.0}}},
    "callback of tasks": {"callbacks": [{"name": "task_gradients"}]},
    "callback over the config": {"callbacks": [{"name": "csv_logger", "filename": "config.yaml"}]},
    "callback over a folder": {"callbacks": [{"name": "csv_logger", "filename": "/"}]},
    "no folder of checkpoints": {"training": {**TRAINING, "checkpoint_dir": ""}},
    "checkpoints over the config": {"training": {**TRAINING, "checkpoint_dir": "x/../config.yaml"}},
    "architecture": {"model": {"name": "huggingface", "architecture": "gtp2"}},
    "infinite rate": {"optimizer": {"name": "adamw", "lr": float("inf")}},
    "threads": {"training": {**TRAINING, "num_threads": 100_000}},
    "task of an unknown stream": {
        "data": STREAMS,
        "tasks": {"one": {"head": {"name": "linear", "out_features": CLASSES}, "loss": "cross_entropy", "data": "c"}},
    },
    "head without a width": {
        "tasks": {"one": {"head": {"name": "linear", "out_features": CLASSES}, "loss": "cross_entropy"}},
    },
}
if not torch.backends.mps.is_available():
    BAD["mps"] = {"training": {**TRAINING, "device": "mps"}}


@pytest.mark.parametrize("name", BAD)
def test_check_and_train_refuse_the_same(etude, config, tmp_path, name):
    if name == "architecture":
        pytest.importorskip("transformers")
    path = config(**BAD[name])
    checked, trained = etude("config", "check", path), etude("train", path, "-q")
    assert (checked.code, trained.code) == (2, 2), (checked, trained)
    assert checked.err == trained.err
    assert len(checked.errors) == 1
    assert not list((tmp_path / "runs").glob("*/*"))


MISSING = {
    "tensorboard": ("tensorboard", {"callbacks": ["tensorboard"]}),
    "wandb": ("wandb", {"callbacks": [{"name": "wandb", "mode": "offline"}]}),
    "trackio": ("trackio", {"callbacks": ["early_stopping", "trackio"]}),
    "mlflow": ("mlflow", {"callbacks": ["mlflow"]}),
    "opentelemetry": ("opentelemetry", {"callbacks": ["opentelemetry"]}),
    "datasets": ("data", {"data": {"name": "huggingface", "path": "imdb", "target": "label"}}),
    "pyarrow": ("data", {"data": {"name": "parquet", "path": "table.parquet", "target": "x"}}),
    "tokenizers": ("text", {"data": {"name": "text_corpus"}}),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_named_before_training(etude, config, tmp_path, package, monkeypatch):
    """Training would end with this line."""
    extra, sections = MISSING[package]
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "table.parquet").touch()
    path = config(**sections)
    checked, trained = etude("config", "check", path), etude("train", path, "-q")
    assert (checked.code, trained.code) == (2, 2), (checked, trained)
    assert checked.err.splitlines() == trained.err.splitlines()[-1:]
    assert f"etude[{extra}]" in checked.err
    assert len(checked.errors) == 1


def test_a_missing_package_of_nested_data_is_named(etude, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    images = {"name": "image_folder", "path": "nowhere"}
    nested = {"name": "streams", "streams": {"a": {"name": "cli_points"}, "b": images}}
    checked = etude("config", "check", config(data=nested))
    assert checked.code == 2
    assert "streams.b" in checked.err
    assert "etude[data]" in checked.err
    text = {"name": "jsonl", "path": "nowhere", "tokenizer": "tokenizer.json"}
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "etude[text]" in etude("config", "check", config(data=text)).err
    bytewise = {**text, "tokenizer": "bytes"}
    assert etude("config", "check", config(data=bytewise)).code == 0  # it needs none


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": "cli_reads_its_weights"},
        {"model": {"name": "mlp", "in_features": FEATURES, "hidden": [10**6, 10**6], "out_features": CLASSES}},
        {"model": {**TRANSFORMER, "vocab_size": None}, "data": {"name": "tokens", "root": "nowhere"}},
        {"scheduler": {"name": "step", "step_size": 1, "unit": "epoch"}},
        {"scheduler": "warmup_cosine"},
        {"data": {**STREAMS, "weights": {"a": 1, "b": 0}}},
        {"callbacks": ["early_stopping", {"name": "csv_logger", "filename": "my.csv"}]},
        {"loss": {"name": "cli_margin", "scale": 2.0}},
        {"optimizer": None},
        {"training": {**TRAINING, "grad_accum_steps": {0: 1, 1: 2}}},
    ],
    ids=lambda sections: str(sections)[:40],
)
def test_what_may_be_right_is_fine(etude, config, sections):
    """Also where only the data can tell, and for models far larger than the machine."""
    if "model" in sections and isinstance(sections["model"], dict):
        sections = {**sections, "model": {k: v for k, v in sections["model"].items() if v is not None}}
    outcome = etude("config", "check", config(**sections))
    assert (outcome.code, outcome.err) == (0, ""), outcome.err
    assert outcome.out.endswith("toy.yaml: fine\n")
