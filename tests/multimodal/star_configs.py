"""Config files over the data of the fixture `stars`."""

from pathlib import Path

from etude.experiment import build_trainer, load_config
from etude.multimodal import MeaningfulLoss

IMAGE, SCALAR, CLASS = 9, 6, 3

CONFIG = """\
model: {name: transformer_lm, d_model: 16, n_layers: 1, n_heads: 2, max_len: 16, dropout: 0.1}
data: {name: tokens, root: stars, read: documents, length: 12}
optimizer: {name: adamw, lr: 0.01}
training: {epochs: 3, batch_size: 8, log_interval: 1, device: cpu}
loss:
  name: meaningful
  weights: {image: 0.5, scalar: 0.3}
  sample_k: 5
"""
BOTH = "loss: {name: %s}\ntraining: {meaningful_loss: {enabled: %s, weight_image: 0.5}}\n"


def write(text, name="x.yaml"):
    Path(name).write_text(text)
    return name


def load(text, *overrides):
    return load_config(write(text), overrides=overrides)


def strategy(text, *overrides):
    found = build_trainer(load(text, *overrides), progress=False).task.strategy
    assert isinstance(found, MeaningfulLoss)
    return found


def without_loss(text=CONFIG):
    return text.partition("loss:\n")[0]
