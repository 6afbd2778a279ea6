"""One checkpoint on disk: layout, equal bytes for equal weights, replacement, and a disk that refuses."""

import errno
import fcntl
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_same, read_filled, write_filled
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etude.checkpoint import find_checkpoints, newest_intact, read_checkpoint
from etude.checkpoint.durable import clean_leftovers
from etude.checkpoint.store import read_meta, verify_checkpoint, write_checkpoint
from etude.core import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("flag", torch.tensor(True))


def test_any_safetensors_user_can_open_the_model(tmp_path: Path) -> None:
    model = Tied()
    write_checkpoint(tmp_path / "step-00000001", model.state_dict(), {}, {})
    file = tmp_path / "step-00000001" / "model.safetensors"
    assert_same(load_file(file)["embedding.weight"], model.embedding.weight)
    with safe_open(file, framework="pt") as opened:
        assert sorted(opened.keys()) == ["embedding.weight", "flag"]  # the tied weight is stored once
        assert opened.metadata() == {"format": "pt"}
    saved = read_checkpoint(tmp_path / "step-00000001").model_state
    assert list(saved) == list(model.state_dict())
    assert saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()


def test_model_file_is_the_one_the_library_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 2), "n": torch.tensor(4), "half": torch.ones(3).half()}
    write_checkpoint(tmp_path / "step-00000001", tensors, {}, {})
    save_file(tensors, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    ours = (tmp_path / "step-00000001" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "reference.safetensors").read_bytes()


def test_equal_weights_give_equal_bytes(tmp_path: Path) -> None:
    first = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(2, dtype=torch.bool)}
    again = {"a": torch.ones(4, dtype=torch.bool)[::2], "b": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert not again["b"].is_contiguous()
    for step, state in enumerate((first, again)):
        write_checkpoint(tmp_path / f"step-{step:08d}", state, {"step": step}, {"step": step})
    files = [tmp_path / f"step-{step:08d}" / "model.safetensors" for step in (0, 1)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_meta_is_for_people_and_standard_json(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000012"
    meta = {
        "step": 12,
        "epoch": 2,
        "metrics": {"val_loss": float("nan")},
        "config": {"path": Path("a"), "lr": (1, 2)},
    }
    write_checkpoint(folder, {"fc.weight": torch.zeros(2, 3)}, {}, meta)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    content = json.loads((folder / "meta.json").read_text(), parse_constant=refuse)
    assert content == read_meta(folder)
    assert {key: content[key] for key in ("format", "step", "epoch", "torch")} == {
        "format": 1,
        "step": 12,
        "epoch": 2,
        "torch": torch.__version__,
    }
    assert content["metrics"] == {"val_loss": "nan"}
    assert content["config"] == {"path": "a", "lr": [1, 2]}
    assert content["parameters"] == {"fc.weight": {"shape": [2, 3], "dtype": "float32"}}


def test_manifest_has_size_and_checksum_of_every_file(tmp_path: Path) -> None:
    write_filled(tmp_path / "step-00000001", 1, size=5_000_000)  # large enough for the second thread to hash
    folder = tmp_path / "step-00000001"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted([*files, "manifest.json"]) == sorted(path.name for path in folder.iterdir())
    for name, record in files.items():
        data = (folder / name).read_bytes()
        assert record == {"size": len(data), "sha256": sha256(data).hexdigest()}


def test_values_of_a_state_dict_that_are_not_tensors_survive(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "_extra_state": {"calls": 3, "scale": torch.ones(1)}}
    write_checkpoint(tmp_path / "step-00000001", state, {}, {})
    assert_same(read_checkpoint(tmp_path / "step-00000001").model_state, state)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    write_filled(tmp_path / "step-00000001", 1)
    weight = read_checkpoint(tmp_path / "step-00000001").model_state["weight"]
    file = tmp_path / "step-00000001" / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(weight, torch.ones(64))
    assert weight.data_ptr() % 64 == 0


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    for number in (1, 2):
        write_filled(tmp_path / "step-00000001", number)
    assert read_filled(tmp_path / "step-00000001") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_everything_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[int, str] = {}
    events: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}

    def traced_open(path: Any, *args: Any, **kwargs: Any) -> int:
        fd: int = real["open"](path, *args, **kwargs)
        opened[fd] = Path(path).name
        return fd

    def traced(name: str) -> Callable[..., Any]:
        def call(first: Any, *args: Any) -> Any:
            events.append((name, opened[first] if isinstance(first, int) else Path(first).name))
            return real[name](first, *args)

        return call

    monkeypatch.setattr(os, "open", traced_open)
    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, traced(name))
    root = tmp_path / "new" / "root"
    write_filled(root / "step-00000001", 1)
    (renamed,) = (i for i, (name, _) in enumerate(events) if name == "rename")
    temporary = events[renamed][1]
    assert temporary.startswith(".tmp-step-00000001-")
    for file in ("model.safetensors", "state.safetensors", "state.json", "meta.json", "manifest.json"):
        last_write = max(i for i, event in enumerate(events) if event == ("write", file))
        assert last_write < events.index(("fsync", file)) < events.index(("fsync", temporary)) < renamed
    assert ("fsync", "root") in events[renamed:]
    assert ("fsync", "new") in events[:renamed]  # the folder that the save itself had to make
    assert ("fsync", tmp_path.name) in events[:renamed]


def message_of(action: Callable[[], None]) -> str:
    """Return the message of the CheckpointError that `action` raises, or "" if it does not."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


class Refusal:
    """Makes the n-th call of one os function fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str, nth: int, code: int) -> None:
        real, self.fired, self.calls = getattr(os, function), False, 0

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == nth:
                self.fired = True
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, call)


