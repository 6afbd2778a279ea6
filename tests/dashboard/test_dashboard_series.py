"""Charts of one run: axes, pauses, files that grow, are replaced, are too long; samples and zooms."""

import json
import random

import pytest
from dashboard_runs import START, make_run, train, write
from hypothesis import given, strategies as st

from etude.dashboard import series as module
from etude.dashboard.catalogue import Run
from etude.dashboard.series import RunSeries
from etude.dashboard.store import Store
from etude.dashboard.tail import Tail


def opened(folder) -> RunSeries:
    run = Run("run", folder)
    series = RunSeries(folder, run.read_facts)
    while series.advance():
        pass
    return series


def chart(series, name="loss", axis="step", split="train", start=None, end=None, pixels=800):
    found = series.answer(split, name, axis, start, end, pixels)
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in found.items()}


def test_axes(tmp_path):
    records = [train(step, samples=step * 16, tokens=step * 100, loss=1.0) for step in (10, 20, 30)]
    validation = {"step": 20, "epoch": 0, "split": "val", "time": START + 25, "val_loss": 0.5}
    folder = make_run(tmp_path / "run", [*records[:2], validation, records[2]], steps_per_epoch=20, parameters=7)
    series = opened(folder)
    found = {axis: chart(series, axis=axis)["x"] for axis in module.AXES}
    assert found == {
        "step": [10, 20, 30],
        "samples": [160, 320, 480],
        "tokens": [1000, 2000, 3000],
        "epoch": [0.5, 1.0, 1.5],
        "time": [0, 10, 20],
        "flops": [1000 * 6 * 7, 2000 * 6 * 7, 3000 * 6 * 7],
    }
    # a validation has no counts of its own: it has those of the log point before it
    assert chart(series, "val_loss", "tokens", "val")["x"] == [2000]
    assert chart(series, "val_loss", "time", "val")["x"] == [15]


def test_an_axis_that_a_run_lacks_is_empty(tmp_path):
    series = opened(make_run(tmp_path / "run", [train(1, loss=1.0)]))
    assert chart(series, axis="flops")["x"] == []
    assert chart(series, axis="flops")["total"] == 1


def test_values_that_are_not_finite_are_marked(tmp_path):
    folder = make_run(
        tmp_path / "run", [train(1, loss=1.0), train(2, loss=None, nonfinite=["loss"]), train(3, loss=2.0)]
    )
    with (folder / "metrics.jsonl").open("a") as file:  # as Python's json writes it
        file.write('{"step": 4, "split": "train", "time": 1700000004, "loss": NaN}\n')
        file.write('{"step": 5, "split": "train", "time": 1700000005, "loss": 1e999}\n')
        file.write(f'{{"step": 6, "split": "train", "time": 1700000006, "loss": {10**400}}}\n')
    found = chart(opened(folder))
    assert found["nonfinite"] == [2, 4, 5, 6]
    assert (found["x"], found["total"]) == ([1, 2, 3, 4, 5, 6], 6)
    assert [value == value for value in found["last"]] == [True, False, True, False, False, False]


def test_a_resume_continues_the_line_without_the_pause(tmp_path):
    records = [train(1, START + 1), train(2, START + 11), train(3, START + 9_005), train(4, START + 9_015)]
    resume = {"time": START + 9_000, "kind": "resume", "step": 2, "epoch": 0}
    folder = make_run(tmp_path / "run", [one | {"loss": 1.0} for one in records], events=[resume])
    assert chart(opened(folder), axis="time")["x"] == [0, 10, 15, 25]


def test_a_replaced_file_is_read_again(tmp_path):
    folder = make_run(tmp_path / "run", [train(step, loss=float(step)) for step in range(1, 9)])
    series = opened(folder)
    shorter = folder / "new"
    write(shorter, [train(step, loss=-float(step)) for step in range(1, 5)])
    shorter.replace(folder / "metrics.jsonl")
    while series.advance():
        pass
    assert chart(series)["last"] == [-1, -2, -3, -4]
    assert series.restarts == 1
    # as long as the one before
    write(shorter, [train(step, loss=-float(step + 1)) for step in range(1, 5)])
    shorter.replace(folder / "metrics.jsonl")
    store = Store()
    store.read([("run", series)])
    store.close()
    assert chart(series)["last"] == [-2, -3, -4, -5]


