"""Averages against math.fsum; the window; tensors that are copied, not kept; the numbers of a run."""

import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from etude.core import ConfigError
from etude.metrics import LossTracker, Meter, TrainingMetrics

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@settings(deadline=None)
@given(losses=values, window=st.integers(1, 20), as_tensor=st.booleans())
def test_averages_are_those_of_a_plain_list(losses, window, as_tensor):
    tracker = LossTracker(window_size=window)
    for loss in losses:
        tracker.update(torch.tensor(loss, dtype=torch.float64) if as_tensor else loss)
    recent = losses[-window:]
    assert tracker.count == len(losses)
    assert tracker.values == recent
    assert tracker.get_average() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12, abs=1e-9)
    assert tracker.get_recent_average() == pytest.approx(math.fsum(recent) / len(recent), rel=1e-12, abs=1e-9)
    assert tracker.compute() == tracker.get_average()


def test_a_long_run_keeps_only_its_window_and_all_of_its_digits():
    tracker = LossTracker(window_size=3)
    for _ in range(10_000):
        tracker.update(torch.tensor(0.1))
    exact = float(torch.tensor(0.1))  # 0.1 as float32; summed in float32 the average would be off by 1e-4
    assert tracker.get_average() == pytest.approx(exact, rel=1e-12)
    assert len(tracker.values) == 3


def test_a_tensor_is_copied_at_once_and_its_graph_is_not_kept():
    weight = torch.ones((), requires_grad=True)
    loss = weight * 2
    tracker = LossTracker()
    tracker.update(loss)
    with torch.no_grad():
        loss.fill_(100.0)  # memory of a captured step is written again by the next one
    assert tracker.values == [2.0]
    assert not tracker._buffer.requires_grad


def test_update_reads_nothing_from_the_device(monkeypatch):
    tracker, loss = LossTracker(), torch.tensor(1.0)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, lambda self, *_, name=name: pytest.fail(f"update called {name}"))
    tracker.update(loss)
    tracker.update(2.0)


def test_values_seen_in_inference_mode_and_outside_add_up():
    with torch.inference_mode():
        tracker = LossTracker()
        tracker.update(torch.tensor(1.0))
    tracker.update(torch.tensor(3.0))
    assert tracker.values == [1.0, 3.0]


def test_infinite_losses_are_averaged_not_refused():
    tracker = LossTracker()
    for loss in (math.inf, -math.inf):
        tracker.update(loss)
    assert math.isnan(tracker.get_recent_average())
    assert math.isnan(tracker.get_average())


def test_nothing_seen_is_nan_and_reset_forgets():
    tracker = LossTracker()
    assert math.isnan(tracker.get_average())
    assert math.isnan(tracker.get_recent_average())
    tracker.update(5.0)
    tracker.reset()
    assert math.isnan(tracker.compute())
    assert (tracker.count, tracker.values) == (0, [])
    tracker.update(1.0)
    assert tracker.get_average() == tracker.get_recent_average() == 1.0


@settings(deadline=None)
@given(losses=values, more=values, window=st.integers(1, 8))
def test_a_restored_tracker_goes_on_to_the_bit(losses, more, window):
    whole, first, second = (LossTracker(window) for _ in range(3))
    for loss in losses:
        whole.update(loss)
        first.update(loss)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in more:
        whole.update(loss)
        second.update(loss)
    assert second.state_dict() == whole.state_dict()
    assert second.get_recent_average() == whole.get_recent_average()


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_changed_window_keeps_the_average_and_what_it_can_of_the_recent_values(window):
    tracker, other = LossTracker(3), LossTracker(window)
    for loss in (1.0, 2.0, 3.0, 4.0, 10.0):
        tracker.update(loss)
    other.load_state_dict(tracker.state_dict())
    assert other.get_average() == 4.0
    assert other.values == [3.0, 4.0, 10.0][-window:]
    other.update(22.0)
    assert (other.get_average(), other.values) == (7.0, [3.0, 4.0, 10.0, 22.0][-window:])


def test_it_can_stand_in_a_list_of_metrics():
    assert isinstance(LossTracker(), Meter)


def test_a_window_below_one_is_refused():
    with pytest.raises(ConfigError, match="window_size is 0; it must be at least 1"):
        LossTracker(window_size=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_cuda_an_update_never_waits():
    tracker = LossTracker(window_size=2)
    tracker.update(8.0)
    losses = [torch.tensor(float(i), device="cuda") for i in range(4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in losses:
            tracker.update(loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tracker.update(torch.tensor(6.0))
    assert (tracker.get_average(), tracker.values) == (20 / 6, [3.0, 6.0])


def test_training_metrics_remember_the_best_epoch_by_loss():
    metrics = TrainingMetrics()
    assert (metrics.best_val_loss, metrics.best_val_accuracy, metrics.best_epoch) == (math.inf, 0.0, 0)
    for epoch, (loss, accuracy) in enumerate([(0.9, 0.5), (0.4, 0.8), (math.nan, 0.1), (0.6, 0.9)]):
        metrics.current_epoch = epoch
        metrics.update_val_metrics(loss, accuracy)
    assert (metrics.best_val_loss, metrics.best_epoch, metrics.best_val_accuracy) == (0.4, 1, 0.9)
    assert (metrics.val_loss, metrics.val_accuracy) == (0.6, 0.9)


def test_an_epoch_starts_with_its_own_numbers_and_keeps_the_best():
    metrics = TrainingMetrics(current_batch=7)
    metrics.update_train_metrics(0.5, 0.75)
    metrics.update_val_metrics(0.25, 0.5)
    assert (metrics.train_loss, metrics.train_accuracy) == (0.5, 0.75)
    metrics.reset_epoch()
    assert (metrics.current_batch, metrics.train_loss, metrics.train_accuracy) == (0, 0.0, 0.0)
    assert (metrics.val_loss, metrics.best_val_loss) == (0.25, 0.25)


def test_the_summary_is_printed_as_it_is_returned(capsys):
    metrics = TrainingMetrics(current_epoch=4, current_batch=9)
    metrics.update_train_metrics(0.5, 0.75)
    metrics.update_val_metrics(0.25, 0.875)
    metrics.print_summary()
    printed = capsys.readouterr().out
    assert printed == metrics.summary() + "\n"
    for number in ("epoch 4", "batch 9", "0.5000", "0.7500", "0.2500 (epoch 4)", "0.8750"):
        assert number in printed


def test_training_metrics_are_restored_from_their_state():
    metrics = TrainingMetrics(current_epoch=2)
    metrics.update_val_metrics(0.25, 0.875)
    other = TrainingMetrics()
    other.load_state_dict(metrics.state_dict())
    assert other == metrics
