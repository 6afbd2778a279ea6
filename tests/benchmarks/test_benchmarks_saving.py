"""The benchmarks of saving, of wrapped optimizers and of several processes work."""

import pytest
import torch
from test_benchmarks_smoke import run

from benchmarks import saving, wrappers


def test_saving_by_one_process(tmp_path):
    table = saving.alone(10, 1, torch.device("cpu"), tmp_path)
    assert [row["way"] for row in table.rows] == ["at once", "async_save", "async_save, the first"]
    assert all(row["seconds"] > 0 for row in table.rows)
    assert len([*tmp_path.glob("alone/step-*/manifest.json")]) == 1


@pytest.mark.parametrize("way", wrappers.WAYS)
def test_wrappers(way):
    row = wrappers.row_of("MLP 32-64-10", way, 1, 1e-4)
    assert row["by hand µs"] > 0
    assert row["etude µs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tables"), [("saving", 2), ("parallel", 1)])
def test_several_processes(tmp_path, name, tables):
    found = run(name, tmp_path)
    assert len(found) == tables
    assert all(rows for rows in found)