def test_a_line_that_is_being_written_is_awaited(tmp_path):
    folder = make_run(tmp_path / "run", [train(1, loss=1.0)])
    line = json.dumps(train(2, loss=2.0)) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
    series = opened(folder)
    assert chart(series)["x"] == [1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[20:])
    assert series.advance()
    assert chart(series)["x"] == [1, 2]


def test_lines_that_hold_nothing_are_skipped(tmp_path):
    folder = make_run(tmp_path / "run", [train(1, loss=1.0)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\n[1, 2]\n\xff\xfe\n"text"\n{"step": "x", "loss": 7}\n{"step": 2, "loss": "y", "time": {}}\n')
        file.write(b'{"step": 3, "split": ["x"], "loss": {"a": 1}}\n' + b'{"a":' * 3000 + b"\n")
    write(folder / "metrics.jsonl", [train(4, loss=4.0)], "a")
    assert chart(opened(folder))["x"] == [1, 4]


def test_a_line_too_long_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.monitor.reading.MOST_BYTES", 5000)
    folder = make_run(
        tmp_path / "run", [train(1, loss=1.0), train(2, loss=2.0, text="x" * 20_000), train(3, loss=3.0)]
    )
    series = RunSeries(folder, Run("run", folder).read_facts)
    while series.advance(1000):
        pass
    assert chart(series)["x"] == [1, 3]


def test_zooming_in_shows_every_record(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 4096)
    monkeypatch.setattr(module, "MOST_BLOCKS", 64)
    rng = random.Random(0)
    values = [rng.random() for _ in range(5000)]
    records = [train(step, loss=value, samples=step) for step, value in enumerate(values)]
    resume = {"time": START + 2500.5, "kind": "resume", "step": 2500, "epoch": 0}
    folder = make_run(tmp_path / "run", records, events=[resume])
    run = Run("run", folder)
    series = RunSeries(folder, run.read_facts)
    while series.advance(4096):
        pass
    whole = chart(series)
    assert len(whole["x"]) <= 65
    assert (min(whole["min"]), max(whole["max"])) == (min(values), max(values))
    near = chart(series, start=1000, end=1100)
    assert near["x"] == list(range(999, 1102))
    assert near["last"] == values[999:1102]
    assert near["min"] == near["max"] == near["last"]
    assert chart(series, axis="time", start=3000.0, end=3001.0)["x"] == pytest.approx([2999.5, 3000.5, 3001.5])
    # wider than what is read again: blocks still answer
    monkeypatch.setattr(module, "RAW_BYTES", 10_000)
    middle = chart(series, start=1000, end=3000)
    assert min(middle["min"]) <= min(values[1000:3000])
    assert max(middle["max"]) >= max(values[1000:3000])


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_a_file_read_in_parts_gives_what_it_gives_at_once(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("run")
    records = [train(step, loss=step / 3, **({"tokens": step * 5} if step % 3 else {})) for step in range(40)]
    make_run(folder, records, events=[{"time": START + 17.5, "kind": "resume"}])
    at_once, in_parts = opened(folder), RunSeries(folder, Run("run", folder).read_facts)
    for cut in cuts:
        in_parts.advance(cut)
    while in_parts.advance():
        pass
    for axis in module.AXES:
        assert chart(in_parts, axis=axis) == chart(at_once, axis=axis)


def test_long_files_are_sampled_first_and_exact_later(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.dashboard.store.PART_BYTES", 10_000)
    monkeypatch.setattr(module, "PART_BYTES", 10_000)
    records = [train(step, loss=float(step == 7000)) for step in range(20_000)]
    folder = make_run(tmp_path / "run", records)
    run, ready = Run("run", folder), []
    store = Store(on_exact=ready.append)
    series = store.get("run", folder, run.read_facts)
    try:
        store.read([("run", series)], patience_s=0.0)
        first = chart(series)
        assert not first["exact"]
        assert 100 < first["count"] <= 800
        assert first["x"][0] < 50
        assert first["x"][-1] == 19_999
        store._thread.join(0)  # it works in the background
        deadline = 200
        while not ready and deadline:
            store._thread.join(0.05)
            deadline -= 1
        store.read([("run", series)])
        second = chart(series)
    finally:
        store.close()
    assert ready == ["run"]
    assert second["exact"]
    assert max(second["max"]) == 1.0  # the spike that a sample may miss


def test_a_ruler_places_steps_on_other_axes(tmp_path):
    records = [train(step, START + 2 * step, samples=step * 16, loss=1.0) for step in range(1, 3001)]
    series = opened(make_run(tmp_path / "run", records, steps_per_epoch=100))
    for axis, place in {"samples": 16, "time": 2, "epoch": 0.01}.items():
        ruler = series.ruler(axis)
        assert len(ruler["steps"]) == 1000
        first = 2 if axis == "time" else 0  # time begins with the first record
        assert ruler["x"].tolist() == pytest.approx([place * step - first for step in ruler["steps"].tolist()])
    assert series.ruler("tokens")["x"].tolist() == []


def test_memory_of_many_runs_is_limited(tmp_path):
    store = Store(most_bytes=3_000_000)
    try:
        for number in range(6):
            folder = make_run(tmp_path / str(number), [train(step, a=1.0, b=2.0, c=3.0) for step in range(6000)])
            series = store.get(str(number), folder, Run(str(number), folder).read_facts)
            store.read([(str(number), series)], patience_s=60)
            assert store.num_bytes <= 3_000_000
        assert chart(series, "c")["total"] == 6000
    finally:
        store.close()


def test_many_names_do_not_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.dashboard.blocks.MOST_NAMES", 50)
    records = [train(step, **{f"name{step}": 1.0}) for step in range(500)]
    series = opened(make_run(tmp_path / "run", records))
    assert len(series.names("train")) == 50
    assert chart(series, "name49")["x"] == [49]


def test_a_long_line_that_is_being_written_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.dashboard.store.PART_BYTES", 1000)
    monkeypatch.setattr(module, "PART_BYTES", 1000)
    folder = make_run(tmp_path / "run", [train(step, loss=1.0) for step in range(100)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{" + "x" * 5000)
    ready = []
    store = Store(on_exact=ready.append)
    series = store.get("run", folder, Run("run", folder).read_facts)
    try:
        store.read([("run", series)], patience_s=60)
        assert chart(series)["exact"]
        assert chart(series)["total"] == 100
        assert store._thread is None  # nothing is left for the background
    finally:
        store.close()


def test_short_runs_that_a_request_had_no_time_for_are_not_called_complete(tmp_path):
    ready: list[str] = []
    store = Store(on_exact=ready.append)
    folders = [make_run(tmp_path / f"{n}", [train(step, loss=1.0) for step in range(1, 301)]) for n in range(3)]
    known = [(one.name, store.get(one.name, one, Run(one.name, one).read_facts)) for one in folders]
    try:
        store.read(known, patience_s=0.0)
        first = [chart(series) for _, series in known]
        while len(ready) < len(known):
            pass
        after = [chart(series) for _, series in known]
    finally:
        store.close()
    assert all(one["exact"] or one["cursor"] == 0 for one in first)
    assert all(one["count"] == 300 for one in first if one["exact"])
    assert [(one["exact"], one["count"]) for one in after] == [(True, 300)] * 3


def test_a_tail_opens_a_file_only_when_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.dashboard.tail.MOST_BEHIND", 60)
    monkeypatch.setattr("etude.monitor.reading.MOST_BYTES", 200)
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n")
    tail, opened = Tail(path), []
    read = tail.lines
    monkeypatch.setattr(tail, "lines", lambda most: opened.append(most) or read(most))

    def polled(times=8):
        opened.clear()
        return b"".join(tail.new_lines() for _ in range(times))

    assert (polled(), len(opened)) == (b"", 1)
    assert (polled(), len(opened)) == (b"", 0)
    with path.open("a") as file:
        file.write("2\n3")
        file.flush()
        assert polled() == b"2\n"
        file.write(f"3\n{'x' * 900}\n4\n")  # a line that is too long, and one after it
    assert polled(40) == b"33\n4\n"
    assert (polled(), len(opened)) == (b"", 0)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.rename(path)
    assert polled() != b""
    assert tail.is_replaced
