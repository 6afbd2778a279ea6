"""Checkpoints of tensors that are divided among processes: any layout and number of them can load any other."""

import pytest
from sharded_checks import FOLDER

pytestmark = pytest.mark.distributed


@pytest.fixture
def call(runs, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return lambda size, check: runs.call(size, check, {FOLDER: str(folder)}).ok()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_is_read_in_every_other(call, size):
    call(size, "written_and_read_in_any_layout")


@pytest.mark.parametrize("size", [2, 4])
def test_models_and_optimizers_of_any_layout(call, size):
    call(size, "modules_of_any_layout")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4), (4, 1)])
def test_another_number_of_processes(call, before, after):
    call(before, "write_for_other_sizes")
    call(after, "read_of_other_sizes")


@pytest.mark.parametrize(
    "check",
    [
        "what_is_refused",
        "failing_on_one_rank",
        "damage_is_found_by_one_rank_and_raised_by_all",
        "mismatches_change_nothing",
    ],
)
def test_mistakes_and_damage(call, check):
    call(2, check)
