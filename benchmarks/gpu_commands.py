"""Whole commands for the GPU benchmark: `etude train` in a process of its own, up to its end."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_race import Contestant, Numbers, Section
from benchmarks.gpu_training import device_words
from benchmarks.table import ROOT, last_line
from etude.core import DataError
from etude.data.catalog.mnist import fetch_mnist

LENET = "lenet5/lecun1998"
LIMIT_S = 300.0
"""A command that takes longer is stopped."""
TINY = {
    "code_multitask/gpu": ("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "data.epoch_samples=40"),
    "tiny_lm/gpu": ("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "data.length=16"),
}
"""What makes an experiment tiny."""
PREPARED = (
    "A run of one step comes before, so that data are prepared and in the page cache and Python's bytecode is there: "
    "in a temporary folder (PYTHONPYCACHEPREFIX), as the interpreter's own may be read-only."
)
SECONDS = "s: from the start of the process to its end; finished in: the training, as the command reports it."


@contextmanager
def kept_bytecode() -> Iterator[None]:
    """Let all processes that are started here share one folder of bytecode, unless there is one for them already."""
    if "PYTHONPYCACHEPREFIX" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]


def train_prepared(experiment: str) -> Numbers:
    """Train by the command line, after a run of one step that has made everything ready."""
    train(experiment, "training.max_steps=1")
    return train(experiment)


def train(experiment: str, *overrides: str) -> Numbers:
    """Train by the command line; return what process and run folder say, raise RuntimeError with the last line."""
    if experiment == LENET:
        try:
            fetch_mnist(download=False)
        except DataError as error:
            raise RuntimeError("the MNIST files are not here") from error
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "etude", "train", experiment, "training.capture=auto", *overrides]
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, "--run-dir", str(run)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")
            raise RuntimeError(f"not finished after {LIMIT_S:g} s: {last_line(said)}") from error
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(last_line(done.stderr or done.stdout))
        return {"s": seconds, **facts(read(run / "metrics.jsonl"), read(run / "events.jsonl"))}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def facts(records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return what the files of a finished run say."""
    start, end = (next(event for event in events if event["kind"] == kind) for kind in ("start", "end"))
    found: Numbers = {"finished in": end["time"] - start["time"], "steps": end["step"]}
    if (rate := last_half(records)) is not None:
        found["steps/s"] = rate
    said = [event["message"] for event in events if event["kind"] == "execution" and "CUDA graph" in event["message"]]
    if said:
        found["graphs"] = "no" if any("not captured" in message for message in said) else "yes"
    last = next((record for record in reversed(records) if record["split"] == "val"), {})
    return found | {name: last[name] for name in ("val_loss", "val_accuracy", "val_perplexity") if name in last}


def last_half(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the steps per second of training, without validation and saving, in the last half of the steps."""
    train = [record for record in records if record["split"] == "train"]
    steps, seconds = 0, 0.0
    for earlier, later in pairwise(train):
        if 2 * earlier["step"] >= train[-1]["step"] and later["samples_per_s"]:
            steps += later["step"] - earlier["step"]
            seconds += (later["samples"] - earlier["samples"]) / later["samples_per_s"]
    return steps / seconds if seconds else None


def run_sections(*, quick: bool) -> list[Section]:
    """Return the table of the whole command."""
    title = f"The whole command on {device_words()}"
    how = f"{SECONDS} 15 epochs with validation and checkpoints. {PREPARED}"
    columns = {"command": "", "s": ".1f", "finished in": ".1f"}
    contestants = {f"etude train {LENET}": Contestant(partial(train_prepared, LENET))}
    return [Section(title, columns, how, contestants, ("s", "×"), lambda _: (), starts_processes=True)]


def configs_sections(*, quick: bool) -> list[Section]:
    """Return the table of all experiments that are made for a GPU."""
    found = sorted(path.parts[-3] for path in ROOT.glob("experiments/*/configs/gpu.yaml"))
    names = [LENET, *(f"{name}/gpu" for name in found)]
    title = f"Experiments to their end, on {device_words()}"
    how = (
        f"`etude train …`, one after the other. {SECONDS} steps/s: in the last half of the training, without "
        f"validation and saving. graphs: whether events.jsonl says that steps were captured; a dash where it says "
        f"nothing of it. {PREPARED}"
    )
    columns = {
        "experiment": "",
        "s": ".1f",
        "finished in": ".1f",
        "steps": ",d",
        "steps/s": ",.1f",
        "graphs": "",
        "val_loss": ".4f",
        "val_accuracy": ".4f",
        "val_perplexity": ",.2f",
    }
    few = ("training.max_steps=4", "training.log_interval=1", "training.batch_size=4")
    runs = {
        name: partial(train, name, *few, *TINY.get(name, ())) if quick else partial(train_prepared, name)
        for name in names
    }
    contestants = {name: Contestant(run, cuda=False) for name, run in runs.items()}
    return [Section(title, columns, how, contestants, ("s", "×"), lambda _: (), starts_processes=True)]
