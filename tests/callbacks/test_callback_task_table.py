"""What the user sees of each task: tables on a terminal and in a file, phases, notices, and numbers that come later."""

import csv
import io
import json
import math
import re

import pytest
import torch
from callback_life import report
from callback_terminal import picture, text_of
from hypothesis import given, strategies as st
from rich.cells import cell_len
from torch import nn

from etude.callbacks import CallbackList, CSVLogger, ProgressDisplay, RunRecorder, progress
from etude.callbacks.progress_lines import (
    EpochRow,
    Groups,
    View,
    best_row,
    epoch_line,
    is_metric,
    keep_rows,
    log_line,
    split_name,
)
from etude.callbacks.terminal import group_table
from etude.core import Clock
from etude.engine.callback import RunInfo
from etude.monitor import RunFolder

TASKS = (
    "code_generation", "ontology_annotation", "test_generation", "quality", "security", "clarification", "explanation",
)  # fmt: skip
PHASES = ("masked_code", "simple_ontology", "tests_and_quality", "everything")


def numbers(epoch: int, tasks=TASKS, val: bool = True) -> dict[str, float]:
    """Return what an epoch with these tasks reports."""
    found = {"loss": 4.2 / (epoch + 1), "lr": 3e-4, "tokens_per_s": 15_200.0, "phase": epoch + 1.0}
    for place, task in enumerate(tasks):
        found |= {f"{task}/loss": 3.1 / (epoch + place + 1), f"{task}/weight": 1 / (place + 1)}
        if place % 3 == 0:
            found[f"{task}/perplexity"] = math.exp(found[f"{task}/loss"])
    if val:
        found["val_loss"] = 4.4 / (epoch + 1)
        for place, task in enumerate(tasks):
            found |= {f"val_{task}/loss": 3.3 / (epoch + place + 1), f"val_{task}/accuracy": 0.7 + place / 100}
            if place % 3 == 0:
                found[f"val_{task}/perplexity"] = math.exp(found[f"val_{task}/loss"])
    return found


class Run:
    """A run with a curriculum in miniature: every epoch has two tasks more."""

    def __init__(self, *callbacks, clock: Clock | None = None, steps: int = 4) -> None:
        self.clock = clock if clock is not None else Clock()
        self.callbacks = CallbackList(callbacks)
        self.steps = steps
        model, cpu = nn.Linear(1, 1), torch.device("cpu")
        self.info = RunInfo("toy", model, None, self.clock, cpu, 4, 4 * steps, steps, None, resumed=clock is not None)
        self.callbacks.on_train_begin(self.info)

    def epoch(self, phase: bool = True) -> None:
        epoch = self.clock.epoch
        tasks = TASKS[: 1 + 2 * epoch]
        self.callbacks.on_epoch_begin(epoch)
        if phase:
            facts = {"number": epoch + 1, "phases": 4, "tasks": tasks, "weights": dict.fromkeys(tasks, 0.5)}
            self.callbacks.on_phase_begin(PHASES[epoch], facts)
            self.callbacks.on_notice(f"phase {PHASES[epoch]} begins", {"event": "phase"})
        for _ in range(self.steps):
            self.clock.step += 1
            self.callbacks.on_step_end(report())
        self.callbacks.on_log({"step": self.clock.step, **numbers(epoch, tasks, val=False)})
        self.callbacks.on_epoch_end(epoch, numbers(epoch, tasks))
        self.clock.epoch += 1


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """Return the cells of each task's row."""
    return {words[0]: words[1:] for line in lines if (words := line.split()) and words[0] in TASKS}


# --- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quality/loss", ("quality", "loss")),
        ("val_quality/f1", ("quality", "val_f1")),
        ("loss", ("", "loss")),
        ("val_loss", ("", "val_loss")),
        ("grad_norm/layers.0.weight", ("", "grad_norm/layers.0.weight")),
        ("grad_cosine/code/quality", ("", "grad_cosine/code/quality")),
        ("code/grad_norm", ("code", "grad_norm")),
    ],
)
def test_a_slash_parts_the_task_from_its_number(name, expected):
    assert split_name(name) == expected
    assert "/" not in name or not is_metric(name)


# --- in a file


