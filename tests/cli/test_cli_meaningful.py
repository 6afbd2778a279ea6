"""The commands on data of several modalities, from a config file alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.multimodal import MultimodalWriter, ScalarTokenizer, build_vocab_spec, write_modalities
from run_files import weights

CONFIG = """\
model: {name: causal_transformer_lm, d_model: 16, n_layers: 1, n_heads: 2, max_len: 16}
data: {name: tokens, root: readings, read: documents, length: 12}
training:
  epochs: 4
  batch_size: 4
  learning_rate: 0.01
  log_every: 1
  save_every_steps: 3
  device: cpu
  meaningful_loss: {enabled: true, sample_k_per_modality: 3, weight_scalar: 0.5}
"""


@pytest.fixture
def readings(etude):
    """A folder of data and a config in the current, empty folder, where `etude` runs."""
    vocab = build_vocab_spec(v_scalar=8, modalities={"class": 2})
    write_modalities("readings", vocab, {"scalar": ScalarTokenizer(torch.linspace(0, 1, 9))})
    draw = torch.Generator().manual_seed(0)
    for split in ("train", "validation", "test"):
        kinds = torch.randint(2, (20,), generator=draw)
        values = kinds[:, None] * 4 + torch.randint(4, (20, 5), generator=draw)
        with MultimodalWriter(f"readings/{split}.bin", vocab) as writer:
            writer.add_rows(["BOS", ("class", kinds), ("scalar", values), "EOS"])
    Path("x.yaml").write_text(CONFIG)
    return etude


def test_train_evaluate_and_resume(readings):
    etude = readings
    outcome = etude("train", "x.yaml", "--run-dir", "whole", "-q")
    assert outcome.code == 0, outcome.err
    assert "val_rmse_sca" in outcome.out
    shown = etude("evaluate", "whole", "--split", "test").out
    assert "loss_total" in shown
    assert "loss_sca" in shown
    assert etude("train", "x.yaml", "training.max_steps=7", "--run-dir", "parts", "-q").code == 0
    assert etude("resume", "parts", "training.max_steps=null", "-q").code == 0
    assert weights("parts") == weights("whole")
    meta = json.loads(Path("whole/checkpoints/last/meta.json").read_text())
    assert meta["config"]["loss_config"]["sample_k"] == 3


@pytest.mark.slow
def test_killed_run_goes_on_with_the_same_positions(readings):
    """SIGKILL after a checkpoint: what is drawn after it is drawn again, exactly so."""
    etude = readings
    assert etude("train", "x.yaml", "--run-dir", "whole", "-q").code == 0
    code = (
        "import os, signal\n"
        "from etude import Callback, train_experiment\n"
        "from etude.experiment import build\n"
        "class Killer(Callback):\n"
        "    steps = 0\n"
        "    def on_step_end(self, report):\n"
        "        self.steps += 1\n"
        "        if self.steps == 11: os.kill(os.getpid(), signal.SIGKILL)\n"
        "make = build.Trainer\n"
        "build.Trainer = lambda *a, callbacks, **k: make(*a, callbacks=[*callbacks, Killer()], **k)\n"
        "train_experiment('x.yaml', run_dir='killed', progress=False)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert etude("resume", "killed", "-q").code == 0
    assert weights("killed") == weights("whole")


def test_profile(readings):
    outcome = readings(
        "profile", "x.yaml", "scheduler={name: warmup_cosine, warmup_steps: 3}", "--steps", 3, "--out", "profile"
    )
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""  # nothing about a warm-up that the user has not given
    assert Path("profile/profile.json").exists()


def test_config_check_and_show(readings):
    etude = readings
    assert etude("config", "check", "x.yaml").code == 0
    shown = etude("config", "show", "x.yaml").out
    assert "name: meaningful" in shown
    assert "meaningful_loss" not in shown
    assert etude("config", "check", "x.yaml", "training.meaningful_loss.weight_image=0.5").error == (
        "etude: command line: training.meaningful_loss.weight_image: the vocabulary has no modality 'image' "
        "(there are: scalar, class)"
    )
    Path("readings/vocab.json").unlink()
    assert etude("config", "check", "x.yaml").error.startswith(
        "etude: x.yaml:10: training.meaningful_loss: the meaningful loss needs a vocabulary, and neither the data nor a"
    )
