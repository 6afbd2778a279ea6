"""CSVLogger: one row per epoch, in the run folder or where a path says, again or appended."""

import csv

import pytest
from callback_life import Life

from etude.callbacks import CallbackList, CSVLogger
from etude.core import RunFolderError


def epochs(path):
    with path.open(newline="") as file:
        return [int(row["epoch"]) for row in csv.DictReader(file)]


def test_one_row_per_epoch_by_hand(tmp_path):
    callbacks = CallbackList([CSVLogger(str(tmp_path / "training.log"))])
    for epoch in range(3):
        callbacks.on_epoch_begin(epoch)
        callbacks.on_epoch_end(epoch, {"loss": 0.5 / (epoch + 1)} | ({"val_loss": 0.7} if epoch == 2 else {}))
    assert (tmp_path / "training.log").read_text().splitlines() == [
        "epoch,loss,val_loss",
        "0,0.5,",
        "1,0.25,",
        "2,0.16666666666666666,0.7",
    ]


def test_relative_names_lie_in_the_run_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Life(tmp_path / "run", total_epochs=2).whole(CSVLogger("logs/training.csv"))
    assert epochs(tmp_path / "run" / "logs" / "training.csv") == [0, 1]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(("append", "wanted"), [(False, [0, 1]), (True, [0, 1, 2, 0, 1])])
def test_a_file_that_is_there(tmp_path, append, wanted):
    Life(tmp_path, total_epochs=3).whole(CSVLogger("log.csv"))
    Life(tmp_path, total_epochs=2).whole(CSVLogger("log.csv", append=append))
    assert epochs(tmp_path / "log.csv") == wanted


def test_training_on_goes_on_in_the_same_file(tmp_path):
    life, callback = Life(tmp_path, total_epochs=2), CSVLogger("log.csv")
    life.whole(callback)
    life.total_epochs = 4
    life.whole(callback)
    assert epochs(tmp_path / "log.csv") == [0, 1, 2, 3]


def test_a_resumed_appending_logger_keeps_the_rows_of_earlier_runs(tmp_path):
    Life(tmp_path, total_epochs=3).whole(CSVLogger("log.csv"))
    life, callback = Life(tmp_path), CSVLogger("log.csv", append=True)
    callbacks = CallbackList([callback])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    state = callback.state_dict()
    life.epoch(callbacks)  # lost
    again = CSVLogger("log.csv", append=True)
    again.load_state_dict(state)
    life.clock.epoch, life.clock.step = 1, 4
    CallbackList([again]).on_train_begin(life.run_info())
    assert epochs(tmp_path / "log.csv") == [0, 1, 2, 0]


def test_unwritable_file_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"CSVLogger cannot write .*; choose a writable filename"):
        CSVLogger("file/log.csv").on_train_begin(Life(tmp_path).run_info())


def test_a_disk_that_is_full_for_a_while_costs_no_row(tmp_path, monkeypatch, caplog):
    callback = CSVLogger("log.csv")
    life = Life(tmp_path)
    callbacks = CallbackList([callback])
    callbacks.on_train_begin(life.run_info())

    def full(path, text):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("etude.callbacks.csv_logger.write_text", full)
        callbacks.on_epoch_end(0, {"loss": 1.0})
    assert "No space left on device; training continues" in caplog.text
    callbacks.on_epoch_end(1, {"loss": 0.5})
    assert epochs(tmp_path / "log.csv") == [0, 1]


def test_the_file_is_written_again_for_new_columns_only(tmp_path, monkeypatch):
    callback, written = CSVLogger("log.csv"), []
    callback.on_train_begin(Life(tmp_path).run_info())
    monkeypatch.setattr(
        "etude.callbacks.csv_logger.write_text", lambda path, text: (written.append(text), path.write_text(text))
    )
    for epoch in range(6):
        callback.on_epoch_end(epoch, {"loss": 1.0} | ({"val_loss": 2.0} if epoch % 3 == 2 else {}))
    assert len(written) == 2
    assert epochs(tmp_path / "log.csv") == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "log.csv").read_text().splitlines()[-2:] == ["4,1.0,", "5,1.0,2.0"]


def test_a_row_that_was_cut_short_by_a_kill_is_dropped(tmp_path):
    Life(tmp_path, total_epochs=2).whole(CSVLogger("log.csv"))
    with (tmp_path / "log.csv").open("a") as file:
        file.write("2,0.")
    Life(tmp_path, total_epochs=1).whole(CSVLogger("log.csv", append=True))
    assert epochs(tmp_path / "log.csv") == [0, 1, 0]
