"""ProgressDisplay: what it shows, on a terminal and in a file, and what it costs a step."""

import io
import itertools
import math
import re
import sys
import threading

import pytest
import torch
from callback_life import Life, report
from hypothesis import given, strategies as st
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from etude.callbacks import CallbackList, ProgressDisplay, progress
from etude.callbacks.progress_lines import (
    MAX_ROWS,
    EpochRow,
    View,
    best_row,
    duration,
    epoch_line,
    keep_rows,
    log_line,
    metric,
    number,
    rate,
)
from etude.callbacks.terminal import frame
from etude.core import Clock
from etude.engine.callback import RunInfo


class Terminal(io.StringIO):
    """A terminal that remembers what it was sent and can say what is on its screen."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for control, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|([^\x1b])", self.getvalue()):
            if control.endswith("A"):
                row -= int(control[2:-1])
                assert row >= 0, "went up beyond its own lines"
            elif control == "\x1b[2K":
                lines[row], column = "", 0
            elif text == "\r":
                column = 0
            elif text == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif text:
                assert column == len(lines[row]), "wrote over something"
                lines[row] += text
                column += 1
        return lines

    @property
    def cursor_is_visible(self) -> bool:
        return self.getvalue().rfind("\x1b[?25l") <= self.getvalue().rfind("\x1b[?25h")


def text_of(drawn, width=200) -> list[str]:
    """Return the lines of a frame or a table without their styles."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(drawn)
    return [line.rstrip() for line in text.get().splitlines()]


def picture(view, width, height) -> list[str]:
    """Return what a terminal of this size shows."""
    return text_of(frame(view, width, height), width)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")
    return Terminal()


# --- in a file


def test_plain_lines_have_no_control_characters(tmp_path):
    stream = io.StringIO()
    Life(tmp_path, total_epochs=2).whole(ProgressDisplay(stream=stream))
    text = stream.getvalue()
    assert not re.search(r"[^\x20-\x7e\n]", text)
    lines = text.splitlines()
    assert re.fullmatch(r"life  cpu \(\d+ threads?\), 8 parameters", lines[0])
    assert lines[1:3] == [
        "epoch 1/2  step 2/8  loss 0.5000  lr 1.0e-01  100 samples/s",
        "epoch 1/2  step 4/8  loss 0.2500  lr 1.0e-01  100 samples/s",
    ]
    pattern = r"epoch 1/2 done in \d+\.\d s  loss 1\.0000  acc 0\.0000  val loss 1\.5000  val acc 0\.0000  \(best\)"
    assert re.fullmatch(pattern, lines[3])
    assert re.fullmatch(r"finished in \d+\.\d s, best val loss 1\.5000 in epoch 1", lines[-1])
    assert len(lines) == 1 + 4 + 2 + 1


def test_a_validation_inside_an_epoch_is_told_and_one_at_its_end_is_part_of_the_epoch(tmp_path):
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream)
    clock = Clock()
    run = RunInfo("toy", nn.Linear(1, 1), None, clock, torch.device("cpu"), 2, 8, 4, None)
    display.on_train_begin(run)
    display.on_epoch_begin(0)
    for clock.step in (2, 4):
        display.on_validation_begin(0)
        display.on_validation_end(0, {"val_loss": 1.25, "val_perplexity": 3.5, "val_accuracy": 0.5})
    display.on_epoch_end(0, {"loss": 2.0, "val_loss": 1.25})
    lines = [line for line in stream.getvalue().splitlines() if "val loss" in line]
    assert lines[0] == "step 2/8  val loss 1.2500  val ppl 3.500"
    assert len(lines) == 2
    assert lines[1].startswith("epoch 1/2 done")


