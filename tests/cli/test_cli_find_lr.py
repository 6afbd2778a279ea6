"""`etude find-lr`: the curve, the override to train with, and no run folder."""

import re

import pytest


def test_the_override_can_be_used(etude, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = config()
    before = sorted(tmp_path.rglob("*"))
    found = etude("find-lr", path, "training.batch_size=32")
    assert found.code == 0, found.err
    assert sorted(tmp_path.rglob("*")) == before
    assert "smoothed loss by learning rate" in found.out
    override = re.search(r"train with: etude train \S+ (optimizer\.lr=\S+)", found.out)[1]
    trained = etude("train", path, override, "--run-dir", tmp_path / "run", "-q")
    assert trained.code == 0, trained.err


def test_rates_of_groups_keep_their_ratio(etude, config):
    path = config(optimizer={"name": "adamw", "lr": 0.01, "groups": [{"params": "*.bias", "lr": 0.04}]})
    found = etude("find-lr", path, "training.batch_size=32")
    one, two = re.search(r"optimizer\.lr=(\S+) optimizer\.groups\.0\.lr=(\S+)", found.out).groups()
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
