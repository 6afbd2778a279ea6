"""Models of Hugging Face by name: built as asked, trained unchanged from a config, mistakes explained."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from etude.config import build_component
from etude.core import ConfigError
from etude.data import TokenWriter
from etude.experiment import train_experiment
from etude.models import huggingface_causal_lm

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


@pytest.mark.parametrize("fused_head", [False, True])
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
