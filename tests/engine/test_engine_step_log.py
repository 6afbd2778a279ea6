"""The step log: averages equal the plain formula, skipped steps leave it intact, its state round-trips."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, strategies as st

from etude.checkpoint.trust import check_kind
from etude.core import StepReport
from etude.engine.meter import Amounts
from etude.engine.state import LEDGER
from etude.engine.step_log import StepLog


def report(loss, count=4.0, norm=2.0, divisor=4.0, skipped=0.0):
    return StepReport(
        {"loss": torch.tensor(loss), "accuracy": torch.tensor(3)},
        {"loss": count, "accuracy": torch.tensor(4)},
        torch.tensor(norm),
        divisor,
        torch.tensor(skipped),
        0.1,
    )


def test_averages_weigh_by_count_not_by_step():
    log = StepLog()
    log.add(report(8.0, count=4.0))
    log.add(report(1.0, count=1.0))
    logs = log.take_window().logs()
    assert logs["loss"] == pytest.approx(9.0 / 5.0)
    assert logs["accuracy"] == pytest.approx(6 / 8)
    assert logs["grad_norm"] == pytest.approx(0.5)
    assert log.epoch.means()["loss"] == pytest.approx(9.0 / 5.0)
    assert log.window.steps == 0


def test_non_finite_steps_are_counted_and_left_out_of_averages():
    log = StepLog()
    log.add(report(8.0))
    log.add(report(math.nan, norm=math.nan, skipped=1.0))
    log.add(report(math.inf, norm=math.inf, skipped=1.0))
    log.flush()
    assert log.bad_streak == 2
    logs = log.take_window().logs()
    assert logs["loss"] == pytest.approx(2.0)
    assert logs["skipped"] == 2
    assert logs["grad_norm_max"] == pytest.approx(0.5)
    log.add(report(4.0))
    log.flush()
    assert log.bad_streak == 0


def test_state_round_trips_through_json_in_the_middle_of_a_window():
    straight, first = StepLog(), StepLog()
    for log in (straight, first):
        for value in (0.1, 0.2, 0.3):
            log.add(report(value))
    second = StepLog()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for log in (straight, second):
        log.add(report(0.7))
    assert straight.take_window().logs()["loss"] == second.take_window().logs()["loss"]
    assert straight.take_epoch().sums == second.take_epoch().sums


@given(
    values=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=40),
    read=st.sets(st.integers(0, 39), min_size=1),
    saved=st.sets(st.integers(0, 39)),
)
def test_no_number_depends_on_when_the_host_reads_or_saves(values, read, saved):
    straight, other = StepLog(), StepLog()
    for place, value in enumerate(values):
        one = report(1.0, norm=value, divisor=3.0)
        one.sums["loss"] = torch.tensor(value / 3, dtype=torch.float64)
        straight.add(one)
        other.add(one)
        if place in read:
            other.flush()
        if place in saved:
            state = json.loads(json.dumps(other.state_dict()))
            other = StepLog()
            other.load_state_dict(state)
    for mine, theirs in ((straight.take_window(), other.take_window()), (straight.take_epoch(), other.take_epoch())):
        timing = {"seconds": 0.0, "waited": 0.0}
        assert asdict(mine) | timing == asdict(theirs) | timing


def test_tokens_are_added_up_over_steps_whether_counted_by_the_host_or_on_the_device():
    log = StepLog()
    for tokens in (torch.tensor(7), 5.0, torch.tensor(2.0)):
        log.add(report(1.0), Amounts(4, tokens))
    window = log.take_window()
    assert (window.tokens, log.tokens) == (14.0, 14.0)
    assert window.logs()["tokens_per_s"] == pytest.approx(14.0 / window.seconds)
    assert log.take_window().tokens == 0
    assert log.tokens == log.epoch.tokens == 14.0


def test_the_total_of_tokens_goes_on_after_a_resume_and_old_states_have_none():
    first, second = StepLog(), StepLog()
    for _ in range(3):
        first.add(report(1.0), Amounts(4, 2**53 // 4))  # whole numbers stay exact
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    second.add(report(1.0), Amounts(4, 1))
    second.flush()
    assert second.tokens == 3 * (2**53 // 4) + 1
    for tally in ("window", "epoch"):
        del state[tally]["tokens"]
    del state["tokens"]
    second.load_state_dict(state)
    assert second.tokens == second.epoch.tokens == 0


def test_without_tokens_there_is_no_rate_of_tokens():
    log = StepLog()
    log.add(report(1.0))
    assert {"samples_per_s", "data_wait"} <= log.epoch.logs().keys() | log.take_window().logs().keys()
    assert "tokens_per_s" not in log.epoch.logs()


def test_sums_of_earlier_checkpoints_may_have_more():
    log = StepLog()
    state = log.state_dict()
    for part in ("window", "epoch"):
        state[part] |= {"forward_flops": 3.0, "steps": 7}
    check_kind(LEDGER, state, "ledger")
    log.load_state_dict(state)
    assert (log.window.steps, log.epoch.steps) == (7, 7)