def test_a_closed_pipe_ends_the_display_and_not_the_run(tmp_path):
    class Closed(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            raise BrokenPipeError

    stream = Closed()
    Life(tmp_path, total_epochs=2).whole(ProgressDisplay(stream=stream))
    assert stream.writes == 1


def test_a_dumb_terminal_gets_plain_lines(tmp_path, terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    Life(tmp_path, total_epochs=1).whole(ProgressDisplay(stream=terminal))
    assert "\x1b" not in terminal.getvalue()
    assert "epoch 1/1  step 4/4" in terminal.getvalue()


# --- on a terminal


def test_the_screen_shows_one_frame_below_what_was_printed(tmp_path, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    life = Life(tmp_path, total_epochs=4)
    display = ProgressDisplay(refresh_s=0.0)
    callbacks = CallbackList([display])
    threads = threading.active_count()
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    print("a line of the user's")
    callbacks.on_validation_begin(1)
    screen = terminal.screen()
    assert threading.active_count() == threads
    assert not terminal.cursor_is_visible
    assert screen[0] == "a line of the user's"
    screen = [line.rstrip() for line in screen]
    assert screen[1].startswith(" life  cpu (")
    assert [line for line in screen if line.startswith(" epoch 1/4")] == [screen[-3]]
    assert screen[-3].endswith("4/4  validating")
    assert re.search(r"━+[╸╺]━+ +4/16  [\d.]+ s left$", screen[-2])
    assert screen[-1] == " loss 0.2500   lr 1.0e-01   100 samples/s"
    callbacks.on_validation_end(1, {})
    for _ in range(3):
        life.epoch(callbacks)
    callbacks.on_train_end({})
    screen = terminal.screen()
    assert sum("train loss" in line for line in screen) == 1
    assert [line.split()[:2] for line in screen if re.match(r" *(★ )?\d+ ", line)] == [
        ["★", "1"], ["2", "0.5000"], ["3", "0.3333"], ["4", "0.2500"],
    ]  # fmt: skip
    assert "nan" in next(line for line in screen if re.match(r" +3 ", line))
    assert next(line for line in reversed(screen) if line.strip()).startswith(" finished in")
    assert terminal.cursor_is_visible


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_an_error_leaves_the_terminal_clean(tmp_path, terminal, monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", terminal)
    life = Life(tmp_path)
    callbacks = CallbackList([ProgressDisplay()])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    assert sys.stdout is not terminal  # what is printed goes above the display
    callbacks.on_exception(error)
    assert sys.stdout is terminal
    assert terminal.cursor_is_visible
    words = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    assert any(line.startswith(f" {words} after") for line in terminal.screen())
    before = terminal.getvalue()
    callbacks.on_step_end(report())
    callbacks.on_log({"loss": 1.0})
    assert "\x1b" not in terminal.getvalue()[len(before) :]


def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    life = Life(tmp_path, total_epochs=3)
    callbacks = CallbackList([ProgressDisplay(refresh_s=0.0, stream=terminal)])
    callbacks.on_train_begin(life.run_info())

    def lost(text):
        raise OSError(5, "Input/output error")

    terminal.write = lost
    while life.clock.epoch < 3:
        life.epoch(callbacks)
    callbacks.on_train_end({})
    assert sys.stdout is terminal


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color(tmp_path, terminal, monkeypatch, no_color):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    Life(tmp_path, total_epochs=2).whole(ProgressDisplay(stream=terminal))
    colored = bool(re.search(r"\x1b\[(\d+;)*(3[0-7]|9[0-7])m", terminal.getvalue()))
    assert colored is not no_color


def test_a_resumed_run_shows_the_epochs_before(tmp_path, terminal):
    first = ProgressDisplay(stream=io.StringIO())
    life = Life(tmp_path)
    callbacks = CallbackList([first])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    life.epoch(callbacks)
    second = ProgressDisplay(stream=terminal)
    second.load_state_dict(first.state_dict())
    again = Life(tmp_path, clock=Clock(step=10, epoch=2, position=16), resumed=True)
    callbacks = CallbackList([second])
    callbacks.on_train_begin(again.run_info())
    callbacks.on_epoch_begin(2)
    screen = terminal.screen()
    callbacks.on_train_end({})
    assert "resumed at step 10" in screen[0]
    assert [line.split()[0] for line in screen if re.match(r" *(★ )?\d+ ", line)] == ["★", "2"]
    assert any(re.match(r" epoch 3/10 .* 2/4  50% *$", line) for line in screen)


def test_what_another_version_has_shown_does_not_stop_a_run():
    display = ProgressDisplay(stream=io.StringIO())
    before = display.state_dict()
    display.load_state_dict({"rows": [{"speed": {"data_wait": 0.1}}], "tasks": 3})
    assert display.state_dict() == before


def test_a_note_is_drawn_by_the_next_step_and_not_by_its_caller(tmp_path, terminal):
    life = Life(tmp_path)
    display = ProgressDisplay(refresh_s=1000.0, stream=terminal)
    callbacks = CallbackList([display])
    callbacks.on_train_begin(life.run_info())
    callbacks.on_step_end(report())
    before = terminal.getvalue()
    display.note("stopping after this step")
    assert terminal.getvalue() == before
    callbacks.on_step_end(report())
    assert " stopping after this step" in [line.rstrip() for line in terminal.screen()]
    display.close()
    display.close()


# --- the pace of drawing


class Drawn:
    """Stands in for the terminal: counts."""

    def __init__(self, stream) -> None:
        self.times: list[float] = []
        Drawn.last = self

    def draw(self, view) -> None:
        self.times.append(FakeTime.now)
        FakeTime.now += FakeTime.drawing_s

    def stop(self) -> None:
        pass


class FakeTime:
    now = 0.0
    drawing_s = 0.001

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


@pytest.fixture
def pace(tmp_path, terminal, monkeypatch):
    """Return a function that takes steps of some duration and returns when the display was drawn meanwhile."""
    import etude.callbacks.terminal

    monkeypatch.setattr(etude.callbacks.terminal, "LiveTerminal", Drawn)
    monkeypatch.setattr(progress, "time", FakeTime)
    FakeTime.now, FakeTime.drawing_s = 0.0, 0.001
    display = ProgressDisplay(refresh_s=0.25, stream=terminal)
    display.on_train_begin(Life(tmp_path).run_info())
    display.on_epoch_begin(0)

    def steps(count: int, seconds: float) -> list[float]:
        assert display._terminal is Drawn.last
        begin = len(Drawn.last.times)
        for _ in range(count):
            FakeTime.now += seconds
            display.on_step_end(report_once)
        return Drawn.last.times[begin:]

    report_once = report()
    yield steps
    display.close()


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("seconds", [1e-5, 5e-4, 0.01, 0.2, 1.0])
def test_the_display_is_drawn_about_every_refresh(pace, seconds):
    pace(int(2 / seconds) + 1, seconds)  # find the pace
    count = int(5 / seconds) + 1
    times = pace(count, seconds)
    wanted = max(0.25, seconds)
    assert all(wanted * 0.99 <= gap <= 1.25 * 0.25 + seconds + 0.01 for gap in gaps(times))
    assert len(times) >= 4


def test_steps_that_become_slow_do_not_freeze_the_display(pace):
    pace(100_000, 1e-4)
    times = pace(3000, 0.02)  # 200 times slower: at most one long gap, then the pace is found again
    assert len([gap for gap in gaps(times) if gap > 0.6]) == 0
    assert len(times) > 60


def test_a_slow_terminal_is_drawn_less_often(pace):
    FakeTime.drawing_s = 0.2
    times = pace(100_000, 1e-3)
    assert 0.2 * len(times) <= 1.05 * progress.MAX_SHARE * 100


# --- the view


LANGUAGE = ["tokens_per_s", "mfu", "data_wait", "perplexity", "tokens"]
PERPLEXITIES = ["perplexity", "val_perplexity"]

rows = st.lists(
    st.builds(
        lambda seconds, numbers, speed: EpochRow(0, seconds, numbers | speed),
        st.floats(0, 1e6),
        st.dictionaries(
            st.sampled_from(
                [
                    "loss",
                    "accuracy",
                    "val_loss",
                    "val_accuracy",
                    "val_f1",
                    "a_very_long_name_of_a_loss",
                    *PERPLEXITIES,
                ]
            ),
            st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        st.dictionaries(st.sampled_from(LANGUAGE[:3]), st.floats(0, 1e12)),
    ),
    max_size=30,
).map(lambda found: [EpochRow(epoch, row.seconds, row.numbers) for epoch, row in enumerate(found)])


@given(
    rows=rows,
    width=st.integers(10, 220),
    height=st.integers(5, 60),
    total=st.one_of(st.none(), st.integers(1, 10**7)),
    step=st.integers(0, 10**7),
    record=st.dictionaries(
        st.sampled_from(["loss", "accuracy", "lr", "grad_norm", "samples_per_s", "skipped", *LANGUAGE]), st.floats()
    ),
    outcome=st.sampled_from(["", "finished", "stopped"]),
)
def test_a_frame_fits_the_terminal(rows, width, height, total, step, record, outcome):
    view = View("name", "cpu", 15, total, total, len(rows), step, step, 1.0, None, record, keep_rows(rows))
    view.outcome = outcome
    lines = picture(view, width, height)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 10)


@pytest.mark.parametrize("width", range(10, 60))
def test_wide_characters_take_two_columns(width):
    view = View("実験" * 10, "größe", note="終了" * 8)
    assert all(cell_len(line) <= width for line in picture(view, width, 30))


def test_names_that_the_stream_cannot_write(tmp_path):
    raw = io.BytesIO()
    display = ProgressDisplay(stream=io.TextIOWrapper(raw, encoding="ascii"))
    info = Life(tmp_path).run_info()
    info.name = "größe"
    display.on_train_begin(info)
    assert raw.getvalue().startswith(b"gr??e  cpu")


@given(rows)
def test_the_last_rows_and_the_best_are_kept(rows):
    kept: list[EpochRow] = []
    for row in rows:
        kept = keep_rows([*kept, row])
        assert len(kept) <= MAX_ROWS + 1
    assert kept[-MAX_ROWS:] == rows[-MAX_ROWS:]
    best = best_row(rows)
    assert best_row(kept) == best
    losses = [row.numbers["val_loss"] for row in rows if row.numbers.get("val_loss") is not None]
    if losses:
        assert best.numbers["val_loss"] == min(losses)


def test_hundreds_of_epochs_show_the_last_ones_and_the_best():
    rows: list[EpochRow] = []
    for epoch in range(500):
        rows = keep_rows([*rows, EpochRow(epoch, 1.0, {"loss": 1.0, "val_loss": abs(epoch - 200.0)})])
    view = View("name", "cpu", 600, 6000, 10, 500, 5000, 5, rows=rows)
    text = "\n".join(picture(view, 80, 50))
    assert re.findall(r"^ +(?:★ )?(\d+) ", text, re.M) == ["201", *map(str, range(491, 501))]


@given(st.floats(0, 1e7))
def test_durations_say_the_time_to_half_a_unit(seconds):
    text = duration(seconds)
    if text.endswith(" s"):
        assert abs(float(text[:-2]) - seconds) <= 0.5
    else:
        parts = [int(part) for part in text.split(":")]
        assert all(part < 60 for part in parts[1:])
        assert abs(sum(part * 60**i for i, part in enumerate(reversed(parts))) - seconds) <= 0.5


@given(st.floats(-1e300, 1e300))
def test_numbers_are_short_and_right(value):
    text = number(value)
    assert len(text) <= 10
    assert math.isclose(float(text), value, rel_tol=6e-3, abs_tol=6e-5)


# --- language models


RECORD = {
    "step": 9, "loss": 3.21, "accuracy": 0.31, "perplexity": 24.78, "lr": 3e-4, "grad_norm": 0.52, "skipped": 0,
    "samples_per_s": 148.0, "tokens_per_s": 151_800.0, "data_wait": 0.003, "mfu": 0.412, "tokens": 12_000_000,
}  # fmt: skip


def language_view(**changes) -> View:
    numbers = {name: RECORD[name] for name in ("loss", "accuracy", "perplexity")}
    numbers |= {"val_loss": 3.1, "val_accuracy": 0.32, "val_perplexity": 22.2}
    row = EpochRow(0, 12.0, numbers | {name: RECORD[name] for name in ("tokens_per_s", "mfu", "data_wait")})
    return View("lm", "cpu", 3, 90, 30, 1, 40, 10, 20.0, 25.0, {**RECORD, **changes}, [row])


def test_a_line_of_a_language_model_shows_perplexity_and_speed():
    line = "epoch 2/3  step 40/90  loss 3.2100  ppl 24.78  lr 3.0e-04  152k tokens/s  mfu 41.2%"
    assert log_line(language_view()) == f"{line}  grad norm 0.5200"
    assert log_line(language_view(data_wait=0.034)) == f"{line}  data wait 3.4%  grad norm 0.5200"
    view = language_view()
    assert epoch_line(view, view.rows[0]) == (
        "epoch 1/3 done in 12 s  loss 3.2100  ppl 24.78  val loss 3.1000  val ppl 22.20  152k tokens/s  (best)"
    )


def test_the_loss_without_smoothing_is_shown_as_perplexity_alone():
    view = language_view(nll=3.2)
    view.rows[0].numbers |= {"nll": 3.2, "val_nll": 3.1}
    assert "nll" not in log_line(view) + epoch_line(view, view.rows[0])
    assert not any("nll" in line for line in picture(view, 120, 30))


def test_the_table_of_a_language_model_has_perplexity_in_the_place_of_accuracy():
    head, row = (line.split() for line in picture(language_view(), 80, 30)[2:4])
    assert head == ["epoch", "train", "loss", "train", "ppl", "val", "loss", "val", "ppl", "tokens/s", "time"]
    assert row == ["★", "1", "3.2100", "24.78", "3.1000", "22.20", "152k", "12", "s"]


@given(st.floats(1e-3, 1e15))
def test_a_rate_is_short_and_close(value):
    text = rate(value)
    unit = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert len(text) <= 8
    assert float(text.rstrip("kMG")) * unit == pytest.approx(value, rel=0.06, abs=0.0051)


@given(st.floats(0.1, 1e300))
def test_a_perplexity_is_short_and_close(value):
    text = metric("val_perplexity", value)
    assert len(text) <= 9
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.006)
