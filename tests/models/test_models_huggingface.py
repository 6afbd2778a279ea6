"""Models of Hugging Face by name: built as asked, trained unchanged from a config, mistakes explained."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from etude.config import build_component
from etude.core import ConfigError
from etude.data import TokenWriter
from etude.experiment import predict_run, train_experiment
from etude.export import export_run
from etude.models import huggingface_causal_lm, huggingface_classifier

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}


def test_the_model_is_that_of_the_library():
    torch.manual_seed(0)
    ours = huggingface_causal_lm("gpt2", vocab_size=50, settings=TINY)
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=50, **TINY))
    assert type(ours) is GPT2LMHeadModel
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)
    assert ours.config.use_cache is False


def test_a_folder_of_weights_is_loaded(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=50, **TINY)).save_pretrained(tmp_path)
    model = huggingface_causal_lm(pretrained=str(tmp_path), vocab_size=40)
    assert model.config.vocab_size == 50
    with pytest.raises(ConfigError, match="the data has 60 tokens"):
        huggingface_causal_lm(pretrained=str(tmp_path), vocab_size=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "either `architecture`"),
        ({"architecture": "gpt2", "pretrained": "x"}, "either `architecture`"),
        ({"architecture": "gtp2"}, "did you mean 'gpt2'"),
        ({"architecture": "gpt2", "settings": {"n_layers": 2}}, "settings.n_layers.*did you mean 'n_layer'"),
        ({"pretrained": "no/such/folder"}, "cannot be loaded"),
    ],
)
def test_mistakes_are_explained(arguments, words):
    with pytest.raises(ConfigError, match=words):
        build_component("model", {"name": "huggingface", **arguments})


@pytest.mark.parametrize("fused_head", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gpt2_trains_from_a_config(tmp_path, fused_head):
    """On a language with one rule, the next token is the sum of the last two: far below the entropy of chance."""
    ids = [3, 4]
    while len(ids) < 20_000:
        ids.append((ids[-1] + ids[-2] + (1 if len(ids) % 7 == 0 else 0)) % 31)
    for split, part in (("train", ids[:18_000]), ("validation", ids[18_000:])):
        with TokenWriter(tmp_path / f"{split}.bin", meta={"vocab_size": 31}) as writer:
            writer.add(np.array(part, np.uint16))
    config = tmp_path / "gpt2.yaml"
    config.write_text(
        f"""
model:
  name: huggingface
  architecture: gpt2
  settings: {{n_layer: 2, n_embd: 32, n_head: 2, n_positions: 64}}
data: {{name: tokens, root: {tmp_path}, length: 32}}
loss: {{name: language_modeling, fused_head: {str(fused_head).lower()}}}
optimizer: {{name: adamw, lr: 0.005}}
training: {{max_steps: 100, batch_size: 8, log_interval: 50, num_threads: 1, device: cpu}}
"""
    )
    outcome = train_experiment(config, [], run_dir=tmp_path / "run", progress=False)
    assert outcome.step == 100
    assert outcome.metrics["val_loss"] < 0.5 * np.log(31)
    assert outcome.metrics["val_perplexity"] == pytest.approx(np.exp(outcome.metrics["val_loss"]))


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])  # gpt2 refuses batches without an id of padding
def test_a_classifier_is_trained_predicts_and_goes_to_the_hub_with_its_class_names(tmp_path, architecture):
    words = {"neg": ["bad", "poor"], "pos": ["good", "fine"]}
    lines = [
        {"text": f"{words[kind][i % 2]} {'film ' * (i % 5)}", "label": kind} for i in range(40) for kind in words
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = {"bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}}
    settings = sizes.get(architecture, {"n_embd": 16, "n_layer": 1, "n_head": 2})
    config = {
        "model": {"name": "huggingface_classifier", "architecture": architecture, "settings": settings},
        "data": {"name": "jsonl", "path": str(tmp_path / "d.jsonl"), "max_length": 32},
        "training": {"epochs": 1, "batch_size": 16, "device": "cpu"},
    }
    (tmp_path / "c.json").write_text(json.dumps(config))
    train_experiment(tmp_path / "c.json", run_dir=tmp_path / "run", progress=False)
    found = predict_run(tmp_path / "run", tmp_path / "d.jsonl")
    export_run(tmp_path / "run", "hub", out=tmp_path / "hub")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", local_files_only=True).eval()
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert model.config.label2id == {"neg": 0, "pos": 1}
    ids = torch.tensor([[1 + one for one in lines[3]["text"].encode()]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits.softmax(1)[0]
    torch.testing.assert_close(torch.from_numpy(found.values[3]), expected, rtol=1e-4, atol=1e-5)


def test_a_classifier_of_another_number_of_classes_is_refused():
    with pytest.raises(ConfigError, match="num_labels"):
        huggingface_classifier(3, "bert", settings={"num_labels": 2})
    with pytest.raises(ConfigError, match="classifier"):
        huggingface_classifier(3, "vit")
