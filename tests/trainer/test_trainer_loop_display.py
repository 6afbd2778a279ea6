"""What the loops by epoch show: a line for an epoch, log lines."""

import io
import logging

import pytest
import torch
from loop_parts import data, model, run

from etude import DataLoader, ProgressDisplay, TrainingLoop, ValidationLoop
from etude.trainer.loops.epoch import EpochProgress


def test_progress_display_counts_the_steps_of_an_epoch():
    one, stream = model(), io.StringIO()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    loop = TrainingLoop(log_interval=2, callbacks=[ProgressDisplay(stream=stream)])
    for epoch in range(2):
        loop.train_epoch(one, DataLoader(*data(), 8), optimizer, epoch=epoch)
    assert "step 0" not in stream.getvalue()
    for words in ("epoch 1  step 2 ", "epoch 1  step 4 ", "epoch 2  step 8 ", "epoch 2 done"):
        assert words in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", ["train", "validate"])
def test_an_epoch_shows_a_line(kind, monkeypatch, capsys):
    """On a terminal by itself; elsewhere if asked to."""
    one, loader = model(), DataLoader(*data(), 8)

    def epoch(**settings):
        if kind == "train":
            TrainingLoop(**settings).train_epoch(one, loader, torch.optim.SGD(one.parameters(), lr=0.1), epoch=2)
        else:
            ValidationLoop(**settings).validate_epoch(one, loader, 2)

    label = "epoch 3" if kind == "train" else "validation 3"
    epoch()
    assert capsys.readouterr().out == ""
    epoch(progress=True)
    assert f"{label}  6/6" in capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    epoch()
    assert f"{label}  6/6" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    shown = len(terminal.getvalue())
    epoch(progress=False)
    assert len(terminal.getvalue()) == shown


def test_a_closed_output_costs_the_line_not_the_run():
    stream = io.StringIO()
    stream.close()
    bar = EpochProgress(True, stream)
    bar.on_epoch_begin(0)
    bar.on_epoch_end(0, {"loss": 0.5})


def test_log_lines_of_functions_name_epoch_and_batch(caplog):
    with caplog.at_level(logging.INFO, logger="etude"):
        run(TrainingLoop(log_interval=3), model())
    assert "epoch 1 batch 6 loss" in caplog.text
