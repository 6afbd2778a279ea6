"""ProgressDisplay: what it shows, on a terminal and in a file, and what it costs a step."""

import io
import itertools
import re
import sys
import threading

import pytest
import torch
from callback_life import Life, report
from torch import nn

from etude.callbacks import CallbackList, ProgressDisplay, progress
from etude.core import Clock
from etude.engine.callback import RunInfo

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


def test_a_validation_inside_an_epoch_is_reported_and_one_at_its_end_is_part_of_the_epoch(tmp_path):
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
