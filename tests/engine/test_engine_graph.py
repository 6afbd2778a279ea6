"""What a captured step reads and writes: its batches however they came, its numbers row after row."""

import pytest
import torch
from hypothesis import given, strategies as st

from etude.core.batch import hand_out_parts
from etude.core.report import RecordedReport, StepReport, joined
from etude.engine.graph import ROWS, Inputs, Numbers


def whole(seed, batches, rows=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * rows, 3, generator=generator)
    y = torch.randint(9, (batches * rows,), generator=generator)
    x, y = hand_out_parts(x), hand_out_parts(y)
    return [(x[i : i + rows], y[i : i + rows]) for i in range(0, batches * rows, rows)]


WHOLES = st.lists(
    st.tuples(
        st.integers(1, 6),  # batches that came together
        st.lists(st.integers(0, 5), max_size=6),  # which of them are taken
        st.sampled_from(["plain", "changed", "cloned", "crossed"]),
    ),
    min_size=1,
    max_size=6,
)


@given(wholes=WHOLES, first=st.integers(1, 4))
def test_batches_are_read_as_they_came(wholes, first):
    inputs = Inputs([whole(99, first)[0]])
    for seed, (number, taken, way) in enumerate(wholes):
        parts = whole(seed, number)
        for place in taken:
            x, y = parts[place % number]
            if way == "changed":
                x.add_(1.0)
            elif way == "cloned":
                x, y = x.clone(), y.clone()
            elif way == "crossed":  # of two different batches
                y = parts[(place + 1) % number][1]
            inputs.fill([x, y])
            ((found, labels),) = inputs.read()
            assert torch.equal(found, x)
            assert torch.equal(labels, y)


def test_batches_that_came_together_are_copied_together():
    parts = whole(0, 5)
    inputs = Inputs([parts[0]])
    assert inputs.number == 5
    inputs.fill([*parts[0]])
    inputs.read()
    parts[0][0]._base.untyped_storage().fill_(0)  # unseen: no version counts it
    expected = whole(0, 5)
    for part, (x, y) in zip(parts[1:], expected[1:], strict=True):
        inputs.fill([*part])
        ((found, labels),) = inputs.read()
        assert torch.equal(found, x)
        assert torch.equal(labels, y)


@pytest.mark.parametrize("odd", ["column", "transposed", "type", "several", "foreign"])
def test_parts_that_do_not_lie_side_by_side_are_copied_alone(odd):
    x = torch.arange(24.0).reshape(6, 4).clone()
    if odd != "foreign":  # a whole of somebody who may go on writing to it
        hand_out_parts(x)
    parts = {"column": x[:, :2], "transposed": x.t()[:2], "type": x[:2].view(torch.int32), "several": x[1:3]}
    part = parts.get(odd, x[:2])
    inputs = Inputs([part])
    assert inputs.number == 1
    inputs.fill([part])
    assert torch.equal(inputs.read()[0], part)


def test_micro_batches_are_copied_one_by_one():
    parts = whole(0, 4)
    inputs = Inputs(parts[:2])
    inputs.fill([*parts[2], *parts[3]])
    assert torch.equal(inputs.read()[1][0], parts[3][0])


def report(value):
    value = torch.tensor(float(value))
    return StepReport({"loss": value}, {"loss": 4}, value * 2, value * 3, value * 0, lr=0.1, optional={"loss"})


@pytest.mark.parametrize("steps", [1, ROWS, 2 * ROWS + 3])
def test_numbers_of_many_steps_stay_what_they_were(steps):
    layout = report(0)
    numbers, reports = Numbers(layout.pack()), []
    for step in range(steps):
        page, row = numbers.next()
        numbers.write(report(step).pack())
        reports.append(RecordedReport(layout, page, row, 0.1))
        if step == 1:
            kept = reports[1].sums["loss"]
    (all_of_them,) = joined(reports)
    assert all_of_them.sums["loss"].tolist() == list(range(steps))
    assert all_of_them.counts["loss"].tolist() == [4] * steps
    assert all_of_them.norm.tolist() == [2 * step for step in range(steps)]
    assert all_of_them.divisor.tolist() == [3 * step for step in range(steps)]
    assert all(float(one.norm) == 2 * step for step, one in enumerate(reports))
    assert reports[0].grad_norm.isnan()
    if steps > 1:
        assert float(kept) == 1


def test_reports_of_several_recordings_are_left_alone():
    first, second = report(1), report(2)
    page, row = Numbers(first.pack()).next()
    reports = [RecordedReport(first, page, row, 0.1), RecordedReport(second, page, row, 0.1)]
    assert joined(reports) == reports
    assert joined([first, reports[0]])[0] is first
