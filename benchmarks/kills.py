"""Kills a training run again and again while it saves, resumes it, and looks at the weights it ends with.

    python -m benchmarks.kills "Etude"|"HF Trainer" KILLS

A program of its own, so that forking is safe: it imports one trainer and starts no threads. Prints one JSON line
per kill: whether a checkpoint was being written, and what became of the resumed run.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import peers
from etude import Trainer

STEPS, BATCH_SIZE = 12, 16
WAIT_S = 60.0


class Kind(NamedTuple):
    """A trainer: how it trains (from the start, or resumed), and how one sees what it is saving."""

    train: Callable[[Path, bool], nn.Module]
    checkpoints: str
    """Pattern of the names of checkpoints, finished or not."""
    is_unfinished: Callable[[Path], bool]
    module: str
    """Where the trainer lives."""


def make_model() -> nn.Module:
    """Return a model that is quick to train and takes a while to write."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, 512), nn.Linear(512, 10))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(STEPS * BATCH_SIZE // 2, 32, generator=torch.Generator().manual_seed(0))
    return x, x[:, :10].argmax(1)


def etude(folder: Path, resume: bool) -> nn.Module:
    model = make_model()
    config = {"max_steps": STEPS, "batch_size": BATCH_SIZE, "save_every_steps": 1, "device": "cpu"}
    trainer = Trainer(model, data(), config=config, output_dir=folder, progress=False)
    if resume:
        trainer.load_checkpoint(folder)
    trainer.train()
    return model


def huggingface(folder: Path, resume: bool) -> nn.Module:
    from transformers import Trainer as HFTrainer

    model = make_model()
    arguments = peers.hf_arguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        save_steps=1,
        save_total_limit=3,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=0,
    )
    HFTrainer(peers.WithLoss(model), arguments, train_dataset=peers.Named(*data())).train(
        resume_from_checkpoint=resume or None
    )
    return model


KINDS = {
    "Etude": Kind(
        etude,
        "checkpoints/step-*",
        lambda folder: any(path.name.startswith(".") for path in (folder / "checkpoints").iterdir()),
        "etude.trainer",
    ),
    "HF Trainer": Kind(
        huggingface,
        "checkpoint-*",
        lambda folder: not all((path / "trainer_state.json").exists() for path in folder.glob("checkpoint-*")),
        "transformers.trainer",
    ),
}


def import_all(kind: Kind) -> None:
    """Import what a run needs, once for all children. Torch has to take a step for that, but without a backward pass:
    after one, children could not take theirs.
    """
    import_module(kind.module)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def start(kind: Kind, folder: Path, resume: bool) -> tuple[int, int]:
    """Train in a child process; return its number and a pipe that will carry its final weights, or what went wrong."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            model = kind.train(folder, resume)
            flat = torch.cat([param.detach().flatten() for param in model.parameters()])
            answer = {"weights": hashlib.sha256(flat.numpy().tobytes()).hexdigest()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".replace(str(folder), "…").splitlines()[0]}
        os.write(writer, json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)


def finish(child: int, reader: int) -> dict[str, str]:
    """Wait for a child and return what it wrote."""
    with open(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {}


def wait_for_checkpoints(kind: Kind, folder: Path, count: int) -> None:
    """Wait until so many checkpoints have been begun: all but the last are finished then."""
    deadline = time.monotonic() + WAIT_S
    while len(list(folder.glob(kind.checkpoints))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} checkpoints in {folder} after {WAIT_S:.0f} s")
        time.sleep(0.001)


def kill_and_resume(kind: Kind, folder: Path, span: float, weights: str, rng: random.Random) -> dict[str, object]:
    """Kill a run at a random moment of `span` seconds after its second checkpoint, resume it, compare the weights."""
    child, reader = start(kind, folder, False)
    wait_for_checkpoints(kind, folder, 2)
    time.sleep(rng.uniform(0.0, span))
    os.kill(child, signal.SIGKILL)
    finish(child, reader)
    unfinished = kind.is_unfinished(folder)
    answer = finish(*start(kind, folder, True))
    if "weights" in answer:
        outcome = "exact" if answer["weights"] == weights else "different"
    else:
        outcome = "failed"
    return {"saving": unfinished, "outcome": outcome, "error": answer.get("error")}


def main() -> None:
    name, kills = sys.argv[1], int(sys.argv[2])
    kind, rng = KINDS[name], random.Random(0)
    torch.set_num_threads(1)
    peers.quiet()
    import_all(kind)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "straight"
        child, reader = start(kind, folder, False)
        wait_for_checkpoints(kind, folder, 2)
        begin = time.monotonic()
        weights = finish(child, reader)["weights"]
        span = 0.9 * (time.monotonic() - begin)
        for number in range(kills):
            result = kill_and_resume(kind, Path(root) / str(number), span, weights, rng)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
