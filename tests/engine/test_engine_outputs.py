"""No callback writes over a file of the run or of another callback: refused at the start, in one line."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import CSVLogger, ModelCheckpoint, Trainer
from etude.core import ConfigError
from etude.core.run_layout import OWN_FILES
from etude.experiment import load_config

CONFIG = """\
model: {{name: mlp, in_features: 4, hidden: [4], out_features: 2}}
data: {{name: mnist}}
callbacks: {callbacks}
"""


def trainer(folder: Path | None, *callbacks: Any) -> Trainer:
    data = (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    config = {"epochs": 1, "batch_size": 4, "device": "cpu"}
    return Trainer(nn.Linear(4, 2), data, data, config=config, callbacks=callbacks, output_dir=folder, progress=False)


def write(folder: Path, callbacks: str) -> Path:
    (folder / "x.yaml").write_text(CONFIG.format(callbacks=callbacks))
    return folder / "x.yaml"


def spellings(name: str, folder: Path) -> list[str]:
    return [name, name.upper(), f"./{name}", f"x/../{name}", f"../{folder.name}/{name}", str(folder / name)]


@pytest.mark.parametrize("name", sorted({*OWN_FILES, "checkpoints", "checkpoints/last", ".config.yaml.tmp"}))
def test_the_files_of_a_run_are_its_own(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    for spelling in spellings(name, folder):
        with pytest.raises(ConfigError, match=r"CSVLogger: .* the run's own"):
            trainer(folder, CSVLogger(spelling)).train()
    assert not list(folder.glob("checkpoints/step-*"))


def test_a_link_to_a_file_of_the_run_is_seen_through(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    (folder / "log.csv").symlink_to("metrics.jsonl")
    (tmp_path / "elsewhere").symlink_to(folder)
    for name in ("log.csv", str(tmp_path / "elsewhere" / "metrics.jsonl")):
        with pytest.raises(ConfigError, match="the run's own"):
            trainer(folder, CSVLogger(name)).train()


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, append: bool, through_link: bool) -> None:
    there = [tmp_path / "pipe", tmp_path / "folder"]
    os.mkfifo(there[0])
    there[1].mkdir()
    kinds = [path.stat().st_mode for path in there]
    for path in there:
        name = path
        if through_link:
            name = path.with_suffix(".link")
            name.symlink_to(path)
        with pytest.raises(ConfigError, match=f"CSVLogger: .*{name.name} .* not a regular file"):
            trainer(tmp_path / "run", CSVLogger(str(name), append=append)).train()
        with pytest.raises(ConfigError, match=rf"callbacks\.0: .*{name.name} .* not a regular file"):
            load_config(write(tmp_path, f"[{{name: csv_logger, filename: {name}, append: {str(append).lower()}}}]"))
    assert [path.stat().st_mode for path in there] == kinds
    pipe = tmp_path / "weights.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"ModelCheckpoint: .* not a regular file"):
        trainer(tmp_path / "run", ModelCheckpoint(pipe)).train()


@pytest.mark.parametrize(
    "filepath",
    ["checkpoints/last", "checkpoints/best/", "checkpoints/step-{epoch:08d}/w.safetensors", "config.yaml/"],
)
def test_weights_do_not_go_into_checkpoints(tmp_path: Path, filepath: str) -> None:
    with pytest.raises(ConfigError, match=r"ModelCheckpoint: .* the run's own"):
        trainer(tmp_path / "run", ModelCheckpoint(filepath)).train()


@pytest.mark.parametrize("folder", ["run", None])
def test_two_callbacks_do_not_share_a_file(
    tmp_path: Path, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = None if folder is None else tmp_path / folder
    for other in ("a.csv", "A.CSV", "x/../a.csv", str((place or tmp_path) / "a.csv")):
        with pytest.raises(ConfigError, match=r"CSVLogger: .* is written by CSVLogger too"):
            trainer(place, CSVLogger("a.csv"), CSVLogger(other)).train()
    trainer(place, CSVLogger("a.csv"), CSVLogger("b.csv"), ModelCheckpoint("checkpoints/")).train()
    assert {"a.csv", "b.csv"} <= {path.name for path in (place or tmp_path).iterdir()}


@pytest.mark.parametrize(
    ("callbacks", "where"),
    [
        ("[{name: csv_logger, filename: config.yaml}]", "callbacks.0"),
        ("[{name: csv_logger, filename: ./METRICS.jsonl}]", "callbacks.0"),
        ("[{name: csv_logger, filename: ''}]", "callbacks.0: ''"),
        ("[{name: csv_logger, filename: a.csv}, {name: csv_logger, filename: a.csv}]", "callbacks.1"),
        ("[{name: csv_logger, filename: 'a\\0b'}, {name: csv_logger, filename: '.lock'}]", "callbacks.1"),
        ("[{name: model_checkpoint, filepath: checkpoints/best}]", "callbacks.0"),
        ("[{name: text_samples}, {name: csv_logger, filename: samples.txt}]", "callbacks.1"),
    ],
)
def test_a_config_says_so_before_there_is_a_run(tmp_path: Path, callbacks: str, where: str) -> None:
    (tmp_path / "x.yaml").write_text(CONFIG.format(callbacks=callbacks))
    with pytest.raises(ConfigError, match=where.replace(".", r"\.")):
        load_config(tmp_path / "x.yaml")
