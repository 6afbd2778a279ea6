"""TaskGradientMonitor: norms, cosines and conflicts as numpy has them, read late, reported, resumed exactly."""

import json

import numpy as np
import pytest
import torch
from callback_life import Life, task_gradients
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from etude.callbacks import Callback, CallbackList
from etude.core import ConfigError
from etude.multitask import TaskGradientMonitor, TaskGradientReport
from etude.multitask.gradients import TaskGradients

NAMES = ("quality", "code", "security", "annotation")


def look(vectors: np.ndarray, step: int = 0, tasks: tuple[str, ...] = NAMES) -> TaskGradients:
    """Return what a step tells of gradients that are the rows of `vectors`."""
    products = (vectors @ vectors.T).astype(np.float32)
    return TaskGradients(tasks[: len(vectors)], torch.from_numpy(products), step)


class Reported(Callback):
    """Keeps the notices."""

    shows_notices = True

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[tuple[str, dict]] = []

    def on_notice(self, message, facts):
        self.notices.append((message, dict(facts)))


@given(arrays.arrays(np.float64, (6, 4, 5), elements=st.floats(-8, 8).map(lambda value: round(value, 2))))
def test_norms_cosines_and_conflicts_are_those_of_numpy(steps):
    monitor = TaskGradientMonitor(every_steps=1)
    for step, vectors in enumerate(steps):
        monitor.on_task_gradients(look(vectors, step))
    numbers = monitor.numbers()
    norms = np.linalg.norm(steps, axis=-1)
    conflicts, unclear, looks, expected = 0, 0, 0, set()
    for i, task in enumerate(NAMES):
        there = norms[:, i] > 0
        if there.any():
            expected.add(f"{task}/grad_norm")
            assert numbers[f"{task}/grad_norm"] == pytest.approx(norms[there, i].mean(), rel=1e-5)
        for j in range(i):
            both = there & (norms[:, j] > 0)
            if not both.any():
                continue
            cosines = (steps[both, i] * steps[both, j]).sum(-1) / (norms[both, i] * norms[both, j])
            name = "grad_cosine/" + "/".join(sorted((task, NAMES[j])))
            expected.add(name)
            assert numbers[name] == pytest.approx(cosines.mean(), abs=1e-5)
            assert abs(numbers[name]) <= 1
            conflicts += (cosines < -1e-6).sum()
            unclear += (abs(cosines) <= 1e-6).sum()  # zero but for rounding: may fall on either side
            looks += both.sum()
    assert set(numbers) - {"grad_conflicts"} == expected
    if looks:
        assert conflicts - 0.1 <= numbers["grad_conflicts"] * looks <= conflicts + unclear + 0.1


def test_only_steps_since_the_last_record_are_averaged():
    monitor = TaskGradientMonitor(every_steps=2)
    monitor.on_task_gradients(look(np.array([[3.0, 4.0], [1.0, 0.0]])))
    monitor.on_task_gradients(look(np.array([[6.0, 8.0], [-1.0, 0.0]])))
    assert monitor.numbers() == pytest.approx(
        {"quality/grad_norm": 7.5, "code/grad_norm": 1.0, "grad_cosine/code/quality": 0.0, "grad_conflicts": 0.5}
    )
    assert monitor.numbers() == {}
    monitor.on_task_gradients(look(np.array([[0.0, 2.0], [0.0, 1.0]])))
    assert monitor.numbers()["quality/grad_norm"] == pytest.approx(2.0)


def test_a_task_without_labels_or_with_numbers_that_are_not_finite_is_not_counted():
    monitor = TaskGradientMonitor(every_steps=1)
    monitor.on_task_gradients(look(np.array([[1.0, 0.0], [0.0, 0.0], [-2.0, 0.0]])))
    monitor.on_task_gradients(look(np.array([[1.0, 0.0], [np.inf, 0.0], [np.nan, 0.0]])))
    assert monitor.numbers() == pytest.approx(
        {
            "quality/grad_norm": 1.0,
            "security/grad_norm": 2.0,
            "grad_cosine/quality/security": -1.0,
            "grad_conflicts": 1,
        }
    )


