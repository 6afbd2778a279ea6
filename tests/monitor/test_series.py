"""Curves of runs: their axes, and fewer points without losing a spike."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.core import ConfigError
from etude.monitor.series import RunMetrics, downsample, smoothed
from made_runs import lines, make_run

values = st.floats(allow_infinity=False, width=64)


@given(st.lists(st.tuples(st.integers(0, 50), values), max_size=80), st.integers(1, 20))
def test_few_buckets_keep_every_extreme_and_the_last_value(points, count):
    x, y = np.array([float(a) for a, _ in points]), np.array([b for _, b in points])
    few = downsample(x, y, count)
    assert len(few.x) <= max(count, 0) or len(x) <= count
    finite = y[np.isfinite(y)]
    if len(finite):
        assert (np.nanmin(few.low), np.nanmax(few.high)) == (finite.min(), finite.max())
        ordered = y[np.argsort(x, kind="stable")] if len(x) > count else y
        assert few.last[~np.isnan(few.last)][-1] == ordered[np.isfinite(ordered)][-1]
    else:
        assert np.isnan(few.low).all()


def test_huge_and_equal_places():
    huge = downsample(np.array([-1e308, 0.0, 1e308]), np.array([1.0, 2.0, 3.0]), 2)
    assert (huge.low.tolist(), huge.high.tolist()) == ([1.0, 2.0], [1.0, 3.0])
    same = downsample(np.zeros(5), np.arange(5.0), 3)
    assert (same.low.tolist(), same.high.tolist(), same.last.tolist()) == ([0.0], [4.0], [4.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 0.99))
def test_smoothing_is_the_weighted_mean_of_what_came_before(y, weight):
    found = smoothed(np.array(y), weight)
    for end in range(1, len(y) + 1):
        weights = [weight ** (end - 1 - place) for place in range(end)]
        mean = sum(w * value for w, value in zip(weights, y[:end], strict=True)) / sum(weights)
        assert found[end - 1] == pytest.approx(mean, rel=1e-6, abs=1e-3)


def test_axes(tmp_path):
    run = RunMetrics(make_run(tmp_path / "run", started=1000.0))
    assert run.series("loss").x.tolist() == [1, 2, 3, 4]
    assert run.series("loss", "time").x.tolist() == [1, 2, 3, 4]
    assert run.series("loss", "epoch").x.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert run.series("loss", "samples").x.tolist() == [8, 16, 24, 32]
    assert run.series("val_loss", "samples").x.tolist() == [16, 32]  # validations know only their step
    assert run.series("loss", split="epoch").y.tolist() == [0.5, 0.5]
    with pytest.raises(ConfigError, match="tokens"):
        run.series("loss", "tokens")
    with pytest.raises(ConfigError, match="'val_loss'"):
        run.series("val_los")


def test_time_does_not_count_the_pause_before_a_resume(tmp_path):
    folder = make_run(tmp_path / "run", [4.0, 3.0], started=1000.0, state="interrupted")
    lines(folder / "events.jsonl", [{"time": 5000.0, "kind": "resume", "step": 2}])
    lines(folder / "metrics.jsonl", [{"step": 3, "split": "train", "time": 5001.5, "loss": 2.0}])
    assert RunMetrics(folder).series("loss", "time").x.tolist() == [1, 2, 3.5]


def test_values_that_are_no_numbers(tmp_path):
    folder = make_run(tmp_path / "run", [1.0, None])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "split": "train", "loss": "abc", "note": "text"}\n[1]\nnot json\n')
        file.write('{"step": 4, "split": "train", "loss": 1' + "0" * 400 + '}\n{"step": 5, "split": "tr')
    found = RunMetrics(folder).series("loss")
    assert found.x.tolist() == [1, 2, 4]  # a text is no value
    assert np.isnan(found.y).tolist() == [False, True, True]
    assert "note" not in RunMetrics(folder).names()


def test_a_run_without_records(tmp_path):
    folder = make_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    assert RunMetrics(folder).names() == []
    with pytest.raises(ConfigError, match="none"):
        RunMetrics(folder).series("loss")


def test_a_long_run_is_kept_as_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.monitor.columns.PART_BYTES", 1000)  # so that there are many parts
    folder = make_run(tmp_path / "run", [])
    some = [{"step": step, "epoch": 0, "split": "train", "time": 1.0, "loss": step / 8} for step in range(1, 5001)]
    lines(folder / "metrics.jsonl", [one if one["step"] % 7 else {**one, "extra": one["step"]} for one in some])
    run = RunMetrics(folder)
    found = run.series("extra")
    assert (found.x.tolist(), found.y.tolist()) == ([*range(7, 5001, 7)], [*range(7, 5001, 7)])
    assert run.series("loss").y.tolist() == [step / 8 for step in range(1, 5001)]
    kept = sum(values.nbytes for columns in run._columns.values() for _, values in columns._tables)
    assert kept <= 5000 * 5 * 8  # a dictionary for each record would take five times that
