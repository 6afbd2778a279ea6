"""Data sets of files, trained from the command line: stopped and resumed exactly, refused if the files have changed."""

import json
from pathlib import Path

import pytest
import yaml
from data_files import swap_images, touch_csv, write_arrays, write_csv, write_dataset, write_images, write_lines

from etude.core import CheckpointError
from etude.experiment import build_trainer, load_config

CASES = {
    "streams": (
        write_csv,
        touch_csv,
        {"name": "mlp", "hidden": [8]},
        {
            "name": "streams",
            "streams": {
                "one": {"name": "csv", "path": "d.csv", "target": "y"},
                "two": {"name": "csv", "path": "d.csv", "target": "y", "seed": 1},
            },
        },
    ),
    "huggingface": (
        write_dataset,
        lambda: write_dataset(1.0),
        {"name": "mlp", "hidden": [8]},
        {"name": "huggingface", "path": "saved"},
    ),
    "jsonl": (
        write_lines,
        lambda: write_lines("?"),
        {"name": "text_classifier", "d_model": 16, "n_layers": 1, "n_heads": 2},
        {"name": "jsonl", "path": "d.jsonl", "max_length": 20},
    ),
    "image_folder": (
        write_images,
        swap_images,
        {"name": "lenet5", "dropout": 0.1},
        {
            "name": "image_folder",
            "path": "pictures",
            "augment": ["horizontal_flip", {"name": "random_crop", "padding": 2}, "color_jitter"],
        },
    ),
    "arrays": (
        write_arrays,
        lambda: write_arrays(1.0),
        {"name": "mlp", "hidden": [8], "dropout": 0.1},
        {"name": "arrays", "path": "d.npz"},
    ),
    "csv": (write_csv, touch_csv, {"name": "mlp", "hidden": [8]}, {"name": "csv", "path": "d.csv", "target": "y"}),
    "csv of numbers": (
        lambda: write_csv(classes=False),
        touch_csv,
        {"name": "mlp", "hidden": [8]},
        {"name": "csv", "path": "d.csv", "target": "y", "standardize_target": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_exactly_and_not_with_other_data(etude, case):
    make, change, model, data = CASES[case]
    make()
    training = {"epochs": 3, "batch_size": 16, "device": "cpu", "save_every_steps": 3}
    Path("x.yaml").write_text(yaml.safe_dump({"model": model, "data": data, "training": training}))
    outcome = etude("train", "x.yaml", "--run-dir", "whole", "-q")
    assert outcome.code == 0, outcome.err
    assert etude("train", "x.yaml", "training.max_steps=7", "--run-dir", "parts", "-q").code == 0
    assert etude("resume", "parts", "training.max_steps=null", "-q").code == 0
    last = [Path(run) / "checkpoints" / "last" for run in ("whole", "parts")]
    assert last[0].joinpath("model.safetensors").read_bytes() == last[1].joinpath("model.safetensors").read_bytes()
    assert "loss" in etude("evaluate", "whole").out
    facts = json.loads(last[0].joinpath("meta.json").read_text())["data"]
    facts = facts.get("one", facts)  # of the first of several streams
    assert facts["fingerprint"]
    change()
    for command in (("resume", "whole", "training.epochs=4", "-q"), ("evaluate", "whole")):
        refused = etude(*command)
        assert refused.code == 2
        assert "data has changed" in refused.err
        assert facts["fingerprint"][:8] in refused.err


def test_a_mean_that_differs_in_its_last_digit_is_no_other_data(etude):
    """Machines add in another order."""
    write_csv()
    data = {"name": "csv", "path": "d.csv", "target": "y"}
    sections = {"model": {"name": "mlp", "hidden": [8]}, "data": data, "training": {"epochs": 1, "device": "cpu"}}
    Path("x.yaml").write_text(yaml.safe_dump(sections))
    assert etude("train", "x.yaml", "--run-dir", "run", "-q").code == 0
    config = load_config("run/config.yaml")
    trainer = build_trainer(config, progress=False)
    facts = {"data": {**trainer.meta["data"], "mean": [0.0, 0.0]}}
    trainer.check_facts(facts, "here")
    with pytest.raises(CheckpointError, match="here: the data has changed"):
        trainer.check_facts({"data": {**facts["data"], "fingerprint": "another"}}, "here")
    trainer.check_facts({}, "one that was written before there were fingerprints")


def test_a_size_that_the_data_does_not_have_must_be_set(etude):
    write_csv()
    model = {"name": "causal_transformer_lm", "d_model": 8, "n_heads": 2, "n_layers": 1}
    Path("x.yaml").write_text(
        yaml.safe_dump({"model": model, "data": {"name": "csv", "path": "d.csv", "target": "y"}})
    )
    refused = etude("train", "x.yaml", "-q")
    assert refused.code == 2
    assert "model.vocab_size" in refused.err


def test_a_mistake_in_a_file_is_one_line(etude):
    Path("d.csv").write_text("a,y\n1,2\n3\n")
    data = {"name": "csv", "path": "d.csv", "target": "y"}
    Path("x.yaml").write_text(yaml.safe_dump({"model": {"name": "mlp", "hidden": [8]}, "data": data}))
    refused = etude("train", "x.yaml", "-q")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    assert "d.csv:3" in refused.err


def test_token_files_of_another_tokenizer_are_refused(etude):
    """With as many tokens: their ids mean something else."""
    for name in ("one", "other", "copy"):
        texts = [f"{name} {number}" for number in range(300)]
        Path(f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        source = "one" if name == "copy" else name
        made = etude("tokenize", f"{source}.jsonl", "--out", name, "--vocab-size", "261")
        assert made.code == 0, made.err
    model = {"name": "causal_transformer_lm", "d_model": 8, "n_heads": 2, "n_layers": 1, "max_len": 16}
    sections = {"model": model, "data": {"name": "tokens", "root": "one", "length": 16}}
    training = {"epochs": 1, "batch_size": 64, "device": "cpu"}
    Path("x.yaml").write_text(yaml.safe_dump({**sections, "training": training}))
    assert etude("train", "x.yaml", "--run-dir", "run", "-q").code == 0
    refused = etude("resume", "run", "training.epochs=2", "data.root=other", "-q")
    assert refused.code == 2
    assert "tokenizer_fingerprint" in refused.err
    assert etude("resume", "run", "training.epochs=2", "data.root=copy", "-q").code == 0
