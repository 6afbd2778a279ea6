"""The experiment tiny_lm in a small form: from a folder of text to a trained model, its samples, and a resumed run."""

import importlib.util
import json
import math
import random
import re
from pathlib import Path

import pytest

from etude.cli.main import _conclude
from etude.cli.process import signals_stop
from etude.core import ConfigError
from etude.experiment import load_experiment_config, resume_run, train_experiment

pytest.importorskip("tokenizers")

EXPERIMENT = Path(__file__).parents[1]
CONFIGS = sorted(path.stem for path in (EXPERIMENT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small programs that differ, tokenized once."""
    root = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioubcdfglmnprst", k=rng.randint(3, 7))) for _ in range(150)]
    for number in range(60):
        names = [rng.choices(words, k=3) for _ in range(12)]
        functions = [f"def {one}_{two}({two}):\n    return {three} + {two}\n\n" for one, two, three in names]
        (root / f"part_{number}.py").write_text("".join(functions))
    return root


def settings(corpus, **changes):
    """Return overrides that make an experiment small."""
    small = {
        "data.inputs": f"[{corpus}]",
        "data.out": str(corpus.parent / "tokens"),
        "data.vocab_size": 300,
        "data.length": 32,
        "data.validation": 0.2,
        "model.d_model": 32,
        "model.n_layers": 2,
        "model.n_heads": 2,
        "model.max_len": 32,
        "optimizer.lr": 0.01,
        "scheduler.warmup_steps": 4,
        "training.batch_size": 8,
        "training.max_steps": 48,
        "training.log_interval": 12,
        "training.validate_every_steps": 16,
        "training.save_every_steps": 16,
        "training.num_threads": 1,
        "callbacks.0.max_new_tokens": 20,
    }
    return [f"{key}={value}" for key, value in {**small, **changes}.items()]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    return train_experiment(
        EXPERIMENT / "configs" / "baseline.yaml", settings(corpus), run_dir=folder, progress=False
    )


def weights(run):
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


def test_it_learns_reports_and_writes_text(straight, corpus):
    folder = straight.run_dir
    facts = json.loads((corpus.parent / "tokens" / "dataset.json").read_text())
    assert facts["vocab_size"] == 300
    metrics = straight.metrics
    assert metrics["val_loss"] < facts["validation_unigram_loss"] - 0.3
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]))
    assert metrics["tokens_per_s"] > 0
    assert 0 <= metrics["data_wait"] < 1
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "val"] == [16, 32, 48]
    samples = (folder / "samples.txt").read_text()
    assert straight.samples == samples
    prompts = ("", "import", "def", "class")
    assert all(text.startswith(f"│ {prompt}") for prompt, text in zip(prompts, samples.split("\n\n"), strict=True))
    assert all(line == "" or line.startswith("│ ") for line in samples.split("\n"))


def test_the_command_shows_the_text(straight, capsys):
    with signals_stop():  # the end of a command ignores signals; this restores them
        _conclude(straight)
    assert capsys.readouterr().out.endswith(f"sampled from the model:\n{straight.samples}")


def test_a_resumed_run_ends_the_same(corpus, tmp_path):
    """Stopped by its length in the middle, then made longer: same weights, same text."""
    config = without_schedule(EXPERIMENT / "configs" / "baseline.yaml", tmp_path)
    whole = [one for one in settings(corpus) if not one.startswith("scheduler")]
    first = train_experiment(config, [*whole, "training.max_steps=21"], run_dir=tmp_path / "parts", progress=False)
    assert first.step == 21
    second = resume_run(first.run_dir, ["training.max_steps=48"], progress=False)
    reference = train_experiment(config, whole, run_dir=tmp_path / "whole", progress=False)
    assert weights(second.run_dir) == weights(reference.run_dir)
    assert second.samples == reference.samples != first.samples


def without_schedule(config, folder):
    """Copy a config without its scheduler: one that depends on the length of the run would differ, rightly."""
    text = re.sub(r"^scheduler:\n(  .*\n)+", "", config.read_text(), flags=re.MULTILINE)
    path = folder / "constant.yaml"
    path.write_text(text)
    return path


def test_sampling_does_not_change_the_run(straight, corpus, tmp_path):
    overrides = [one for one in settings(corpus) if not one.startswith("callbacks")]
    without = train_experiment(
        EXPERIMENT / "configs" / "baseline.yaml",
        [*overrides, "callbacks=[]"],
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert weights(without.run_dir) == weights(straight.run_dir)
    assert without.samples == ""


@pytest.mark.parametrize("name", CONFIGS, ids="config_{}".format)
def test_the_configs_are_what_the_page_says(name):
    config = load_experiment_config(EXPERIMENT / "configs" / f"{name}.yaml")
    page = (EXPERIMENT / "README.md").read_text()
    assert f"`{name}`" in page
    model, data = config.selection("model"), config.selection("data")
    assert model.arguments["max_len"] == data.arguments["length"]
    assert f"{config.training.max_steps:,} steps" in page


def test_a_model_with_too_few_tokens_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="the data has 300 tokens, the model only 200"):
        train_experiment(
            EXPERIMENT / "configs" / "baseline.yaml",
            settings(corpus, **{"model.vocab_size": 200}),
            run_dir=tmp_path / "run",
            progress=False,
        )


def test_the_loop_classes_train_the_same_model(corpus, tmp_path, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("train_with_loops", EXPERIMENT / "train_with_loops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LENGTH", 32)
    best = module.train(epochs=2, blocks=320, inputs=[str(corpus)], vocab_size=300, out=str(tmp_path / "tokens"))
    facts = json.loads((tmp_path / "tokens" / "dataset.json").read_text())
    assert best < facts["validation_unigram_loss"]
    shown = capsys.readouterr().out
    number = r"[\d,.]+"
    both = rf"Loss: {number} \| Acc: {number} \| Duration: {number}s \| Throughput: {number} tokens/s"
    for epoch in (1, 2):
        expected = (
            rf"Epoch {epoch}/2\n"
            rf"Training:       {both} \| LR: \d\.\d\de-\d\d\n"
            rf"Validation:     {both}\n"
            rf"Perplexity:     train={number} \| val={number}\n"
            rf"Grad norms:     min={number} \| max={number}\n"
        )
        assert re.search(expected, shown), shown
    assert shown.endswith(f"Best validation loss: {best:.4f}\n")


def test_the_picture_is_made_from_runs(straight):
    spec = importlib.util.spec_from_file_location("tiny_lm_plot", EXPERIMENT / "plot_curve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = module.read(straight.run_dir)
    assert [step for step, _ in run.validation] == [16, 32, 48]
    assert run.validation[-1][1] == pytest.approx(straight.metrics["val_loss"])
    split = json.loads(Path(run.corpus, "dataset.json").read_text())["splits"]["validation"]
    nats_per_byte = straight.metrics["val_loss"] * split["tokens"] / split["bytes"]
    assert run.bits_per_byte(run.validation[-1][1]) == pytest.approx(nats_per_byte / math.log(2))
    svg = module.draw([run])
    assert svg.startswith("<svg")
    assert svg.count("<polyline") == 2