def test_each_epoch_is_a_line_and_a_table_of_its_tasks():
    stream = io.StringIO()
    run = Run(ProgressDisplay(stream=stream))
    for _ in range(4):
        run.epoch()
    text = stream.getvalue()
    assert not re.search(r"[^\x20-\x7e\n]", text)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 106
    ends = [place for place, line in enumerate(lines) if re.match(r"epoch \d/4 done", line)]
    assert len(ends) == 4
    for epoch, place in enumerate(ends):
        assert re.fullmatch(
            rf"epoch {epoch + 1}/4 done in [\d.]+ s  phase {epoch + 1}/4 {PHASES[epoch]}  "
            rf"loss {4.2 / (epoch + 1):.4f}  val loss {4.4 / (epoch + 1):.4f}  15.2k tokens/s  \(best\)",
            lines[place],
        )
        count = 1 + 2 * epoch
        table = lines[place + 1 : place + 2 + count]
        assert table[0].split() == ["task,", "epoch", str(epoch + 1), "weight", "train", "loss", "val", "loss"]
        found = rows_of(table)
        assert tuple(found) == TASKS[:count]
        for index, cells in enumerate(found.values()):
            train, val = 3.1 / (epoch + index + 1), 3.3 / (epoch + index + 1)
            assert cells[:3] == [f"{1 / (index + 1):.4f}", f"{train:.4f}", f"{val:.4f}"]
            assert " ".join(cells).count(f"acc {0.7 + index / 100:.4f}") == 1
            assert ("ppl" in cells) is (index % 3 == 0)
        assert (
            len({line.rstrip().rfind(cells[2]) for line, cells in zip(table[1:], found.values(), strict=True)}) == 1
        )


def test_a_log_line_shows_the_whole_and_the_phase():
    record = {**numbers(3, val=False), "grad_norm": 0.5, "mfu": 0.4, "step": 12_345}
    view = View("toy", "cpu", 100, 400_000, 4000, 56, 12_345, record=record, phase="4/4 everything")
    line = log_line(view)
    assert line.startswith("epoch 57/100  phase 4/4 everything  step 12345/400000  loss 1.0500")
    assert "/loss" not in line


def test_gradient_norms_in_the_table_of_an_epoch_are_those_of_the_epoch():
    """Not those of the last log point, which may lie epochs before, in another phase."""
    stream = io.StringIO()
    run = Run(ProgressDisplay(stream=stream))
    run.callbacks.on_log({"quality/loss": 0.5, "quality/grad_norm": 7.0})
    norms = {"code": 0.25, "quality": 0.125}
    run.callbacks.on_notice("epoch 1: gradient norms …", {"event": "task_gradients", "norms": norms})
    run.callbacks.on_epoch_end(0, {"code/loss": 1.5, "quality/loss": 1.0})
    assert [line.split() for line in stream.getvalue().splitlines()[-3:]] == [
        ["task,", "epoch", "1", "train", "loss"],
        ["code", "1.5000", "grad", "norm", "0.2500"],
        ["quality", "1.0000", "grad", "norm", "0.1250"],
    ]
    run.callbacks.on_epoch_end(1, {"code/loss": 1.25, "quality/loss": 0.5})  # without a look
    assert "grad norm" not in stream.getvalue().splitlines()[-2]


def test_a_validation_inside_an_epoch_has_its_table():
    stream = io.StringIO()
    run = Run(ProgressDisplay(stream=stream))
    run.callbacks.on_epoch_begin(0)
    run.clock.step = 2
    run.callbacks.on_log({"quality/loss": 0.5})
    run.callbacks.on_validation_end(
        0, {"val_loss": 1.0, "val_quality/loss": 1.25, "val_quality/f1": 0.5, "phase": 1.0}
    )
    assert stream.getvalue().splitlines()[-3:] == [
        "step 2/16  val loss 1.0000",
        "  task, step 2  train loss  val loss",
        "  quality           0.5000    1.2500  f1 0.5000",
    ]


# --- on a terminal


@given(st.integers(5, 60))
def test_bars_and_numbers_stay_in_sight_on_a_low_terminal(height):
    view = View("toy", "cpu", 4, 16, 4, 2, record={"loss": 1.0})
    view.groups.update(numbers(2, val=False))
    view.rows = [EpochRow(epoch, 1.0, {"loss": 1.0}) for epoch in range(9)]
    lines = picture(view, 100, height)
    assert len(lines) <= max(height, 6)
    assert lines[-1] == " loss 1.0000"
    assert any("code_generation" in line for line in lines) == (height >= 19)


