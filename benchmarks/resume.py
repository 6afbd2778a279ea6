"""Stopped in the middle of an epoch, or killed while saving: how much of a resumed run is exact, here and elsewhere.

python -m benchmarks.resume [--quick] [--no-peers] [--json FILE]
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import peers
from benchmarks.table import (
    NOT_RUN,
    ROOT,
    Row,
    Table,
    failure,
    in_short,
    last_line,
    missing,
    progress,
    publish,
    read_options,
)
from etude import Callback, Trainer

SAMPLES, BATCH_SIZE, EPOCHS, SAVED_AT = 640, 32, 2, 5
STEPS_PER_EPOCH = SAMPLES // BATCH_SIZE
STEPS = EPOCHS * STEPS_PER_EPOCH
Record = list[tuple[bytes, bytes]]


class RecordedMLP(nn.Module):
    """A model with dropout that keeps the bytes of every batch it is given and of what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
        self.record: Record = []

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layers(x)
        self.record.append((x.numpy().tobytes(), logits.detach().numpy().tobytes()))
        return logits


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(0))
    return x, x[:, :10].argmax(1)


def torch_loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data()), batch_size=BATCH_SIZE, shuffle=True)


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def on_step_end(self, report: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.control.request_stop("benchmark")


def etude(folder: Path, resume: bool, stop: int | None = None) -> Record:
    model = RecordedMLP()
    config = {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "device": "cpu", "precision": "fp32"}
    callbacks = [] if stop is None else [StopAfter(stop)]
    trainer = Trainer(model, data(), config=config, callbacks=callbacks, output_dir=folder, progress=False)
    if resume:
        trainer.load_checkpoint(folder)
    trainer.train()
    return model.record


def lightning(folder: Path, resume: bool) -> Record:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = RecordedMLP()

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    L.seed_everything(0, verbose=False)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch_loader(), ckpt_path=folder / f"step={SAVED_AT}.ckpt" if resume else None)
    return module.model.record


def accelerate(folder: Path, resume: bool, *, seedable: bool = False) -> Record:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    inner = RecordedMLP()
    model, optimizer, loader = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()), torch_loader())
    done = 0
    if resume:
        accelerator.load_state(str(folder))
        done = SAVED_AT
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, done) if epoch == 0 and resume else loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            done += 1
            if done == SAVED_AT:
                accelerator.save_state(str(folder))
    return inner.record


def accelerate_seedable(folder: Path, resume: bool) -> Record:
    return accelerate(folder, resume, seedable=True)


def huggingface(folder: Path, resume: bool) -> Record:
    from transformers import Trainer as HFTrainer

    inner = RecordedMLP()
    arguments = peers.hf_arguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        save_steps=SAVED_AT,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = HFTrainer(peers.WithLoss(inner), arguments, train_dataset=peers.Named(*data()))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None)
    return inner.record


PEERS: dict[str, tuple[Callable[[Path, bool], Record], tuple[str, ...]]] = {
    "HF Trainer": (huggingface, ("transformers", "accelerate")),
    "Lightning, default": (lightning, ("lightning",)),
    "accelerate, default": (accelerate, ("accelerate",)),
    "accelerate, seedable sampler": (accelerate_seedable, ("accelerate",)),
}


def compare(name: str, straight: Record, resumed: Record, saved_at: int = SAVED_AT) -> dict[str, Any]:
    """Return a row: how many batches and steps after the checkpoint are those of the run that was never stopped."""
    expected = straight[saved_at:]
    pairs = list(zip(expected, resumed, strict=False))
    first = STEPS_PER_EPOCH - saved_at
    exact = [wanted == got for wanted, got in pairs]
    return {
        "trainer": name,
        "batches right": sum(wanted[0] == got[0] for wanted, got in pairs),
        "exact in epoch 1": sum(exact[: max(first, 0)]),
        "exact in epoch 2": sum(exact[max(first, 0) :]),
        "exact steps": sum(exact),
        "of": len(expected),
        "run": len(resumed),
    }


