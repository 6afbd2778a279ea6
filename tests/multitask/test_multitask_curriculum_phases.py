"""Phases: when they begin, which tasks they train, and the weights of their tasks."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from etude.core.clock import Clock
from etude.core.errors import CheckpointError, ConfigError
from etude.multitask.curriculum import (
    ALL,
    DEFAULT_PHASES,
    DEFAULT_TASKS,
    Begun,
    Curriculum,
    Phase,
    PhaseStart,
    Ramp,
    Start,
    active_tasks,
    current_phase,
    loss_weights,
)

TASKS = ("code", "tests", "style", "notes")
EMPTY = ()


# The default curriculum


def test_default_phases_have_the_epochs_of_the_table() -> None:
    expected = ["code"] * 10 + ["simple_ontology"] * 20 + ["full_ontology"] * 20 + ["all_tasks"] * 10
    assert [current_phase(epoch).name for epoch in range(1, 61)] == expected


def test_default_tasks_come_in_one_phase_after_the_other() -> None:
    assert active_tasks(1) == ("code_generation",)
    assert active_tasks(11) == ("code_generation", "ontology_annotation")
    assert active_tasks(31) == ("code_generation", "ontology_annotation", "test_generation")
    assert active_tasks(51) == DEFAULT_TASKS
    assert [active_tasks(phase) for phase in DEFAULT_PHASES] == [active_tasks(epoch) for epoch in (1, 11, 31, 51)]
    assert [phase.variants.get("ontology_annotation") for phase in DEFAULT_PHASES] == [None, "simple", "full", "full"]
    assert current_phase(10).variants == {"code_generation": "masked"}


def test_weights_of_some_tasks_and_of_others() -> None:
    """A task that is not named has the weight 1; one of the user's own comes in with all tasks."""
    for epoch in (1, 12, 33, 51, 60):
        plain = loss_weights(epoch)
        assert loss_weights(epoch, {"quality": 0.5}) == plain | (
            {"quality": 0.5 * plain["quality"]} if epoch > 50 else {}
        )
        assert set(loss_weights(epoch, {"documentation": 2.0})) - set(plain) == (
            {"documentation"} if epoch > 50 else set()
        )


