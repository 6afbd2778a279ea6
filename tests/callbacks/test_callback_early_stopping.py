"""EarlyStopping against a plain re-reading of the whole history."""

import math

import pytest
from callback_life import Life
from hypothesis import given, strategies as st

from etude.callbacks import CallbackList, EarlyStopping
from etude.core import ConfigError, TrainingError


def stop_epoch(values: list[float], patience: int, mode: str, min_delta: float) -> int | None:
    """Return the epoch at which `patience` epochs have passed since the last improvement, from the definition."""
    sign = 1 if mode == "min" else -1
    improved_at, best = -1, math.inf
    for epoch, value in enumerate(values):
        if math.isfinite(value) and (best == math.inf or best - sign * value > min_delta):
            improved_at, best = epoch, sign * value
        elif epoch - improved_at >= patience:
            return epoch
    return None


quarters = st.integers(-8, 8).map(lambda n: n / 4)  # exact in binary, so that ties and min_delta are exact


@given(
    values=st.lists(st.one_of(quarters, st.just(math.nan), st.just(math.inf)), max_size=25),
    patience=st.integers(0, 6),
    mode=st.sampled_from(["min", "max"]),
    min_delta=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_stops_where_the_definition_says(values, patience, mode, min_delta):
    callbacks = CallbackList([EarlyStopping("score", patience, mode, min_delta)])
    stopped = None
    for epoch, value in enumerate(values):
        callbacks.on_epoch_end(epoch, {"score": value})
        if callbacks.control.stop:
            stopped = epoch
            break
    assert stopped == stop_epoch(values, patience, mode, min_delta)


def test_reason_names_the_number_and_the_best_epoch(tmp_path):
    life = Life(tmp_path)
    control = life.whole(EarlyStopping(patience=2)).control
    assert control.reason == "val_loss has not improved for 2 epochs (best 1.5 in epoch 1)"
    assert life.clock.epoch == 4  # epoch 1 had no validation and does not count


@pytest.mark.parametrize("name", ["val_acc", "val_accuracy"])
@pytest.mark.parametrize("reported", ["val_acc", "val_accuracy"])
def test_acc_and_accuracy_are_one_name(name, reported):
    callback = EarlyStopping(name, patience=1, mode="max")
    for epoch, value in enumerate([0.5, 0.7, 0.6]):
        assert not callback.control.stop
        callback.on_epoch_end(epoch, {reported: value})
    assert callback.control.stop
    assert callback.monitored.best == 0.7


def test_a_name_that_is_not_there_is_explained():
    with pytest.raises(TrainingError) as caught:
        EarlyStopping("val_los", mode="min").on_epoch_end(0, {"loss": 1.0, "val_loss": 1.0, "lr": 0.1})
    assert str(caught.value) == (
        "EarlyStopping monitors 'val_los', which is not reported; did you mean 'val_loss'? "
        "(there are: loss, lr, val_loss)"
    )
    with pytest.raises(TrainingError, match="'los', which is not reported"):
        EarlyStopping("los", mode="min").on_epoch_end(0, {"loss": 1.0})


def test_epochs_without_validation_are_passed_over():
    callback = EarlyStopping(patience=1)
    for epoch in range(5):
        callback.on_epoch_end(epoch, {"loss": 1.0})
    assert not callback.control.stop
    assert callback.wait == 0


def test_a_number_that_never_came_is_reported_at_the_end(tmp_path, caplog):
    Life(tmp_path, with_validation=False, total_epochs=2).whole(EarlyStopping())
    assert "EarlyStopping did nothing: 'val_loss' was never reported" in caplog.text
    caplog.clear()
    Life(tmp_path, total_epochs=2).whole(EarlyStopping())
    assert not caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mni"}, "mode must be 'min' or 'max', found 'mni'"),
        ({"patience": -1}, "patience is -1; it must be at least 0"),
        ({"min_delta": -0.1}, "min_delta is -0.1; it must be at least 0"),
        ({"min_delta": math.nan}, "min_delta is nan; it must be at least 0"),
        (
            {"monitor": "val_acc", "mode": "min"},
            "monitor='val_acc' with mode='min' would keep the worst value; set mode='max'",
        ),
        ({"monitor": "val_los"}, "did you mean 'val_loss'"),
        ({"monitor": "val_thing"}, "'val_thing'.*mode"),
    ],
)
def test_mistakes_in_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**arguments)