@pytest.mark.parametrize("function", ["write", "fsync", "open", "rename", "mkdir"])
def test_a_refusing_disk_loses_nothing(tmp_path: Path, function: str) -> None:
    write_filled(tmp_path / "step-00000001", 1)
    write_filled(tmp_path / "step-00000002", 2)
    nth, fired = 0, True
    while fired:
        nth += 1
        with pytest.MonkeyPatch.context() as monkeypatch:
            refusal = Refusal(monkeypatch, function, nth, errno.ENOSPC)
            problem = message_of(
                lambda: write_filled(tmp_path / "step-00000002", 3)
            )  # a replacement: the hardest case
            fired = refusal.fired
        if problem:
            assert fired
            assert problem.startswith(
                f"cannot save {tmp_path}/step-00000002: No space left on device; free some space"
            )
            assert "\n" not in problem
        assert sorted(find_checkpoints(tmp_path)) == [1, 2]
        assert read_filled(tmp_path / "step-00000001") == 1
        assert read_filled(tmp_path / "step-00000002") in (2, 3)
        clean_leftovers(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert nth > 1
    assert read_filled(tmp_path / "step-00000002") == 3


def test_after_a_failed_write_no_temporary_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Refusal(monkeypatch, "write", 3, errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error; check the disk"):
        write_filled(tmp_path / "step-00000001", 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_data_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot save state.hook"):
        write_checkpoint(tmp_path / "step-00000001", {}, {"hook": print}, {})
    with pytest.raises(CheckpointError, match=r"cannot save model.weight"):
        write_checkpoint(tmp_path / "step-00000001", {"weight": object()}, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_interrupted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_filled(tmp_path / "step-00000001", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    write_filled(tmp_path / "step-00000001", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_filled(tmp_path / "step-00000002", 2, size=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    write_filled(small_disk / "step-00000001", 1, size=50_000)
    with pytest.raises(CheckpointError, match="No space left on device; free some space or keep fewer checkpoints"):
        write_filled(small_disk / "step-00000002", 2, size=100_000)
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
    assert newest_intact(small_disk) == (small_disk / "step-00000001", [])
    write_filled(small_disk / "step-00000002", 2, size=20_000)
    assert read_filled(small_disk / "step-00000002") == 2


@pytest.mark.parametrize("root", ["file/checkpoints", "/proc/checkpoints"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"^cannot save .*step-00000001: .+; .+") as error:
        write_filled(tmp_path / root / "step-00000001", 1)
    assert "\n" not in str(error.value)


def test_leftovers_of_dead_writers_go_and_a_living_one_stays(tmp_path: Path) -> None:
    write_filled(tmp_path / "step-00000001", 1)
    for name in (".tmp-step-00000002-aaaaaaaa", ".tmp-step-00000003-bbbbbbbb", ".trash-step-00000000-cccccccc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / ".tmp-last-dddddddd").symlink_to("step-00000002")
    living = os.open(tmp_path / ".tmp-step-00000003-bbbbbbbb", os.O_RDONLY)
    try:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert find_checkpoints(tmp_path) == {1: tmp_path / "step-00000001"}
        assert len(clean_leftovers(tmp_path)) == 3
    finally:
        os.close(living)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-step-00000003-bbbbbbbb", "step-00000001"]
    assert clean_leftovers(tmp_path / "nowhere") == []


def test_a_writer_holds_its_lock_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, cleaned = os.write, []

    def write(fd: int, data: Any) -> int:
        cleaned.append(clean_leftovers(tmp_path))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    write_filled(tmp_path / "step-00000001", 1)
    assert cleaned
    assert not any(cleaned)


def test_a_replacement_cut_in_two_is_still_found(tmp_path: Path) -> None:
    write_filled(tmp_path / "step-00000001", 1)
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001-aaaaaaaa")
    path, warnings = newest_intact(tmp_path)
    assert (read_filled(path), warnings) == (1, [])
    clean_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify_checkpoint(tmp_path / "step-00000001")


def test_a_state_that_is_one_tensor_or_nothing(tmp_path: Path) -> None:
    for state in (torch.ones(3), None, 5, {}):
        write_checkpoint(tmp_path / "step-00000001", {}, state, {})
        back = read_checkpoint(tmp_path / "step-00000001").state
        assert isinstance(state, Tensor) == isinstance(back, Tensor)
        assert_same(back, state)


def test_a_name_that_safetensors_reserves(tmp_path: Path) -> None:
    tree = {"__metadata__": torch.ones(3), "other": torch.zeros(2)}
    write_checkpoint(tmp_path / "step-00000001", tree, tree, {})
    checkpoint = read_checkpoint(tmp_path / "step-00000001")
    assert_same(checkpoint.model_state, tree)
    assert_same(checkpoint.state, tree)
