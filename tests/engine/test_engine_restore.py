"""Restoring is everything or nothing: any checkpoint loads, or one line says why not and nothing has changed."""

import contextlib
import copy
import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from etude import Callback, CheckpointManager, CSVLogger, EarlyStopping, GradientMonitor, ModelCheckpoint, Trainer
from etude.callbacks import LRSchedule
from etude.checkpoint import read_checkpoint
from etude.core import CheckpointError, EtudeError
from etude.optim import AdamW

FILES = ("model.safetensors", "state.safetensors", "state.json", "meta.json")
Run = tuple[Trainer, Path]


class Note(Callback):
    """A callback of the user's, with tensors in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(2)

    def on_step_end(self, report: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


def make(folder: Path | None, **config: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    schedule = LRSchedule(torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5]))
    callbacks: list[Callback] = [Note(), EarlyStopping(), GradientMonitor(every=2), schedule]
    if folder is not None:
        callbacks += [CSVLogger("log.csv"), ModelCheckpoint("weights/")]
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    data = (x, (x[:, 0] > 0).long())
    config = {
        "epochs": 2,
        "batch_size": 8,
        "log_interval": 2,
        "device": "cpu",
        "max_steps": 4,
        "compile": "off",
        **config,
    }
    return Trainer(
        model, data, data, config=config, optimizer=optimizer, callbacks=callbacks, output_dir=folder, progress=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("restore")
    first = make(folder / "run", precision="fp16")
    first.train()
    # One that has trained differently: what stays of it, or does not, is seen.
    other = make(None, precision="fp16", max_steps=2)
    other.train()
    return other, folder / "run" / "checkpoints" / "step-00000004"


def fingerprint(value: Any) -> Any:
    """Everything in a tree, to the last bit."""
    if isinstance(value, dict):
        return {key: fingerprint(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes()
    return value.hex() if isinstance(value, float) else value


def bits(trainer: Trainer) -> Any:
    """Return all but callbacks and decisions, which are loaded first: they may refuse what they are given."""
    model, rest = trainer.state.capture()
    rest = {name: part for name, part in rest.items() if name not in ("callbacks", "loss", "compile")}
    random_numbers = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state())
    return fingerprint([model, rest, *random_numbers, trainer.output.is_resumed])


def rewrite(folder: Path, change: Callable[[Path], None]) -> None:
    """Change files of a checkpoint and make its checksums right again."""
    change(folder)
    files = {}
    for name in FILES:
        data = (folder / name).read_bytes()
        files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content: dict[str, Any] = {"format": 1, "files": files}
    if (folder / "run-config.yaml").exists():
        data = (folder / "run-config.yaml").read_bytes()
        files["run-config.yaml"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")


def assert_all_or_nothing(run: Run, change: Callable[[Path], None], tmp: Path, *, part: str | None = None) -> None:
    trainer, good = run
    folder = tmp / "step-00000004"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    rewrite(folder, change)
    before = bits(trainer)
    problem = None
    try:
        trainer.load_checkpoint(folder)
    except CheckpointError as error:
        problem = str(error)
    if problem is not None:
        assert "\n" not in problem
        assert str(folder) in problem
        assert part is None or part in problem
        assert bits(trainer) == before
        return
    assert part is None, "this cannot be loaded"
    with contextlib.suppress(EtudeError):  # a rate of 1e308 is a number
        trainer.train()
    trainer.load_checkpoint(good)
    trainer.train()
    trainer.load_checkpoint(good)


# ------------------------------------------------------------------------------------------------ any change at all

HOSTILE = st.one_of(
    st.sampled_from([None, True, -5, 0, 2**63, 10**400, -1e308, 1e308, "", "x", "nan", [], {}, [[]], {"dict": {}}]),
    st.sampled_from(
        [{"tensor": "nowhere"}, {"tensor": []}, {"float": "00"}, {"float": "7ff8" + "0" * 12}, {"int": 5}]
    ),
    st.sampled_from([{"items": [[{"tuple": [1]}, 2]]}, {"tuple": 3}, {"dict": []}, {"complex": "clock"}, {"new": 1}]),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def mutated(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    if not path:
        return value
    tree = copy.copy(tree)
    key, *rest = path
    if rest:
        tree[key] = mutated(tree[key], tuple(rest), how, value)
    elif how == "delete":
        del tree[key]
    elif how == "rename" and isinstance(tree, dict):
        tree[str(value)[:9]] = tree.pop(key)
    else:
        tree[key] = value
    return tree


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_change_of_the_json_loads_or_changes_nothing(
    run: Run, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    def change(folder: Path) -> None:
        name = data.draw(st.sampled_from(["state.json", "state.json", "state.json", "meta.json"]))
        tree = json.loads((folder / name).read_text())
        top = data.draw(st.sampled_from(sorted(tree["state"]["dict"]))) if name == "state.json" else None
        start = ("state", "dict", top) if top else ()
        inner = tree["state"]["dict"][top] if top else tree
        for _ in range(data.draw(st.integers(1, 2))):
            path = (*start, *data.draw(st.sampled_from(places(inner))))
            how = data.draw(st.sampled_from(["replace", "replace", "delete", "rename"]))
            try:
                tree = mutated(tree, path, how, data.draw(HOSTILE))
            except (KeyError, IndexError, TypeError, AttributeError):  # the first change took the place away
                break
        (folder / name).write_text(json.dumps(tree))

    assert_all_or_nothing(run, change, tmp_path_factory.getbasetemp())


DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float32]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_change_of_the_tensors_loads_or_changes_nothing(
    run: Run, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    def change(folder: Path) -> None:
        file = folder / data.draw(st.sampled_from(["model.safetensors", "state.safetensors", "state.safetensors"]))
        tensors = load_file(file)
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor, kind = tensors[name].clone(), data.draw(st.sampled_from(["dtype", "shape", "drop", "bytes", "nan"]))
        if kind == "dtype":
            tensors[name] = tensor.to(data.draw(st.sampled_from(DTYPES)))
        elif kind == "shape":
            shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
            tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
        elif kind == "drop":
            del tensors[name]
        elif kind == "bytes" and tensor.dtype == torch.uint8 and tensor.numel():
            place = data.draw(st.integers(0, tensor.numel() - 1))
            tensor.view(-1)[place] = data.draw(st.integers(0, 255))
            tensors[name] = tensor
        elif kind == "nan" and tensor.is_floating_point() and tensor.numel():
            tensor.view(-1)[0] = data.draw(st.sampled_from([math.nan, math.inf, -5.0]))
            tensors[name] = tensor
        save_file(tensors, file)

    assert_all_or_nothing(run, change, tmp_path_factory.getbasetemp())


# ------------------------------------------------------------------------------------------------ named changes


def in_state(*path: Any, to: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(mutated(tree, ("state", "dict", *path), "replace", to)))

    return change


def in_tensors(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tensors = load_file(folder / "state.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "state.safetensors")

    return act


def as_text(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return act


def with_header(folder: Path, header: bytes) -> None:
    (folder / "state.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


ABSURD = json.dumps({"x": {"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}).encode()
EXP_AVG = "optimizer.state.3.weight.exp_avg"
SEED = '"seed":0'
STATES = ("optimizer", "dict", "state", "dict")
SCHEDULER = ("callbacks", "dict", "LRSchedule.0", "dict", "scheduler", "dict", "dict", "dict")
SETTINGS = ("optimizer", "dict", "groups", 0, "dict", "settings", "dict")

REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "exp_avg is longer": (in_tensors(EXP_AVG, lambda t: torch.zeros(100, 100)), "3.weight.exp_avg"),
    "exp_avg is shorter": (in_tensors(EXP_AVG, lambda t: t[:1]), "3.weight.exp_avg"),
    "exp_avg has another type": (in_tensors(EXP_AVG, torch.Tensor.double), "3.weight.exp_avg"),
    "exp_avg is an integer": (in_state(*STATES, "3.weight", "dict", "exp_avg", to=3), "exp_avg"),
    "a state is incomplete": (in_state(*STATES, "3.weight", to={"dict": {"step": 1}}), "3.weight"),
    "steps of the optimizer below 0": (in_tensors("optimizer.state.0.bias.step", lambda t: t - 9), "0.bias.step"),
    "a state for nobody": (in_state(*STATES, "ghost", to={"dict": {}}), "ghost"),
    "a state by number": (in_state("optimizer", "dict", "shared", to={"items": [[0, 1]]}), "optimizer.state"),
    "a rate that is text": (in_state(*SETTINGS, "lr", to="fast"), "settings.lr"),
    "a rate that is nan": (in_state(*SETTINGS, "lr", to={"float": "7ff8000000000000"}), "settings.lr"),
    "three betas": (in_state(*SETTINGS, "betas", to={"tuple": [0.9, 0.9, 0.9]}), "betas"),
    "amsgrad without its state": (in_state(*SETTINGS, "amsgrad", to=True), "max_exp_avg_sq"),
    "a step of -5": (in_state("clock", "dict", "step", to=-5), "clock.step"),
    "a step beyond 64 bits": (in_state("clock", "dict", "step", to={"int": hex(2**80)}), "clock.step"),
    "an epoch of 1.5": (in_state("clock", "dict", "epoch", to=1.5), "clock.epoch"),
    "no clock": (in_state("clock", to=None), "clock"),
    "a loss scale of 0": (in_tensors("precision.scale", torch.zeros_like), "precision"),
    "a ledger of text": (in_state("ledger", "dict", "window", "dict", "steps", to="many"), "ledger.window.steps"),
    "counts of nothing": (in_state("ledger", "dict", "epoch", "dict", "counts", to={"dict": {"x": 1}}), "ledger.epoch"),
    "patience of text": (in_state("callbacks", "dict", "EarlyStopping.0", "dict", "wait", to="x"), "EarlyStopping.0"),
    "a schedule of text": (in_state(*SCHEDULER, "last_epoch", to="x"), "scheduler.last_epoch"),
    "random numbers of nothing": (in_tensors("rng.0", lambda t: t[:50]), "rng"),
    "random numbers cut short": (in_tensors("rng.0", lambda t: t[:-100]), "rng"),
    "a loss of no kind": (in_state("loss", to={"dict": {"kind": "x"}}), "loss"),
    "a loss of many kinds": (in_state("loss", to={"dict": {"kind": ["mse"]}}), "loss"),
    "a shift of text": (in_state("loss", to={"dict": {"kind": "language_modeling", "shift": "x"}}), "loss"),
    "compiled in no way": (in_state("compile", "dict", "way", to="x"), "compile.way"),
    "compiled shapes of text": (in_state("compile", "dict", "shapes", to="x"), "compile.shapes"),
    "metrics of text": (as_text("meta.json", lambda t: t.replace('"metrics": {', '"metrics": {"a": "x",')), "metrics"),
    "deeply nested": (as_text("state.json", lambda t: t.replace(SEED, SEED[:-1] + "[" * 400 + "]" * 400)), "deep"),
    "nested for ever": (as_text("state.json", lambda t: "[" * 10**5 + "]" * 10**5), "state.json"),
    "a header of no size": (lambda folder: with_header(folder, b""), "state.safetensors"),
    "absurd shapes": (lambda folder: with_header(folder, ABSURD), "state"),
    "a header larger than the file": (
        lambda folder: (folder / "state.safetensors").write_bytes((2**60).to_bytes(8, "little")),
        "state.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line_with_its_part(run: Run, tmp_path: Path, name: str) -> None:
    change, part = REFUSED[name]
    assert_all_or_nothing(run, change, tmp_path, part=part)


def test_a_checkpoint_of_modules_is_not_one_of_a_run(run: Run, tmp_path: Path) -> None:
    trainer, good = run
    path = CheckpointManager(tmp_path).save_modules(7, model=trainer.model, optimizer=trainer.optimizer)
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=r"step-00000007: state.clock"):
        trainer.load_checkpoint(path)
    assert bits(trainer) == before
    with pytest.raises(CheckpointError, match=r"step-00000004: state.extra"):
        CheckpointManager(good.parent).load_into(trainer.model, trainer.optimizer)
    assert bits(trainer) == before


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("no"), KeyboardInterrupt(), RecursionError()])
def test_a_callback_that_refuses_leaves_model_and_optimizer_as_they_were(run: Run, error: BaseException) -> None:
    class Refuses(Note):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            if state["seen"][0] == 4:
                raise error

    trainer, good = run
    first = next(iter(trainer.callbacks))
    assert isinstance(first, Note)
    before, first.__class__ = bits(trainer), Refuses
    Refuses.__name__ = "Note"
    try:
        with pytest.raises(CheckpointError if isinstance(error, Exception) else type(error)):
            trainer.load_checkpoint(good)
        assert bits(trainer) == before
    finally:
        first.__class__ = Note


def test_the_untouched_checkpoint_loads(run: Run) -> None:
    _, good = run
    trainer = make(None, precision="fp16", max_steps=2)  # into the shared one, files with odd settings were loaded
    trainer.load_checkpoint(good)
    model, rest = trainer.state.capture()
    saved = read_checkpoint(good)
    assert fingerprint(dict(model)) == fingerprint(saved.model_state)
    for part in ("clock", "optimizer", "precision", "ledger", "rng"):
        assert fingerprint(rest[part]) == fingerprint(saved.state[part])
    assert issubclass(CheckpointError, EtudeError)


def test_a_checkpoint_of_an_earlier_version_loads(run: Run, tmp_path: Path) -> None:
    trainer, good = run
    folder = shutil.copytree(good, tmp_path / "step-00000004")

    def with_flops(folder: Path) -> None:
        tree = json.loads((folder / "state.json").read_text())
        tree["state"]["dict"]["ledger"]["dict"]["window"]["dict"]["forward_flops"] = 0.0
        (folder / "state.json").write_text(json.dumps(tree))

    rewrite(folder, with_flops)
    trainer.load_checkpoint(folder)


def test_a_callback_that_refuses_its_state_leaves_the_rate_as_it_was(run: Run, tmp_path: Path) -> None:
    other = make(None, precision="fp16", max_steps=2)
    other.train()

    def change(folder: Path) -> None:
        tree = json.loads((folder / "state.json").read_text())
        # LRSchedule, which sets a rate, is restored before it
        tree["state"]["dict"]["callbacks"]["dict"]["BestMetric.0"]["dict"]["best"] = ""
        (folder / "state.json").write_text(json.dumps(tree))

    assert_all_or_nothing((other, run[1]), change, tmp_path, part="BestMetric")