def test_steps_may_have_different_tasks_in_any_order():
    monitor = TaskGradientMonitor(every_steps=1)
    monitor.on_task_gradients(look(np.eye(2), tasks=("a", "b")))
    monitor.on_task_gradients(look(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]]), tasks=("b", "a", "c")))
    monitor.on_task_gradients(look(np.array([[7.0]]), tasks=("c",)))
    numbers = monitor.numbers()
    assert numbers["c/grad_norm"] == 6.0
    assert numbers["grad_cosine/a/b"] == 0.5
    assert {name for name in numbers if "cosine" in name} == {f"grad_cosine/{p}" for p in ("a/b", "a/c", "b/c")}


def test_an_epoch_is_reported_in_one_sentence():
    monitor, reported = TaskGradientMonitor(every_steps=1), Reported()
    callbacks = CallbackList([monitor, reported])
    for sign in (1.0, -1.0, -1.0):
        monitor.on_task_gradients(look(np.array([[2.0, 0.0], [sign, 0.0], [0.0, 0.5]])))
        monitor.numbers()  # log points in between change nothing
    callbacks.on_epoch_end(4, {})
    ((message, facts),) = reported.notices
    assert message == (
        "epoch 5: gradient norms from 0.5000 (security) to 2.0000 (quality); "
        "in conflict: code/quality (cosine -0.33, in 2 of 3 steps)"
    )
    assert facts["event"] == "task_gradients"
    assert facts["conflicts"] == {"code/quality": pytest.approx(-1 / 3)}
    json.dumps(facts, allow_nan=False)
    assert monitor.report is not None
    assert monitor.report.cosines["code/quality"] == pytest.approx(-1 / 3)
    callbacks.on_epoch_end(5, {})
    assert len(reported.notices) == 1  # nothing was looked at


def test_many_conflicts_stay_short():
    report = TaskGradientReport()
    vectors = np.array([[np.cos(angle), np.sin(angle)] for angle in np.linspace(0, 2 * np.pi, 7, endpoint=False)])
    report.add(tuple("abcdefg"), (vectors @ vectors.T).tolist())
    worst = min(report.cosines.values())
    assert len(report.conflicts) == (np.triu(vectors @ vectors.T, 1) < 0).sum() == 14
    assert next(iter(report.conflicts.values())) == worst
    assert report.text().endswith(" and 11 more")
    aligned = TaskGradientReport()
    aligned.add(("a", "b"), [[1.0, 1.0], [1.0, 1.0]])
    assert aligned.text().endswith("no two tasks on average")


def test_other_processes_say_nothing(tmp_path):
    monitor, reported = TaskGradientMonitor(every_steps=1), Reported()
    Life(tmp_path, is_main=False, total_epochs=2).whole(monitor, reported)
    assert monitor.report is not None
    assert reported.notices == []


@pytest.mark.parametrize("every", [1, 3, 4])
def test_the_steps_looked_at_depend_on_the_step_alone(every):
    wanted = [step for step in range(12) if TaskGradientMonitor(every_steps=every).wants_task_gradients(step)]
    assert wanted == list(range(0, 12, every))


def test_a_resumed_run_reports_the_same_numbers(tmp_path):
    """A checkpoint between two log points, and inside an epoch: window and epoch go on where they were."""

    def steps(monitor, begin, end):
        for step in range(begin, end):
            if monitor.wants_task_gradients(step):
                monitor.on_task_gradients(task_gradients(step))

    straight, reported = TaskGradientMonitor(every_steps=2), Reported()
    callbacks = CallbackList([straight, reported])
    steps(straight, 0, 20)
    numbers = straight.numbers()
    callbacks.on_epoch_end(0, {})

    first, second, reported_again = TaskGradientMonitor(every_steps=2), TaskGradientMonitor(every_steps=2), Reported()
    steps(first, 0, 7)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    callbacks = CallbackList([second, reported_again])
    steps(second, 7, 20)
    assert second.numbers() == numbers
    callbacks.on_epoch_end(0, {})
    assert reported_again.notices == reported.notices
    assert second.state_dict() == straight.state_dict()


def test_nothing_is_read_before_a_log_point(monkeypatch):
    """Between log points the products are only kept; then all of them come in one transfer."""
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or original(self))
    for name in ("item", "cpu", "__float__", "__bool__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *args, name=name: pytest.fail(f"{name} was called"))
    monitor = TaskGradientMonitor(every_steps=1)
    for step in range(5):
        monitor.on_task_gradients(task_gradients(step))
    assert reads == []
    monitor.numbers()
    assert reads == [5 * 4]


def test_a_wrong_interval_is_explained():
    with pytest.raises(ConfigError, match="every_steps is 0"):
        TaskGradientMonitor(every_steps=0)