@pytest.mark.parametrize("name", ["code_genration", "qualty", "Security", "ontology_anotation"])
def test_a_misspelt_weight_is_found(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*did you mean"):
        loss_weights(1, {name: 0.5})


def test_default_weights_ramp_for_new_tasks_and_stay_for_established_ones() -> None:
    ramp = [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0]
    for first, new in ((11, DEFAULT_TASKS[1:2]), (31, DEFAULT_TASKS[2:3]), (51, DEFAULT_TASKS[3:])):
        for passed, factor in enumerate(ramp):
            found = loss_weights(first + passed)
            for task, weight in found.items():
                assert weight == pytest.approx(factor if task in new else 1.0), (first, passed, task)
    assert [loss_weights(epoch) for epoch in range(1, 11)] == [{"code_generation": 1.0}] * 10


def test_static_weights_multiply() -> None:
    weights = {task: 0.25 * (place + 1) for place, task in enumerate(DEFAULT_TASKS)}
    for epoch in (1, 11, 12.5, 31, 53, 70):
        plain = loss_weights(epoch)
        assert loss_weights(epoch, weights) == {task: weights[task] * factor for task, factor in plain.items()}


# Properties of any curriculum by epoch


@st.composite
def curricula(draw: st.DrawFn) -> Curriculum:
    starts = sorted(draw(st.sets(st.integers(2, 40), max_size=5)))
    subsets = st.sets(st.sampled_from(TASKS), min_size=1).map(sorted) | st.just(ALL)
    ramps = st.builds(Ramp, start=st.just(0.1), epochs=st.floats(0, 10))
    phases = [Phase(f"from {start}", start, draw(subsets), ramp=draw(ramps)) for start in [1, *starts]]
    weights = {task: draw(st.floats(0.01, 3.0)) for task in TASKS}
    return Curriculum(phases, weights)


@given(curricula(), st.floats(1, 60))
def test_weights_lie_between_the_ramp_and_the_static_weight(curriculum: Curriculum, epoch: float) -> None:
    found = curriculum.loss_weights(epoch)
    assert tuple(found) == curriculum.active_tasks(epoch)
    for task, weight in found.items():
        static = curriculum.weights[task]
        assert 0.1 * static * (1 - 1e-12) <= weight <= static


@given(curricula(), st.lists(st.floats(1, 60), min_size=2, max_size=20))
def test_weights_never_fall_while_a_task_is_trained(curriculum: Curriculum, epochs: list[float]) -> None:
    for early, late in pairwise(sorted(epochs)):
        between = [p for p in curriculum.phases if early < (p.begins.epoch or 0) <= late]
        before, after = curriculum.loss_weights(early), curriculum.loss_weights(late)
        for task in set(before) & set(after):
            if all(task in curriculum.active_tasks(phase) for phase in between):
                assert after[task] >= before[task]


@given(curricula(), st.lists(st.floats(1, 60), max_size=12), st.floats(1, 60))
def test_the_weights_do_not_depend_on_how_one_came_there(
    curriculum: Curriculum, visited: list[float], epoch: float
) -> None:
    """Advanced at any moments on the way, saved and read back: the same weights as asked once, without a state."""
    state = EMPTY
    for moment in sorted(moment for moment in visited if moment <= epoch):
        state = curriculum.advance(state, moment)
        state = tuple(PhaseStart(*entry) for entry in json.loads(json.dumps(state)))
    state = curriculum.advance(state, epoch)
    assert curriculum.loss_weights(epoch, state=state) == curriculum.loss_weights(epoch)
    assert curriculum.current_phase(epoch, state=state) == curriculum.current_phase(epoch)


@given(curricula(), st.floats(1, 60))
def test_the_phase_is_the_last_one_that_has_begun(curriculum: Curriculum, epoch: float) -> None:
    begun = [phase for phase in curriculum.phases if (phase.begins.epoch or 0) <= epoch]
    assert curriculum.current_phase(epoch) == begun[-1]


def test_a_task_that_comes_back_ramps_again() -> None:
    phases = [Phase("a", 1, ["code", "tests"]), Phase("b", 3, ["code"]), Phase("c", 5, ["code", "tests"])]
    curriculum = Curriculum(phases)
    assert curriculum.loss_weights(2) == {"code": 1.0, "tests": 1.0}
    assert curriculum.loss_weights(4) == {"code": 1.0}
    assert curriculum.loss_weights(5) == {"code": 1.0, "tests": 0.1}


def test_a_task_keeps_the_ramp_with_which_it_came_in() -> None:
    phases = [
        Phase("a", 1, ["code"]),
        Phase("b", 2, ["code", "tests"], ramp=Ramp(start=0.2, epochs=8)),
        Phase("c", 4, ALL, ramp=Ramp(start=0.5, epochs=1)),
    ]
    found = Curriculum(phases, TASKS).loss_weights(4.5)
    assert found["tests"] == pytest.approx(0.2 + 0.8 * 2.5 / 8)
    assert found["style"] == pytest.approx(0.75)


def test_epoch_of_the_clock_is_one_less() -> None:
    clock = Clock(epoch=10)  # ten epochs are done: the eleventh is under way
    assert current_phase(clock.epoch + 1).name == "simple_ontology"


# Steps and metrics


@given(st.integers(0, 400), st.lists(st.integers(0, 400), max_size=8))
def test_phases_and_ramps_by_step(step: int, visited: list[int]) -> None:
    ramp = Ramp(epochs=5, steps=50)
    curriculum = Curriculum([Phase("a", Start(step=0), ["code"]), Phase("b", Start(step=100), ALL, ramp=ramp)], TASKS)
    state = EMPTY
    for moment in sorted(each for each in visited if each <= step):
        state = curriculum.advance(state, 1, moment)
    state = curriculum.advance(state, 1, step)
    expected = {"code": 1.0}
    if step >= 100:
        expected |= dict.fromkeys(TASKS[1:], pytest.approx(min(1.0, 0.1 + 0.9 * (step - 100) / 50)))
    assert curriculum.loss_weights(1, step) == expected
    assert curriculum.loss_weights(1, step, state) == expected


def by_metric() -> Curriculum:
    return Curriculum(
        [
            Phase("a", 1, ["code"]),
            Phase("b", Start(metric="val_loss", below=2.0), ["code", "tests"]),
            Phase("c", Start(metric="accuracy", above=0.5), ["code", "tests", "style"]),
            Phase("d", 20, ALL),
        ],
        TASKS,
    )


def test_a_phase_begins_when_its_metric_reaches_the_value_and_stays() -> None:
    curriculum = by_metric()
    state = curriculum.advance(EMPTY, 1, 0)
    for epoch, metrics in ((2, {}), (3, {"val_loss": math.nan}), (4, {"val_loss": 2.1, "accuracy": 0.9})):
        assert curriculum.advance(state, epoch, epoch * 10, metrics) is state
    after = curriculum.advance(state, 5, 50, {"val_loss": 2.0})
    assert after == (PhaseStart("a", 1.0, 0), PhaseStart("b", 5.0, 50))
    assert curriculum.advance(after, 6, 60, {"val_loss": 9.0}) is after
    assert curriculum.current_phase(6, 60, after).name == "b"
    assert curriculum.loss_weights(7, 70, after) == {"code": 1.0, "tests": pytest.approx(0.1 + 0.9 * 2 / 5)}
    assert curriculum.current_phase(7, 70, curriculum.advance(after, 7, 70, {"accuracy": 0.6})).name == "c"


def test_a_fixed_start_passes_over_metrics_that_were_never_reached() -> None:
    curriculum = by_metric()
    state = curriculum.advance(curriculum.advance(EMPTY, 1), 20, 200, {"val_loss": 3.0})
    assert [entry.phase for entry in state] == ["a", "d"]
    # Nothing goes back to a phase that was passed over.
    assert curriculum.advance(state, 21, 210, {"val_loss": 0.1, "accuracy": 1.0}) is state
    assert curriculum.loss_weights(20, 200, state) == {"code": 1.0, "tests": 0.1, "style": 0.1, "notes": 0.1}


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 1)), min_size=1, max_size=25), st.data())
def test_resuming_a_curriculum_by_metric_anywhere_changes_nothing(
    history: list[tuple[float, float]], data: st.DataObject
) -> None:
    curriculum, stop = by_metric(), data.draw(st.integers(0, len(history)))

    def follow(state: Begun, epochs: range) -> tuple[Begun, list[dict[str, float]]]:
        weights = []
        for epoch in epochs:
            loss, accuracy = history[epoch - 1]
            state = curriculum.advance(state, epoch, epoch * 7, {"val_loss": loss, "accuracy": accuracy})
            weights.append(curriculum.loss_weights(epoch, epoch * 7, state))
        return state, weights

    end, whole = follow(EMPTY, range(1, len(history) + 1))
    state, head = follow(EMPTY, range(1, stop + 1))
    saved = json.loads(json.dumps(state))
    again, tail = follow(tuple(PhaseStart(*entry) for entry in saved), range(stop + 1, len(history) + 1))
    assert (again, head + tail) == (end, whole)
    for early, late in pairwise(whole):
        assert all(late[task] >= weight for task, weight in early.items())


