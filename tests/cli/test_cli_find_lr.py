"""`etude find-lr`: the curve, the override to train with, and no run folder."""

import re
import shlex

import pytest


def test_the_override_can_be_used(etude, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = config()
    before = sorted(tmp_path.rglob("*"))
    found = etude("find-lr", path, "training.batch_size=32")
    assert found.code == 0, found.err
    assert sorted(tmp_path.rglob("*")) == before
    assert "smoothed loss by learning rate" in found.out
    trained = etude(*command(found)[1:], "--run-dir", tmp_path / "run", "-q")
    assert trained.code == 0, trained.err


def command(found):
    return shlex.split(found.out.rpartition("train with: ")[2])


def test_the_command_has_the_other_overrides(etude, config, tmp_path):
    """Without them it would train another optimizer with this rate."""
    sections = ["optimizer={name: sam, optimizer: {name: sgd}}", "optimizer.optimizer.learning_rate=0.2"]
    found = etude("find-lr", path := config(), "training.batch_size=32", *sections)
    *words, rate = command(found)
    assert words == ["etude", "train", str(path), "training.batch_size=32", sections[0]]
    assert rate.startswith("optimizer.optimizer.lr=")
    assert etude(*words[1:], rate, "--run-dir", tmp_path / "run", "-q").code == 0


def test_the_rate_of_the_training_section_is_replaced(etude, config):
    found = etude("find-lr", config(), "training.batch_size=32", "training.learning_rate=0.2")
    assert [one.partition("=")[0] for one in command(found)[3:]] == ["training.batch_size", "optimizer.lr"]


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        ({"name": "adamw", "lr": 0.01, "groups": [{"params": "*.bias", "lr": 0.04}]}, "groups.0.lr"),
        (
            {"name": "sgd", "lr": 0.01, "groups": [{"params": "*.bias", "learning_rate": 0.04}]},
            "groups.0.learning_rate",
        ),
        ({"name": "muon", "lr": 0.01, "adamw_lr": 0.04}, "adamw_lr"),
    ],
)
def test_rates_of_groups_keep_their_ratio(etude, config, optimizer, key):
    found = etude("find-lr", config(optimizer=optimizer), "training.batch_size=32")
    one, two = re.search(rf"optimizer\.lr=(\S+) optimizer\.{re.escape(key)}=(\S+)", found.out).groups()
    assert float(two) == pytest.approx(4 * float(one), rel=0.01)


def test_a_picture(etude, config, tmp_path):
    pytest.importorskip("matplotlib")
    found = etude("find-lr", config(), "training.batch_size=32", "--out", tmp_path / "lr.png")
    assert found.code == 0, found.err
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["--steps", "5"], "at least 20"),
        (["--min", "1", "--max", "0.5"], "min < max"),
        (["--min", "1e-12", "--max", "1e-11"], "makes the loss fall"),
        (["training.epoch=2"], "epochs"),
        (["--out", "lr.txt"], ".png"),
    ],
)
def test_mistakes_are_one_line(etude, config, words, fact):
    found = etude("find-lr", config(), *words)
    assert found.code == 2
    assert fact in found.err
    assert len(found.err.strip().splitlines()) == 1
