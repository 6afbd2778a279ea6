"""Finding an experiment's config by name or path."""

from pathlib import Path
from typing import Any

import pytest

from etude.config import find_config, list_experiments, read
from etude.core.errors import ConfigError


@pytest.fixture(autouse=True)
def tree(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "__file__", str(Path("nowhere/etude/config/read.py").absolute()))
    write("experiments/lenet5/configs/baseline.yaml", "a: 1\n")
    write("experiments/lenet5/configs/lecun1998.yml", "a: 1\n")
    write("experiments/lenet5/configs/notes.txt", "a: 1\n")
    write("experiments/mlp/configs/tiny.json", "{}\n")
    write("experiments/vision/resnet/configs/a.yaml", "a: 1\n")
    write("experiments/vision/resnet/configs/b.yaml", "a: 1\n")
    write("deep/inside/file.yaml", "a: 1\n")


def test_every_config_is_listed_by_name() -> None:
    listed = list_experiments()
    assert [name for name, _ in listed] == [
        "lenet5/baseline",
        "lenet5/lecun1998",
        "mlp/tiny",
        "vision/resnet/a",
        "vision/resnet/b",
    ]
    assert all(path.is_file() for _, path in listed)
    for name, path in listed:
        assert find_config(name) == path
        assert find_config(*name.rsplit("/", 1)) == path


def test_a_bare_name_is_the_baseline_or_the_only_config() -> None:
    assert find_config("lenet5").name == "baseline.yaml"
    assert find_config("mlp").name == "tiny.json"
    with pytest.raises(ConfigError, match="has several configs; name one of vision/resnet/a, vision/resnet/b"):
        find_config("vision/resnet")


def test_a_run_folder_is_no_experiment_but_its_config_is_named(write: Any) -> None:
    write("runs/mine/config.yaml", "a: 1\n")
    with pytest.raises(ConfigError, match=r"runs/mine/config\.yaml.*etude resume runs/mine"):
        find_config("runs/mine/")
    assert find_config("runs/mine/config.yaml") == Path("runs/mine/config.yaml")


def test_it_is_found_from_a_folder_below(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = find_config("lenet5/baseline")
    monkeypatch.chdir("deep/inside")
    assert find_config("lenet5/baseline") == expected
    assert find_config("file.yaml") == Path("file.yaml")


def test_the_experiments_of_an_editable_install_come_second(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("repo/experiments/lenet5/configs/baseline.yaml", "a: 2\n")
    write("repo/experiments/gpt/configs/baseline.yaml", "a: 2\n")
    write("repo/src/etude/config/read.py", "")
    monkeypatch.setattr(read, "__file__", str(Path("repo/src/etude/config/read.py").absolute()))
    assert find_config("gpt/baseline").read_text() == "a: 2\n"
    assert find_config("lenet5/baseline").read_text() == "a: 1\n"


def test_paths_are_taken_as_they_are() -> None:
    assert find_config("deep/inside/file.yaml") == Path("deep/inside/file.yaml")
    with pytest.raises(ConfigError, match=r"no file 'deep/inside/fil.yaml'; did you mean 'file.yaml'\?"):
        find_config("deep/inside/fil.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenet5/basline", "no experiment 'lenet5/basline'; did you mean 'lenet5/baseline'?"),
        ("lenet", "no experiment 'lenet'; did you mean 'lenet5'?"),
        (
            "qqq/zzz",
            "no experiment 'qqq/zzz' (there are: lenet5/baseline, lenet5/lecun1998, mlp/tiny, vision/resnet/a",
        ),
    ],
)
def test_unknown_names_list_what_there_is(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_config(name)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_no_experiments_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ConfigError, match="no folder 'experiments' with configs"):
        find_config("lenet5/baseline")