@pytest.mark.parametrize("width", [80, 104])
def test_the_screen_shows_all_tasks_while_the_run_goes_on(width, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    display = ProgressDisplay(refresh_s=0.0, stream=terminal)
    run = Run(display)
    for _ in range(3):
        run.epoch()
    run.callbacks.on_phase_begin(PHASES[3], {"number": 4, "phases": 4, "tasks": TASKS, "weights": {}})
    run.callbacks.on_log({"step": 13, **numbers(3, val=False)})
    run.callbacks.on_epoch_begin(3)
    screen = terminal.screen()
    run.callbacks.on_train_end({})
    assert len(screen) <= 24
    assert screen[0].startswith(" toy  phase 4/4 everything  cpu")
    head = next(line for line in screen if line.startswith(" task, epoch 3"))
    assert head.split()[3:10] == ["weight", "loss", "now", "train", "loss", "val", "loss"]
    found = rows_of(screen)
    assert tuple(found) == TASKS
    assert found["code_generation"][:4] == ["1.0000", "0.7750", "1.0333", "1.1000"]
    assert found["explanation"][:2] == ["0.1429", "0.3100"]  # it came in after epoch 3
    epochs = [line.split() for line in screen if re.match(r" +(★ )?\d+ ", line)]
    assert [words[-1] for words in epochs] == list(PHASES[:3])
    final = terminal.screen()
    assert "now" not in " ".join(final)
    assert tuple(rows_of(final)) == TASKS[:5]  # those of the last epoch


def test_the_weight_is_that_of_the_moment():
    tasks = Groups()
    tasks.close("epoch 1", {"code/loss": 2.0, "code/weight": 0.25})
    tasks.update({"code/weight": 0.5})
    assert text_of(group_table(tasks, running=True))[1].split() == ["code", "0.5000", "2.0000"]
    assert text_of(group_table(tasks))[1].split() == ["code", "0.2500", "2.0000"]


names = st.sampled_from([*TASKS, "a", "a_very_long_name_of_a_task_that_does_not_end", "課題" * 12])
own = st.sampled_from(["loss", "weight", "grad_norm", "accuracy", "f1", "perplexity", "a_metric_of_the_users_own"])
values = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))
task_numbers = st.dictionaries(
    st.builds(lambda v, t, n: f"{v}{t}/{n}", st.sampled_from(["", "val_"]), names, own), values
)


@given(
    tasks=st.builds(Groups, st.sampled_from(["", "epoch 12", "step 1234567"]), task_numbers, task_numbers),
    num_rows=st.integers(0, 20),
    width=st.integers(10, 220),
    height=st.integers(5, 60),
    notices=st.lists(st.sampled_from(["short", "a sentence " * 9]), max_size=3),
    outcome=st.sampled_from(["", "finished"]),
)
def test_a_frame_with_tasks_fits_the_terminal(tasks, num_rows, width, height, notices, outcome):
    rows = keep_rows([EpochRow(epoch, 1.0, {"loss": 1.0, "val_loss": 1.0}, "2/3 name") for epoch in range(num_rows)])
    view = View("name", "cpu", 15, 100, 10, num_rows, 5, 5, rows=rows, groups=tasks)
    view.outcome, view.notices, view.phase = outcome, notices, "2/3 name"
    lines = picture(view, width, height)
    assert all(cell_len(line) <= width for line in lines)


def test_a_run_with_one_task_has_no_table_and_no_phase():
    rows = [EpochRow(0, 1.0, {"loss": 1.0, "val_loss": 2.0})]
    view = View("toy", "cpu", 4, 16, 4, 1, record={"loss": 1.0}, rows=rows)
    text = "\n".join([*picture(view, 104, 40), log_line(view), epoch_line(view, view.rows[0])])
    assert "task" not in text
    assert "phase" not in text


# --- phases and notices


