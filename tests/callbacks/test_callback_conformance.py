"""What every callback has to do: live with and without a run, break off anywhere, and resume exactly."""

import csv
import inspect
import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_life import Life, report, tokenizer_file

import etude.callbacks
from etude.callbacks import (
    CallbackList,
    LRSchedule,
    ProgressDisplay,
    RunRecorder,
    TextSamples,
    plateau as plateau_schedule,
)
from etude.callbacks.sinks.base import SinkCallback
from etude.config.registry import lookup, names
from etude.core import Clock
from etude.core.spans import watch
from etude.engine.callback import HOOKS, Callback, RunParts
from etude.losses import ClassificationLoss
from etude.monitor import RunFolder
from etude.multitask import CurriculumCallback, MultiTask, TaskGradientMonitor, TaskSpec
from etude.multitask.curriculum import Curriculum, Phase, Start
from forked_python import run_python
from sink_stand_ins import curves, install, provide

ARGUMENTS = {
    "filename": "log.csv",
    "filepath": "weights/best.safetensors",
    "monitor": "val_loss",
    "patience": 3,
    "every": 3,
    "every_steps": 3,
    "params": "bias",
    "port": 0,
    "histograms_every": 3,
    "points_per_s": None,
}
"""Arguments for registered callbacks, by name of the argument."""


def from_registry(name: str) -> Callable[[Life], Callback]:
    factory = lookup("callback", name).factory
    accepted = inspect.signature(factory).parameters
    return lambda life: factory(**{key: value for key, value in ARGUMENTS.items() if key in accepted})


def plateau(life: Life) -> LRSchedule:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(life.optimizer, factor=0.5, patience=0)
    return LRSchedule(scheduler, monitor="val_loss")


def milestones(life: Life) -> LRSchedule:
    return LRSchedule(torch.optim.lr_scheduler.MultiStepLR(life.optimizer, [3, 14, 15, 22, 33]), interval="step")


def curriculum(life: Life) -> CurriculumCallback:
    starts = (Start(epoch=1), Start(step=6), Start(metric="val_loss", below=1.2), Start(epoch=8))
    phases = [Phase(f"phase {place}", start, ["a", "b"][: place + 1]) for place, start in enumerate(starts)]
    callback = CurriculumCallback(Curriculum(phases))
    callback.bind(RunParts(None, MultiTask({name: TaskSpec(name, ClassificationLoss()) for name in "abcd"})))
    return callback


MAKERS: dict[str, Callable[[Life], Callback]] = {
    **{
        name: from_registry(name)
        for name in names("callback")
        if "etude." in lookup("callback", name).factory.__module__
    },
    "text_samples": lambda life: TextSamples(tokenizer=tokenizer_file()),
    "lr_schedule_epoch": plateau,
    "lr_schedule_step": milestones,
    "recorder": lambda life: RunRecorder(RunFolder(life.folder)),
    "progress": lambda life: ProgressDisplay(stream=io.StringIO()),
    "plateau": lambda life: plateau_schedule(patience=0, monitor="val_loss").callbacks[0],
    "curriculum": curriculum,
}

NEEDS = {"tensorboard": "tensorboard", "opentelemetry": "opentelemetry.sdk"}
"""Packages without which a sink is not tested; stand-ins take the place of the others."""
STATELESS = ("device_stats", "learning_rate_monitor", "nan_debugger", "profiler")
"""Callbacks that tell what they see, and remember nothing."""
SINKS = ("mlflow", "opentelemetry", "prometheus", "tensorboard", "trackio", "wandb")
for _name, _package in NEEDS.items():
    if find_spec(_package.partition(".")[0]) is None:
        del MAKERS[_name]

every_callback = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture(autouse=True)
def _nobody_watches():
    """A profile of a run that is broken off without its last hook ends with its test."""
    yield
    watch(None)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install(monkeypatch)
    if "opentelemetry" in MAKERS:
        provide(monkeypatch)