def test_phases_carry_data_and_learning_rate() -> None:
    phase = Phase("long", 1, ALL, mixture={"code": 0.7, "text": 0.3}, sequence_length=2048, lr_scale=0.5)
    found = Curriculum([phase], TASKS).current_phase(3)
    assert (found.mixture, found.sequence_length, found.lr_scale) == ({"code": 0.7, "text": 0.3}, 2048, 0.5)


# Mistakes


def phases(*starts: Start | int) -> Sequence[Phase]:
    return [Phase(f"p{number}", start, ["code"]) for number, start in enumerate(starts)]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Curriculum([]), "no phases"),
        (lambda: Phase("a", 1, []), "phase 'a' has no name or no tasks"),
        (lambda: Phase("a", 1, "code"), "use a list of names, or 'all'"),
        (lambda: Phase("", 1, ["code"]), "no name"),
        (lambda: Curriculum([Phase("a", 1, ["test"])], TASKS), "names the task 'test', .* did you mean 'tests'"),
        (lambda: Curriculum([Phase("a", 1, ALL, variants={"x": "y"})], TASKS), "names the task 'x', which is not"),
        (lambda: Curriculum([Phase("a", 1, ALL)]), "no tasks are defined"),
        (lambda: Curriculum(phases(1, 5, 5)), "'p2' begins at epoch 5, not after 'p1'"),
        (lambda: Curriculum(phases(1, 9, 5)), r"'p2' begins at epoch 5, not after 'p1' \(epoch 9"),
        (lambda: Curriculum(phases(1, Start(step=9), Start(step=5))), "step 5, not after 'p1'"),
        (lambda: Curriculum(phases(1, 5, Start(metric="x", below=1.0), 4)), "epoch 4, not after 'p1'"),
        (lambda: Curriculum(phases(2, 5)), "'p0' begins at epoch 2"),
        (lambda: Curriculum(phases(Start(metric="x", above=1.0))), "begins at x >= 1.0"),
        (lambda: Curriculum([Phase("a", 1, ALL), Phase("a", 2, ALL)], TASKS), "two phases are named 'a'"),
        (lambda: Curriculum(phases(1), {"code": -0.5}), "the weight of task 'code' is -0.5"),
        (lambda: Curriculum(phases(1), {"code": math.nan}), "the weight of task 'code' is nan"),
        (lambda: Curriculum(phases(1), {"code": math.inf}), "the weight of task 'code' is inf"),
        (lambda: Phase("a", 1, ALL, mixture={"x": -1.0}), "mixture weight of 'x' is -1.0"),
        (lambda: Phase("a", 1, ALL, mixture={"x": 0.0}), "no source of the mixture"),
        (lambda: Phase("a", 1, ALL, sequence_length=0), "sequence_length is 0"),
        (lambda: Phase("a", 1, ALL, lr_scale=math.nan), "lr_scale is nan"),
        (lambda: Phase("a", 0, ALL), "the first epoch is 1"),
        (lambda: Start(step=-1), "the first step is 0"),
        (lambda: Start(), "exactly one start: .*none"),
        (lambda: Start(epoch=1, step=2), "found epoch and step"),
        (lambda: Start(metric="x"), "below or above"),
        (lambda: Start(metric="x", below=1.0, above=2.0), "below or above"),
        (lambda: Start(metric="x", below=math.nan), "finite"),
        (lambda: Start(epoch=1, below=1.0), "below or above"),
        (lambda: Ramp(start=1.5), "start=1.5"),
        (lambda: Ramp(start=math.nan), "start=nan"),
        (lambda: Ramp(epochs=-1), "epochs=-1"),
        (lambda: Ramp(steps=-1), "steps=-1"),
        (lambda: current_phase(0), "epochs are counted from 1"),
        (lambda: current_phase(math.nan), "epochs are counted from 1"),
        (lambda: by_metric().current_phase(3), "phase 'b' begins at val_loss <= 2.0 .* Curriculum.advance"),
        (lambda: Curriculum(phases(1, Start(step=5))).loss_weights(1, 6), "phase 'p1' .*same unit for ramp"),
        (
            lambda: Curriculum([*phases(1), Phase("x", 2, ALL, ramp=Ramp(steps=5))], TASKS).loss_weights(3),
            "phase 'x' .*same unit for ramp",
        ),
    ],
)
def test_mistakes_are_explained(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        build()
    assert "\n" not in str(raised.value)


def test_a_saved_phase_that_is_gone_is_reported() -> None:
    state = (PhaseStart("gone", 1.0, 0),)
    with pytest.raises(CheckpointError, match=r"phase 'gone', which is not defined .*p0"):
        Curriculum(phases(1)).current_phase(2, state=state)
