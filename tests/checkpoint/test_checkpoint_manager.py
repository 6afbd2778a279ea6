"""`CheckpointManager` alone: keeps the right checkpoints over restarts, links for people, falls back when damaged."""

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import assert_same
from torch import nn

from etude.checkpoint import Checkpoint, CheckpointManager
from etude.checkpoint.folder import Entry
from etude.core import CheckpointError, ConfigError


def save(manager: CheckpointManager, step: int, value: float | None = None) -> Path:
    metrics = {} if value is None else {"val_loss": value, "accuracy": -value}
    return manager.save(
        step,
        model_state={"w": torch.full((2,), float(step))},
        state={"step": step},
        metrics=metrics,
        meta={"epoch": 1},
    )


def steps(root: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(root.iterdir()) if not path.is_symlink()]


def links(root: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in sorted(root.iterdir()) if path.is_symlink()}


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)


def test_best_k_and_last_are_kept_and_linked(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=2)
    values = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.9}
    for step, value in values.items():
        path = save(manager, step, value)
        assert path == tmp_path / f"step-{step:08d}"
        assert (tmp_path / "last").resolve() == path.resolve()
        assert (tmp_path / "best").is_dir()
    assert steps(tmp_path) == [2, 4, 5]
    assert links(tmp_path) == {"best": "step-00000002", "last": "step-00000005"}
    assert manager.all() == [Entry(2, 0.1), Entry(4, 0.2), Entry(5, 0.9)]
    assert (manager.latest(), manager.best()) == (tmp_path / "step-00000005", tmp_path / "step-00000002")


def test_retention_goes_on_after_a_restart(tmp_path: Path) -> None:
    for step, value in {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.9}.items():
        save(CheckpointManager(tmp_path, keep_best=2), step, value)
    assert steps(tmp_path) == [2, 4, 5]


def test_mode_max_and_another_metric(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=1, monitor="accuracy", mode="max")
    for step, value in {1: 0.5, 2: 0.1, 3: 0.4}.items():
        save(manager, step, value)
    assert (steps(tmp_path), links(tmp_path)["best"]) == ([2, 3], "step-00000002")


def test_zero_keeps_only_the_last(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=0)
    for step in (1, 2, 3):
        save(manager, step, 0.1 * step)
    assert (steps(tmp_path), links(tmp_path)) == ([3], {"best": "step-00000003", "last": "step-00000003"})


def test_without_a_value_there_is_no_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=0)
    save(manager, 1, 0.5)
    save(manager, 2)
    save(manager, 3, math.nan)
    assert links(tmp_path) == {"last": "step-00000003"}
    assert manager.best() is None
    assert math.isnan(manager.all()[0].value or 0.0)
    with pytest.raises(CheckpointError, match='has a value of val_loss; load "last" instead'):
        manager.load("best")


def test_saved_again_after_validation(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 5)
    save(manager, 5, 0.25)
    assert manager.all() == [Entry(5, 0.25)]


def test_loading_by_word_path_and_name(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step, value in {1: 0.5, 2: 0.1, 3: 0.4}.items():
        save(manager, step, value)

    def step_of(checkpoint: Checkpoint) -> int:
        assert torch.equal(checkpoint.model_state["w"], torch.full((2,), float(checkpoint.state["step"])))
        assert checkpoint.meta["step"] == checkpoint.state["step"]
        return int(checkpoint.state["step"])

    assert step_of(manager.load()) == step_of(manager.load("last")) == 3
    assert step_of(manager.load("best")) == 2
    assert step_of(manager.load(tmp_path / "step-00000001")) == 1
    assert step_of(manager.load(str(tmp_path / "best"))) == 2
    assert step_of(manager.load("step-00000001")) == 1
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-00000009"):
        manager.load("step-00000009")
    assert manager.load().meta["epoch"] == 1


def test_links_are_not_needed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1, 0.1)
    (tmp_path / "last").unlink()
    (tmp_path / "best").unlink()
    (tmp_path / "last").symlink_to("nowhere")
    assert manager.load().state == manager.load("best").state == {"step": 1}
    save(manager, 2, 0.2)
    assert links(tmp_path) == {"best": "step-00000001", "last": "step-00000002"}