def to_json(state: dict[str, Any]) -> str:
    """Return a state as JSON; tensors, which files hold apart, as lists."""

    def listed(value: torch.Tensor) -> dict[str, Any]:
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}

    return json.dumps(state, allow_nan=False, default=listed)


def from_json(text: str) -> dict[str, Any]:
    def tensor(found: dict[str, Any]) -> Any:
        is_tensor = found.keys() == {"dtype", "values"}
        return torch.tensor(found["values"], dtype=getattr(torch, found["dtype"])) if is_tensor else found

    return json.loads(text, object_hook=tensor)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(to_json(state))


def timeless(value: Any) -> Any:
    """Return a copy without the parts that depend on the clock on the wall, or on the process."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("time", "seconds", "memory_bytes")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


NO_STATE = (".lock", "events.jsonl", "status.json")
"""Files that tell of times and resumes."""


def contents(folder: Path) -> dict[str, Any]:
    """Return what all files of a folder say."""
    found: dict[str, Any] = {}
    events = {path.parent for path in folder.rglob("*.tfevents.*")}
    found |= {str(path.relative_to(folder)): repr(curves(path)) for path in events}  # NaN does not equal NaN
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in NO_STATE):
        name = str(path.relative_to(folder))
        if ".tfevents." in name:
            continue  # several files are read as one
        if path.parent.name == "sinks":
            found[name] = json.loads(path.read_bytes())["written"]  # ids differ
        elif path.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".csv":
            found[name] = [timeless(row) for row in csv.DictReader(io.StringIO(path.read_text()))]
        else:
            found[name] = path.read_bytes()
    return found


def test_registered_callbacks_are_those_of_the_package():
    assert lookup("callback", "task_gradients").factory is TaskGradientMonitor
    assert {"early_stopping", "model_checkpoint", "csv_logger", "gradient_monitor", "task_gradients"} <= set(MAKERS)


@every_callback
def test_a_whole_life_and_its_state_through_json_and_back(make, tmp_path):
    life = Life(tmp_path)
    first = make(life)
    callbacks = life.whole(first)
    assert all(len(callbacks.hooks(name)) <= 1 for name in HOOKS)
    assert not list(tmp_path.rglob("*.tmp"))
    second, state = make(Life(tmp_path)), to_json(first.state_dict())
    second.load_state_dict(from_json(state))
    assert through_json(second.state_dict()) == json.loads(state)


@every_callback
def test_by_hand_without_a_run(make, tmp_path):
    life = Life(tmp_path)
    callbacks = CallbackList([make(life)])
    for epoch in range(4):
        callbacks.on_epoch_begin(epoch)
        life.optimizer.step()
        callbacks.on_step_end(report())
        callbacks.on_log({"loss": 0.5})
        callbacks.on_epoch_end(epoch, {"loss": 0.5 - epoch / 10, "val_loss": 0.6, "val_accuracy": 0.9})
    callbacks.on_train_end({})


@every_callback
def test_a_process_that_is_not_the_main_one_leaves_no_trace(make, tmp_path, capsys):
    life = Life(tmp_path, is_main=False)
    callback = make(life)
    if isinstance(callback, RunRecorder):
        return  # only the main process is given one
    life.whole(callback)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert capsys.readouterr() == ("", "")
    if isinstance(callback, ProgressDisplay):
        assert callback._given_stream.getvalue() == ""


class Broken(Callback):
    """Raises in one hook, at its nth call."""

    def __init__(self, hook: str, calls: int) -> None:
        super().__init__()
        self.hook, self.calls = hook, calls

    def _count(self, hook: str) -> None:
        self.calls -= hook == self.hook
        if self.calls == 0:
            raise ArithmeticError(hook)


for _name in HOOKS:
    setattr(Broken, _name, lambda self, *args, _name=_name: self._count(_name))


@every_callback
@pytest.mark.parametrize("calls", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_may_break_off_anywhere(make, calls, tmp_path):
    for hook in HOOKS:
        if hook not in ("on_exception", "on_train_end"):
            folder = tmp_path / hook
            folder.mkdir()
            break_off(make, hook, calls, folder)


def break_off(make, hook, calls, folder):
    life = Life(folder)
    callback = make(life)
    listed = CallbackList([Broken(hook, calls), callback])
    error: BaseException = KeyboardInterrupt()
    try:
        listed.on_train_begin(life.run_info())
        life.epoch(listed)
        life.epoch(listed)
        life.epoch(listed)
    except ArithmeticError as raised:
        error = raised
    callback.on_exception(error)
    callback.on_exception(error)  # once more changes nothing, and raises nothing
    to_json(callback.state_dict())


def test_the_state_of_a_life_is_not_that_of_its_beginning(tmp_path):
    """Guards the tests here: callbacks that remember something have a state to lose."""
    for name, make in MAKERS.items():
        life = Life(tmp_path)
        callback = make(life)
        before = through_json(callback.state_dict())
        life.whole(callback)
        assert (
            name in ("recorder", "text_samples", "freeze", *STATELESS, *SINKS)
            or through_json(callback.state_dict()) != before
        ), name


@every_callback
@pytest.mark.parametrize("saved_after", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 6))])
def test_resumed_is_the_same_as_never_stopped(make, saved_after, tmp_path):
    """The state of a checkpoint, an epoch of work that is lost, a new process: then everything as if nothing was."""
    straight = Life(tmp_path / "straight")
    RunFolder.create(straight.folder)
    reference = make(straight)
    stopped_at = straight.whole(reference)

    life = Life(tmp_path / "resumed")
    RunFolder.create(life.folder)
    callback = make(life)
    callbacks = CallbackList([callback])
    callbacks.on_train_begin(life.run_info())
    for _ in range(saved_after):
        life.epoch(callbacks)
    state, clock, lrs = from_json(to_json(callbacks.state_dict())), life.clock.state_dict(), list(life.lrs)
    assert not callbacks.control.stop
    life.epoch(callbacks)
    if isinstance(callback, SinkCallback) and callback._worker is not None:
        callback._worker.stop(60.0)  # a process that dies takes its thread with it

    again = Life(tmp_path / "resumed", clock=Clock(**clock), resumed=True)
    RunFolder(again.folder).trim(again.clock.step)
    second = make(again)
    resumed = CallbackList([second])
    resumed.load_state_dict(state)
    resumed.on_train_begin(again.run_info())
    while again.clock.epoch < again.total_epochs and not resumed.control.stop:
        again.epoch(resumed)
    resumed.on_train_end({})

    assert lrs + again.lrs == straight.lrs
    assert again.clock == straight.clock
    assert resumed.control == stopped_at.control
    assert _relative(second.state_dict(), again.folder) == _relative(reference.state_dict(), straight.folder)
    assert contents(again.folder) == contents(straight.folder)


def _relative(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    return json.loads(to_json(timeless(state)).replace(str(folder), "RUN"))


@every_callback
def test_a_new_run_with_the_same_callback_begins_anew(make, tmp_path):
    fresh = Life(tmp_path / "fresh")
    reference = make(fresh)
    if isinstance(reference, (LRSchedule, RunRecorder)):
        return  # these belong to one optimizer, or one folder
    end = fresh.whole(reference)
    callback = make(fresh)
    Life(tmp_path / "first").whole(callback)
    second = Life(tmp_path / "second")
    assert second.whole(callback).control == end.control
    assert second.clock == fresh.clock
    assert _relative(callback.state_dict(), second.folder) == _relative(reference.state_dict(), fresh.folder)
    assert contents(second.folder) == contents(fresh.folder)


def test_importing_the_callbacks_does_not_import_rich():
    code = (
        "import sys, etude.callbacks, etude.monitor; print(sorted({'rich', 'yaml', 'pydantic'} & set(sys.modules)))"
    )
    answer = run_python("-c", code)
    assert answer.stdout.strip() == "[]", answer.stderr
    assert etude.callbacks.__all__
