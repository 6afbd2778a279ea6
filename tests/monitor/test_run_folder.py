"""The run folder: who may create and open it, what it writes, and what a resumed run finds."""

import json
import os
import tempfile
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from etude.core import RunFolderError
from etude.monitor import FINISHED, JsonlSink, RunFolder, default_run_dir, newest_run
from unprivileged import unprivileged


def holding_a_run(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    folder.write_config({"training": {"epochs": 3}})
    return folder


def test_created_folder_can_be_opened_and_holds_what_was_written(tmp_path):
    folder = RunFolder.create(tmp_path / "a" / "run")
    assert folder.checkpoints_path.is_dir()
    assert not folder.holds_run
    config = {"name": "größe", "training": {"epochs": 3, "lr": 0.1, "device": None}, "list": [1, "two"]}
    folder.write_config(config)
    folder.write_environment()
    opened = RunFolder.open(tmp_path / "a" / "run")
    assert yaml.safe_load(opened.config_path.read_text(encoding="utf-8")) == config
    assert list(yaml.safe_load(opened.config_path.read_text(encoding="utf-8"))) == list(config)
    assert json.loads(opened.environment_path.read_text())["versions"]["torch"]
    assert not list(opened.path.glob(".*.tmp"))


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"already holds a run; use `etude resume .*run` or another --run-dir"):
        RunFolder.create(tmp_path / "run")
    assert folder.holds_run


def test_overwrite_removes_the_old_run_and_nothing_else(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    (folder.checkpoints_path / "step-00000001").mkdir()
    folder.metrics_path.write_text('{"step": 1}\n')
    folder.write_result({"status": FINISHED})
    (folder.path / "notes.txt").write_text("mine")
    fresh = RunFolder.create(folder.path, overwrite=True)
    assert sorted(p.name for p in fresh.path.iterdir()) == [".lock", "checkpoints", "notes.txt"]
    assert not list(fresh.checkpoints_path.iterdir())


def test_overwrite_removes_files_of_metrics_and_tensorboard_and_nothing_beside_them(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    folder.write_files({"matrix.json": "old", "matrix.svg": "old"})
    folder.write_files({"matrix.json": "old"}, "test")
    (folder.path / "tensorboard").mkdir()
    (folder.path / "tensorboard" / "events.out.tfevents.1.host").write_text("old")
    (folder.path / "metrics" / "mine.txt").write_text("mine")
    fresh = RunFolder.create(folder.path, overwrite=True)
    assert sorted(p.name for p in fresh.path.iterdir()) == [".lock", "checkpoints", "metrics"]
    assert [p.name for p in (fresh.path / "metrics").iterdir()] == ["mine.txt"]


def test_a_list_of_files_removes_nothing_outside_its_folder(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "precious").write_text("mine")
    (folder.path / "link").symlink_to(tmp_path / "far")
    listed = ["../precious", str(tmp_path / "precious"), "link/precious", "checkpoints", ""]
    (folder.path / ".written").write_text("\n".join(listed))
    RunFolder.create(folder.path, overwrite=True)
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "far" / "precious").exists()


def test_ensure_takes_a_folder_as_it_is(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    with folder.lock():
        assert RunFolder.ensure(tmp_path / "run").holds_run
    assert RunFolder.ensure(tmp_path / "new" / "run").checkpoints_path.is_dir()


def test_files_beside_no_run_are_left_alone(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "precious").write_text("mine")
    RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "checkpoints" / "precious").read_text() == "mine"


def test_unwritable_path_is_one_line_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for make in (
        lambda: RunFolder.create(tmp_path / "file" / "run"),
        lambda: default_run_dir("x", tmp_path / "file"),
    ):
        with pytest.raises(RunFolderError, match=r"cannot .*file.*: .*; choose a writable --run-dir") as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", [None, "weights", "/elsewhere"])
def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path, setting):
    setting = setting and setting.replace("/elsewhere", f"{tmp_path}/elsewhere")
    place = tmp_path / "run" / (setting or "checkpoints")
    place.parent.mkdir(exist_ok=True)
    place.write_text("precious")
    remedy = "--run-dir" if setting is None else "training.checkpoint_dir"
    with pytest.raises(RunFolderError, match=rf"{place}: .* another {remedy}"):
        RunFolder.create(tmp_path / "run", checkpoint_dir=setting)
    assert place.read_text() == "precious"


def test_read_only_folder():
    with tempfile.TemporaryDirectory() as folder:  # others may read it, unlike `tmp_path`
        Path(folder).chmod(0o755)
        Path(folder, "run").mkdir(mode=0o555)
        with unprivileged(), pytest.raises(RunFolderError, match="Permission denied; choose a writable --run-dir"):
            RunFolder.create(Path(folder, "run"))
        assert not list(Path(folder, "run").iterdir())