def etude_rows(stops: Sequence[int]) -> list[Row]:
    """Return the row that compares with others, and the sum over a stop after each of the steps in `stops`."""
    with tempfile.TemporaryDirectory() as folder:
        straight = etude(Path(folder) / "straight", False)
        rows = []
        for stop in stops:
            progress(f"Etude, stopped after step {stop}")
            one = Path(folder) / str(stop)
            etude(one, False, stop)
            torch.rand(stop)  # another process would find the generators elsewhere
            rows.append(compare("Etude", straight, etude(one, True), stop))
    total: dict[str, Any] = {"trainer": f"Etude, {len(stops)} runs, each stopped at another step"}
    total |= {key: sum(row[key] for row in rows) for key in rows[0] if key != "trainer"}
    return [next(row for stop, row in zip(stops, rows, strict=True) if stop == SAVED_AT), total]


def peer_row(name: str, run: Callable[[Path, bool], Record], needs: Sequence[str]) -> Row:
    rows: list[Row] = []

    def both() -> None:
        progress(name)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            rows.append(compare(name, run(Path(folder), False), run(Path(folder), True)))

    why = missing(needs) or failure(both)
    return {"trainer": name, NOT_RUN: why} if why else rows[0]


def kill_row(name: str, kills: int, needs: Sequence[str] = ()) -> Row:
    """Return what became of `kills` runs that were killed while they saved, and then resumed."""
    if why := missing(needs):
        return {"trainer": name, NOT_RUN: why}
    progress(f"{name}, killed while saving")
    command = [sys.executable, "-m", "benchmarks.kills", name, str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        if not needs:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return {"trainer": name, NOT_RUN: f"failed: {in_short(last_line(done.stderr))}"}
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        "trainer": name,
        "killed": len(results),
        "while saving": sum(result["saving"] for result in results),
        "resume failed": sum(result["outcome"] == "failed" for result in results),
        "other weights": sum(result["outcome"] == "different" for result in results),
        "exact": sum(result["outcome"] == "exact" for result in results),
        "first error": next((result["error"] for result in results if result["error"]), None),
    }


STOPPED = Table(
    f"Saved after batch {SAVED_AT} of {STEPS_PER_EPOCH} and resumed, {EPOCHS} epochs, dropout on: what equals the run "
    f"never stopped.",
    {
        "trainer": "",
        "batches right": "d",
        "exact in epoch 1": "d",
        "exact in epoch 2": "d",
        "exact steps": "d",
        "of": "d",
        "run": "d",
    },
    "exact: input and output of the model are the same bytes as in that step of a run of the same script that was not "
    "stopped.\nrun: steps that the resumed run took. Seeds are set at the start of every script, as its documentation "
    "shows.",
)
KILLED = Table(
    "Killed (SIGKILL) at a random moment while saving after every step, then resumed in the documented way.",
    {
        "trainer": "",
        "killed": "d",
        "while saving": "d",
        "resume failed": "d",
        "other weights": "d",
        "exact": "d",
        "first error": "",
    },
    "exact: the final weights are the same bytes as those of a run never killed. while saving: the newest checkpoint "
    "was unfinished.",
)


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("How exact a run is after it was stopped or killed and resumed.", argv)
    torch.set_num_threads(1)
    peers.quiet()
    STOPPED.rows.extend(etude_rows((1, SAVED_AT, STEPS_PER_EPOCH) if options.quick else range(1, STEPS)))
    kills = 2 if options.quick else 20
    KILLED.rows.append(kill_row("Etude", kills))
    if options.peers:
        STOPPED.rows.extend(peer_row(name, run, needs) for name, (run, needs) in PEERS.items())
        KILLED.rows.append(kill_row("HF Trainer", kills, ("transformers", "accelerate")))
    progress("")
    publish("resume", [STOPPED, KILLED], options)


if __name__ == "__main__":
    main()