def test_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step, value in {1: 0.3, 2: 0.1, 3: 0.2}.items():
        save(manager, step, value)
    damage(tmp_path / "step-00000003")
    damage(tmp_path / "step-00000002")
    last, best = manager.load(), manager.load("best")
    assert (last.state, best.state) == ({"step": 1}, {"step": 1})
    assert ["step-00000003" in last.warnings[0], "step-00000002" in last.warnings[1]] == [True, True]
    assert "step-00000002" in best.warnings[0]
    with pytest.raises(CheckpointError, match="damaged"):
        manager.load(tmp_path / "step-00000003")


def test_what_was_just_saved_is_never_deleted_in_favour_of_a_damaged_later_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=0)
    save(manager, 100)
    damage(tmp_path / "step-00000100")
    for step in (80, 90):
        save(manager, step)
        assert manager.load().state == {"step": step}
    assert steps(tmp_path) == [90, 100]


def test_an_unreadable_meta_does_not_stop_saving(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1, 0.1)
    (tmp_path / "step-00000001" / "meta.json").write_text(json.dumps({"metrics": {"val_loss": 0.0}}))
    save(manager, 2, 0.2)
    assert manager.all() == [Entry(1, None), Entry(2, 0.2)]
    assert links(tmp_path)["best"] == "step-00000002"


def test_loading_changes_nothing_and_saving_cleans_up(tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path), 1, 0.1)
    (tmp_path / ".tmp-step-00000002-00000000").mkdir()
    (tmp_path / ".trash-step-00000000-00000000").mkdir()
    manager = CheckpointManager(tmp_path)
    before = sorted(tmp_path.iterdir())
    manager.load()
    manager.all()
    assert sorted(tmp_path.iterdir()) == before
    save(manager, 3, 0.3)
    assert steps(tmp_path) == [1, 3]


def test_modules_and_extra(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(tmp_path)
    extra = {"epoch": 2, "losses": [0.5, 0.25], "ema": {"weight": torch.ones(2)}}
    manager.save_modules(4, model=model, optimizer=optimizer, extra=extra, metrics={"val_loss": torch.tensor(0.5)})
    other = nn.Linear(3, 2)
    assert_same(manager.load_into(other, torch.optim.AdamW(other.parameters())), extra)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert manager.all() == [Entry(4, 0.5)]


def test_nothing_is_loaded_unless_everything_fits(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    manager.save_modules(1, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="the state of AdamW, the optimizer is SGD"):
        manager.load_into(other, torch.optim.SGD(other.parameters()))
    assert_same(dict(other.state_dict()), before)
    with pytest.raises(CheckpointError, match="another architecture"):
        manager.load_into(nn.Linear(4, 2))
    manager.save_modules(2, model=model)
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        manager.load_into(other, torch.optim.AdamW(other.parameters()))
    assert manager.load_into(other) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep_best": -1}, "keep_best is -1"),
        ({"keep_best": "a"}, "keep_best is 'a'"),
        ({"mode": "least"}, "mode must be 'min' or 'max', found 'least'"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(tmp_path, **arguments)


def test_wrong_steps_and_metrics(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (-1, "a", 1.5):
        with pytest.raises(CheckpointError, match=f"step is {step!r}"):
            manager.save(step, model_state={}, state={})
    with pytest.raises(CheckpointError, match="one number per name"):
        manager.save(1, model_state={}, state={}, metrics={"val_loss": torch.ones(2)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("root", ["file/checkpoints", "/proc/checkpoints"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save"):
        save(CheckpointManager(tmp_path / root), 1)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        CheckpointManager(tmp_path / root).load()
    assert CheckpointManager(tmp_path / root).latest() is None


def test_a_second_run_in_one_folder_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    for step in (100, 200):
        first.save_modules(step, model=model)
    assert not caplog.records
    for step in (10, 20):
        second.save_modules(step, model=model)
    assert [record.message.count("step-00000200") for record in caplog.records] == [1]
