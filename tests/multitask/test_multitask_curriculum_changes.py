"""What a run asks of a curriculum: when something changes next, what may still begin, and phases read from files."""

import pydantic
import pytest
from hypothesis import given, strategies as st

from etude.core.errors import ConfigError
from etude.multitask.curriculum import Curriculum, Phase, Ramp, Start

TASKS = ("a", "b", "c")


@st.composite
def curricula(draw):
    epochs, steps, phases = 1, 0, [Phase("0", 1, ["a"])]
    for number in range(1, draw(st.integers(1, 4)) + 1):
        kind = draw(st.sampled_from(["epoch", "step", "metric"]))
        epochs, steps = epochs + draw(st.integers(1, 3)), steps + draw(st.integers(1, 12))
        start = {"epoch": Start(epoch=epochs), "step": Start(step=steps), "metric": Start(metric="m", below=0.5)}[
            kind
        ]
        ramp = draw(
            st.builds(
                Ramp, start=st.sampled_from([0.0, 0.5]), epochs=st.integers(0, 3), steps=st.none() | st.integers(0, 6)
            )
        )
        names = draw(st.lists(st.sampled_from(TASKS), min_size=1, unique=True))
        phases.append(Phase(str(number), start, names, ramp))
    return Curriculum(phases, TASKS)


@given(curricula(), st.integers(2, 6), st.lists(st.booleans(), min_size=40, max_size=40))
def test_asking_only_when_something_may_change_is_the_same_as_asking_before_every_step(curriculum, per_epoch, low):
    """Phases and weights of a run of 40 steps, with a validation after each step, asked for always and when due."""
    always = due = ()
    next_step, metrics, weights = 0, {}, {}
    for step in range(40):
        epoch = step // per_epoch + 1
        always = curriculum.advance(always, epoch, step, metrics)
        if step % per_epoch == 0 or step >= next_step or metrics.get("m", 1.0) < 0.5:
            due = curriculum.advance(due, epoch, step, metrics)
            weights = curriculum.loss_weights(epoch, step, due)
            change = curriculum.next_change(step, due)
            next_step = 10**9 if change is None else change
            assert next_step > step
        assert due == always
        assert weights == curriculum.loss_weights(epoch, step, always)
        metrics = {"m": 0.0 if low[step] else 1.0}


@given(curricula(), st.integers(1, 12), st.integers(0, 60))
def test_what_is_upcoming_and_what_has_begun_part_the_phases(curriculum, epoch, step):
    state = curriculum.advance((), epoch, step, {"m": 0.0})
    place = curriculum.phases.index(curriculum.current_phase(epoch, step, state))
    assert curriculum.upcoming(state) == curriculum.phases[place + 1 :]


READ = pydantic.TypeAdapter(list[Phase])


def test_phases_are_read_from_plain_data():
    data = [
        {"name": "a", "start": 1, "tasks": ["x"]},
        {
            "name": "b",
            "start": {"metric": "val_loss", "below": 2.5},
            "tasks": "all",
            "ramp": {"start": 0.2, "steps": 100},
        },
        {
            "name": "c",
            "start": {"step": 7},
            "tasks": ["x"],
            "mixture": {"s": 1},
            "sequence_length": 8,
            "lr_scale": 0.5,
        },
    ]
    assert READ.validate_python(data) == [
        Phase("a", Start(epoch=1), ("x",)),
        Phase("b", Start(metric="val_loss", below=2.5), "all", Ramp(0.2, steps=100)),
        Phase("c", Start(step=7), ("x",), mixture={"s": 1.0}, sequence_length=8, lr_scale=0.5),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mix": {"s": 1}}, "0.mix\n.*Unexpected keyword"),
        ({"start": {"epok": 3}}, "0.start.Start.epok\n.*Unexpected keyword"),
        ({"ramp": {"stops": 3}}, "0.ramp.stops\n.*Unexpected keyword"),
        ({"start": {"epoch": 0}}, "a phase begins at epoch 0, but the first epoch is 1"),
        ({"ramp": {"start": float("nan")}}, "start=nan"),
        ({"lr_scale": -1}, "lr_scale is -1.0; it must be finite and at least 0"),
        ({"mixture": {"s": float("nan")}}, "the mixture weight of 's' is nan"),
        ({"tasks": []}, "phase 'a' has no name or no tasks"),
    ],
)
def test_wrong_keys_and_values_in_a_file_are_refused(change, words):
    with pytest.raises(pydantic.ValidationError, match=words):
        READ.validate_python([{"name": "a", "start": 1, "tasks": ["x"]} | change])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_task_weights_that_cannot_be_are_refused(weight):
    with pytest.raises(ConfigError, match="the weight of task 'x' is"):
        Curriculum([Phase("a", 1, ["x"])], {"x": weight})