def test_open_says_what_is_wrong(tmp_path):
    with pytest.raises(RunFolderError, match=r"there is no run folder .*absent"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no config.yaml; choose a folder made by"):
        RunFolder.open(tmp_path)
    run = holding_a_run(tmp_path / "lenet5" / "20250101-000000")
    with pytest.raises(RunFolderError, match=rf"did you mean {run.path}\?"):
        RunFolder.open(tmp_path)
    assert newest_run(tmp_path / "lenet5").path == run.path


def test_finished_only_by_the_result(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    assert not folder.is_finished
    folder.write_result({"status": "stopped", "val_loss": float("nan")})
    assert not folder.is_finished
    assert folder.read_result() == {"status": "stopped", "val_loss": None, "nonfinite": ["val_loss"]}
    folder.write_result({"status": FINISHED})
    assert folder.is_finished
    folder.result_path.write_text('{"status": "fini')
    assert not folder.is_finished


def test_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    folder = holding_a_run(tmp_path / "run")
    folder.write_result({"status": "stopped"})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"No space left on device; check disk space.*`etude resume "):
        folder.write_result({"status": FINISHED})
    with pytest.raises(RunFolderError, match="check disk space and permissions, then try again"):
        RunFolder.create(tmp_path / "new").write_config({})
    assert folder.read_result() == {"status": "stopped"}
    assert not list(folder.path.glob(".*.tmp"))


@given(
    steps=st.lists(st.integers(0, 50), max_size=30).map(sorted),
    cut=st.integers(0, 50),
    torn=st.sampled_from([b"", b'{"step": 3, "lo', b'{"step": 3}']),
)
def test_trim_keeps_exactly_the_records_up_to_the_checkpoint(tmp_path_factory, steps, cut, torn):
    folder = RunFolder.create(tmp_path_factory.mktemp("run"))
    jsonl = JsonlSink(folder.metrics_path)
    for i, step in enumerate(steps):
        jsonl.write({"step": step, "loss": i / 7})
    jsonl.close()
    with folder.metrics_path.open("ab") as file:
        file.write(torn)
    folder.trim(cut)
    wanted = [{"step": step, "loss": i / 7} for i, step in enumerate(steps) if step <= cut]
    assert list(folder.read_metrics()) == wanted
    assert folder.metrics_path.read_bytes().count(b"\n") == len(wanted) if steps or torn else True


def test_trim_keeps_all_events_but_a_torn_one(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    events = JsonlSink(folder.events_path)
    events.write({"kind": "checkpoint", "step": 900})
    events.close()
    with folder.events_path.open("ab") as file:
        file.write(b'{"kind": "chec')
    folder.trim(10)
    assert [json.loads(line)["step"] for line in folder.events_path.read_text().splitlines()] == [900]


def test_trim_without_any_records(tmp_path):
    folder = holding_a_run(tmp_path / "run")
    folder.trim(0)
    assert not folder.metrics_path.exists()


def test_default_run_dirs_never_collide(tmp_path):
    made: list[Path] = []
    start = threading.Barrier(8)

    def make():
        start.wait()
        made.extend(default_run_dir("lenet5/baseline", tmp_path) for _ in range(5))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 40
    assert all(path.is_dir() and path.parent == tmp_path / "lenet5" / "baseline" for path in made)


@given(st.text(max_size=40))
def test_default_run_dir_stays_below_its_root(tmp_path_factory, name):
    root = tmp_path_factory.mktemp("root") / "runs"
    path = default_run_dir(name.replace("\0", ""), root)
    assert root.resolve() in path.resolve().parents


def test_dangling_link_as_root_is_an_error(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="cannot create a run folder"):
        default_run_dir("x", tmp_path / "runs")


@pytest.mark.parametrize("name", ["caf\udce9", "a\0b", "x" * 300])
def test_name_that_no_system_has(tmp_path, name):
    with pytest.raises(RunFolderError) as caught:
        RunFolder.ensure(tmp_path / name)
    str(caught.value).encode()
    with pytest.raises(RunFolderError):
        RunFolder.open(tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("first", [None, "weights", "data/checkpoints"])
@pytest.mark.parametrize("second", [None, "weights", "elsewhere"])
@pytest.mark.parametrize("name", ["step-00000003", ".old-step-00000003-1a2b3c4d"])
def test_a_checkpoint_makes_the_folder_used_whatever_the_checkpoint_dir_of_either_run(tmp_path, first, second, name):
    saved = RunFolder.ensure(tmp_path / "run", first)
    assert not RunFolder.ensure(tmp_path / "run", second).is_used
    (saved.checkpoints_path / name).mkdir()
    assert RunFolder.ensure(tmp_path / "run", second).is_used
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", checkpoint_dir=second)


@pytest.mark.parametrize("inside", [None, "weights"])
def test_checkpoints_of_runs_inside_are_not_those_of_the_folder(tmp_path, inside):
    run = RunFolder.ensure(tmp_path / "runs" / "one", inside)
    (run.checkpoints_path / "step-00000003").mkdir()
    assert run.is_used
    assert not RunFolder.ensure(tmp_path / "runs").is_used
