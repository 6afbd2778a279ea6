"""The ledger: averages equal the plain formula, skipped steps leave it intact, its state round-trips."""

import json
import math

import pytest
import torch

from etude.core import StepReport
from etude.engine.ledger import Ledger


def report(loss, count=4.0, norm=2.0, divisor=4.0, skipped=0.0, samples=4):
    return StepReport(
        {"loss": torch.tensor(loss), "accuracy": torch.tensor(3)},
        {"loss": count, "accuracy": torch.tensor(4)},
        torch.tensor(norm),
        divisor,
        torch.tensor(skipped),
        0.1,
        samples,
    )


def test_averages_weigh_by_count_not_by_step():
    ledger = Ledger()
    ledger.add(report(8.0, count=4.0))
    ledger.add(report(1.0, count=1.0))
    logs = ledger.take_window()
    assert logs["loss"] == pytest.approx(9.0 / 5.0)
    assert logs["accuracy"] == pytest.approx(6 / 8)
    assert logs["grad_norm"] == pytest.approx(0.5)
    assert ledger.epoch.means()["loss"] == pytest.approx(9.0 / 5.0)
    assert ledger.window.steps == 0


def test_non_finite_steps_are_counted_and_left_out_of_averages():
    ledger = Ledger()
    ledger.add(report(8.0))
    ledger.add(report(math.nan, norm=math.nan, skipped=1.0))
    ledger.add(report(math.inf, norm=math.inf, skipped=1.0))
    ledger.flush()
    assert ledger.bad_streak == 2
    logs = ledger.take_window()
    assert logs["loss"] == pytest.approx(2.0)
    assert logs["skipped"] == 2
    assert logs["grad_norm_max"] == pytest.approx(0.5)
    ledger.add(report(4.0))
    ledger.flush()
    assert ledger.bad_streak == 0


def test_state_round_trips_through_json_in_the_middle_of_a_window():
    straight, first = Ledger(), Ledger()
    for ledger in (straight, first):
        for value in (0.1, 0.2, 0.3):
            ledger.add(report(value))
    second = Ledger()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    straight.flush()  # the same additions in the same order, as at a checkpoint
    for ledger in (straight, second):
        ledger.add(report(0.7))
    assert straight.take_window()["loss"] == second.take_window()["loss"]
    assert straight.take_epoch().sums == second.take_epoch().sums