def test_the_best_epoch_is_one_of_the_last_phase():
    rows = [EpochRow(0, 1.0, {"val_loss": 0.5}, "1 a"), EpochRow(1, 1.0, {"val_loss": 3.0}, "2 b")]
    assert best_row(rows) is rows[1]
    rows.append(EpochRow(2, 1.0, {"val_loss": 4.0}, "2 b"))
    assert best_row(rows) is rows[1]


def test_a_phase_announced_before_the_display_begins_is_shown_and_that_of_an_earlier_run_is_not():
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream)
    display.on_phase_begin("one", {"number": 1, "phases": 2, "tasks": ("a",)})
    run = Run(display)
    run.callbacks.on_log({"loss": 1.0})
    assert "phase 1/2 one" in stream.getvalue()
    run.callbacks.on_train_end({})
    stream.truncate(0)
    Run(display).callbacks.on_log({"loss": 1.0})
    assert "phase" not in stream.getvalue()


def test_tasks_that_are_not_trained_any_more_leave_the_running_table():
    display = ProgressDisplay(stream=io.StringIO())
    run = Run(display)
    run.callbacks.on_log({"old/loss": 1.0, "kept/loss": 2.0})
    run.callbacks.on_phase_begin(
        "next", {"number": 2, "tasks": ("kept", "new"), "weights": {"kept": 1.0, "new": 0.1}}
    )
    run.callbacks.on_log({"new/loss": 3.0})
    table = text_of(group_table(display._view.groups, running=True))
    assert [line.split() for line in table[1:]] == [["kept", "1.0000", "2.0000"], ["new", "0.1000", "3.0000"]]


@pytest.mark.parametrize("phase_again", [False, True])
def test_a_resumed_run_shows_tasks_and_phase_of_before(phase_again, terminal):
    first = ProgressDisplay(stream=io.StringIO())
    run = Run(first)
    run.epoch()
    run.epoch()
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = ProgressDisplay(stream=terminal)
    second.load_state_dict(state)
    assert second.state_dict() == state
    resumed = Run(second, clock=Clock(step=9, epoch=2))
    if phase_again:
        resumed.callbacks.on_log({"step": 10, "phase": 2.0, "quality/loss": 1.0})
    screen = terminal.screen()
    resumed.callbacks.on_train_end({})
    assert "phase 2/4 simple_ontology" in screen[0]
    assert set(TASKS[:3]) <= set(rows_of(screen))


def test_a_notice_stays_in_sight_when_others_follow(terminal, monkeypatch):
    now = [100.0]
    display = ProgressDisplay(refresh_s=0.0, stream=terminal)
    run = Run(display)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    def shown() -> list[str]:
        now[0] += 1
        run.callbacks.on_step_end(report())
        return [line.strip() for line in terminal.screen() if line.strip() in ("one", "two", "three", "four", "note")]

    for text in ("one", "two", "two", "three"):
        run.callbacks.on_notice(text, {})
    assert shown() == ["one", "two", "three"]
    display.note("note")
    assert shown() == ["one", "two", "three", "note"]
    run.callbacks.on_notice("four", {})
    assert shown() == ["two", "three", "four", "note"]
    display.close()


# --- files of numbers


def test_columns_of_tasks_that_come_in_later_are_added_and_earlier_rows_stay(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    log = CSVLogger(str(tmp_path / "log.csv"))
    run = Run(RunRecorder(folder), log)
    for _ in range(3):
        run.epoch(phase=False)
    state = log.state_dict()
    run.epoch(phase=False)  # lost
    clock = Clock(step=12, epoch=3)
    folder.trim(clock.step)
    log = CSVLogger(str(tmp_path / "log.csv"))
    log.load_state_dict(state)
    resumed = Run(RunRecorder(folder), log, clock=clock)
    resumed.epoch(phase=False)
    resumed.callbacks.on_train_end({})

    expected = [numbers(epoch, TASKS[: 1 + 2 * epoch]) for epoch in range(4)]
    with (tmp_path / "log.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 4
    assert len(set(found[0])) == len(found[0])
    for row, wanted in zip(found, expected, strict=True):
        assert None not in row
        assert {name: float(cell) for name, cell in row.items() if cell and name in expected[-1]} == wanted
    records = [record for record in folder.read_metrics() if record["split"] == "epoch"]
    assert [
        {name: record[name] for name in wanted} for record, wanted in zip(records, expected, strict=True)
    ] == expected
