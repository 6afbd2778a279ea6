"""A curriculum in a run: what is active in every step, and the ways to give it to a `Trainer`."""

import json

import pytest
import torch
from curriculum_runs import ACCUMULATION, STEPS, Diary, Model, loader, phases, run, tasks, trainer

from etude import Trainer
from etude.engine.callback import RunParts
from etude.engine.callback_list import CallbackList
from etude.multitask import CurriculumCallback
from etude.multitask.curriculum import Curriculum, Phase, Ramp, Start
from etude.optim import AdamW
from etude.trainer.changed_loaders import DeviceLoader


def test_every_step_has_the_phase_the_weights_the_data_and_the_rate_of_its_moment():
    diary = Diary()
    run(None, diary).train()
    assert diary.phases == [(0, "one", 1), (5, "two", 2), (8, "three", 3), (10, "four", 4)]
    for step, found in diary.steps.items():
        epoch = step // STEPS + 1
        last = 0.5 * min(1.0, 0.1 + 0.9 * (epoch - 2) / 2)  # came in with epoch 2, over two epochs
        mean = 2.0 * min(1.0, (step - 8) / 4)  # came in with step 8, from 0 over four steps
        first = min(1.0, 0.5 + 0.5 * (step - 10) / 3)  # was away in phase three, and came back with step 10
        number, expected, shares, length, lr = (
            (1, {"first": 1.0}, {"a": 1.0}, 4, 0.01)
            if step < 5
            else (2, {"first": 1.0, "last": last}, {"a": 0.25, "b": 0.75}, None, 0.01)
            if step < 8
            else (3, {"last": last, "mean": mean}, {"a": 0.5, "b": 0.5}, 3, 0.005)
            if step < 10
            else (4, {"first": first, "last": last, "mean": mean}, {"a": 0.5, "b": 0.5}, None, 0.01)
        )
        assert found["phase"] == number, step
        assert found["weights"] == pytest.approx(expected), step
        assert dict(found["mixture"].shares) == shares, step
        assert found["mixture"].sequence_length == length, step
        assert found["lr"] == pytest.approx(lr), step
        assert (found["epoch"], found["position"]) == (epoch - 1, 4 * (step % STEPS + 1))


def test_batches_are_those_of_the_phase_and_resting_heads_do_not_run():
    seen, calls = [], {}

    class Watched(Model):
        def forward(self, batch, heads):
            if self.training:
                seen.append((batch["stream"], tuple(heads), batch["input_ids"].shape[1]))
            return super().forward(batch, heads)

    built = run(None, Diary())
    built.model.__class__ = Watched
    for name, head in built.model.heads.items():
        head.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls.get(name, 0) + 1))
    built.train()
    assert seen[:5] == [("a", ("first",), 4)] * 5
    assert all(
        (stream, heads) in {("a", ("first",)), ("b", ("mean",))} for stream, heads, _ in seen[5:8]
    )  # a variant
    assert all(
        (stream, heads, length) in {("b", ("last",), 3), ("a", ("mean",), 3)} for stream, heads, length in seen[8:10]
    )
    assert all(heads == (("first", "mean") if stream == "a" else ("last",)) for stream, heads, _ in seen[10:])
    assert set(calls) == {"first", "last", "mean"}


@pytest.mark.parametrize(
    ("curriculum", "listens"),
    [
        ([Phase("a", 1, ["first"]), Phase("b", 2, "all")], False),
        ([Phase("a", 1, ["first"], Ramp(steps=5)), Phase("b", 2, "all")], False),  # the first phase has no ramp
        ([Phase("a", 1, ["first"]), Phase("b", 2, "all", Ramp(steps=5))], True),
        ([Phase("a", 1, ["first"]), Phase("b", Start(step=3), "all")], True),
        ([Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1.0), "all")], True),
    ],
)
def test_steps_cost_nothing_unless_something_can_change_between_them(curriculum, listens):
    listed = CallbackList([CurriculumCallback(curriculum)])
    assert bool(listed.hooks("on_step_begin")) == listens
    assert not listed.hooks("on_step_end")


@pytest.mark.parametrize("given", ["phases", "curriculum"])
def test_curriculum_of_a_trainer_is_short_for_the_callback(given):
    """Task, streams and learning rate are those of the run."""
    short, long = Diary(), Diary()
    run(None, short).train()
    made = phases(ACCUMULATION[1]["step"])
    made = made if given == "phases" else Curriculum(made, {name: one.weight for name, one in tasks().tasks.items()})
    long.loader, long.task = loader(), tasks()
    Trainer(
        Model(), long.loader, loader(training=False, shuffle=False, weights=None, epoch_samples=None), task=long.task,
        callbacks=[CurriculumCallback(made), long], optimizer=lambda params: AdamW(params, lr=0.01), progress=False,
        config={"epochs": ACCUMULATION[1]["epochs"], "log_interval": 3, "device": "cpu", "validate_every_steps": 4},
    ).train()  # fmt: skip
    assert long.steps == short.steps
    assert long.phases == short.phases


def test_phases_alone_take_the_weights_of_the_tasks_and_a_curriculum_brings_its_own():
    diary = Diary()
    trainer(None, diary, curriculum=[Phase("a", 1, "all")], epochs=1).train()
    assert diary.steps[0]["weights"] == {"first": 1.0, "last": 0.5, "mean": 2.0}
    trainer(None, diary, curriculum=Curriculum([Phase("a", 1, ["last"])], {"last": 7.0}), epochs=1).train()
    assert diary.steps[0]["weights"] == {"last": 7.0}


def test_batches_that_can_be_read_only_once_are_read_on_through_phases():
    batches = (batch for epoch in range(3) for batch in loader(weights={"a": 1, "b": 0}).iterate(epoch))
    diary = Diary()
    source = tasks()
    curriculum = [Phase("a", 1, ["first"]), Phase("b", Start(step=4), "all", Ramp(steps=3))]
    built = Trainer(
        Model(), batches, task=source, curriculum=curriculum, config={"epochs": 1, "device": "cpu"}, progress=False,
        callbacks=[diary],
    )  # fmt: skip
    diary.task, diary.loader = source, loader()
    built.train()
    assert diary.phases == [(0, "a", 1), (4, "b", 2)]
    assert len(diary.steps) == 15


def test_a_loader_whose_batches_are_moved_to_a_device_still_chooses():
    inner = loader()
    trainer(
        None, curriculum=[Phase("a", 1, ["last"])], data=DeviceLoader(inner, torch.device("cpu")), epochs=1
    ).train()
    assert dict(inner.mixture.shares) == {"b": 1.0}


def test_state_is_plain_data_and_goes_back():
    curriculum = Curriculum(phases(), ["first", "last", "mean"])
    callback, other = CurriculumCallback(curriculum), CurriculumCallback(curriculum)
    listed = CallbackList([callback])
    for one in (callback, other):
        one.bind(RunParts(None, tasks(), loader()))
    for epoch in range(3):
        listed.on_epoch_begin(epoch)
        listed.on_step_begin(0)
    state = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
    other.load_state_dict(state)
    assert other.state == callback.state != ()
    assert other.task.weights == callback.task.weights
    assert other.state_dict() == callback.state_dict()
