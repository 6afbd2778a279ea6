"""Whole trainings for the GPU benchmark: the same model and steps by hand, in other trainers and in Etude."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_race import DEVICE, Numbers, Stopwatch
from benchmarks.peers import Named, hf_arguments, quiet
from benchmarks.work import CLIP_NORM, LEARNING_RATE, LOG_EVERY
from etude.engine.callback import Callback
from etude.engine.compiled import CompiledTask
from etude.losses import ClassificationLoss, LanguageModelingLoss
from etude.trainer import Trainer
from etude.trainer.machine import configure_cuda_performance

AUTOCAST = DEVICE.type == "cuda"


@dataclass(frozen=True)
class Training:
    """The work of a section."""

    name: str
    batch: int
    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], tuple[Tensor, Tensor]]
    """Of so many samples, on the host."""
    is_text: bool
    unit: str
    per_step: int
    """Units of a step."""
    warmup: int
    stretch: int
    rounds: int

    def watch(self) -> Stopwatch:
        """Return what times a training, which begins now."""
        return Stopwatch(self.warmup, self.stretch, self.rounds)

    def model(self) -> nn.Module:
        """Return the model on the device; kernels are chosen as Etude chooses them."""
        torch.manual_seed(0)
        if DEVICE.type == "cuda":
            configure_cuda_performance()
        return self.make_model().to(DEVICE)

    def data(self, *, on_device: bool = True) -> tuple[Tensor, Tensor]:
        """Return samples for all steps."""
        x, y = self.make_data(self.batch * self.watch().num_steps)
        return (x.to(DEVICE), y.to(DEVICE)) if on_device else (x, y)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of classes, or of tokens."""
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def optimizer(self, model: nn.Module, *, capturable: bool = False) -> torch.optim.Optimizer:
        """Return torch's fused AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=capturable)


class Shuffled:
    """Batches gathered on the device, in random order: the cheapest loader one can write."""

    def __init__(self, work: Training) -> None:
        self.work = work
        self.x, self.y = work.data()

    def __len__(self) -> int:
        return len(self.x) // self.work.batch

    def indices(self) -> Iterator[Tensor]:
        """Yield what the batches consist of."""
        yield from torch.randperm(len(self.x), device=DEVICE).split(self.work.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices():
            yield self.x[index], self.y[index]


# ------------------------------------------------------------------------------------------------ by hand


def by_hand(work: Training, *, compiled: bool = False, graph: bool = False) -> Numbers:
    """Train as one would who writes everything for this model."""
    batches = Shuffled(work)
    watch = work.watch()
    model = work.model()
    optimizer = work.optimizer(model, capturable=graph)
    params = list(model.parameters())

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return work.loss(model(x), y)

    function = torch.compile(forward, dynamic=False) if compiled else forward

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with autocast():
            loss = function(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()

    replay: Callable[[Tensor], object] | None = None
    for index in batches.indices():
        if not graph:
            step(batches.x[index], batches.y[index])
        else:
            replay = replay or recorded(step, batches, index)
            replay(index)
        watch()
    return watch.numbers(work.unit, work.per_step)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=AUTOCAST)


def recorded(
    step: Callable[[Tensor, Tensor], object], batches: Shuffled, index: Tensor
) -> Callable[[Tensor], object]:
    """Record the whole step as a CUDA graph, as torch's documentation shows; return what gathers and replays."""
    x, y = batches.x[index], batches.y[index]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, y)

    def replay(index: Tensor) -> None:
        torch.index_select(batches.x, 0, index, out=x)
        torch.index_select(batches.y, 0, index, out=y)
        graph.replay()

    return replay


# ------------------------------------------------------------------------------------------------ Etude


class Watching(Callback):
    """Calls the stopwatch after every step."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.watch = watch

    def on_step_end(self, _report: Any) -> None:
        self.watch()


def etude(
    work: Training,
    *,
    compile: str = "off",
    capture: str = "off",
    fused_head: bool = False,
    on_device: bool = False,
) -> Numbers:
    """Train by `Trainer`; what it was asked for and could not do is an error."""
    data = work.data(on_device=on_device)
    watch = work.watch()
    loss = LanguageModelingLoss(shift=False, fused_head=fused_head) if work.is_text else ClassificationLoss()
    trainer = Trainer(
        work.model(),
        data,
        config={
            "max_steps": watch.num_steps,
            "batch_size": work.batch,
            "learning_rate": LEARNING_RATE,
            "gradient_clip_norm": CLIP_NORM,
            "log_interval": LOG_EVERY,
            "precision": "bf16" if AUTOCAST else "fp32",
            "compile": compile,
            "capture": capture,
        },
        loss=loss,
        callbacks=[Watching(watch)],
        device=DEVICE,
        progress=False,
    )
    trainer.train()
    step = trainer.step
    if isinstance(step.forward, CompiledTask) and step.forward.refused:
        raise RuntimeError(f"not compiled: {step.forward.refused}")
    graphs = "no" if step.capture is None or step.capture.refused else "yes"
    return {**watch.numbers(work.unit, work.per_step), "graphs": graphs}


# ------------------------------------------------------------------------------------------------ other trainers


def lightning(work: Training, *, compiled: bool = False) -> Numbers:
    """Train by Lightning with as little around the step as it can have."""
    import lightning as L

    quiet()
    batches = Shuffled(work)
    watch = work.watch()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            model = work.model()
            self.model = torch.compile(model, dynamic=False) if compiled else model

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            x, y = batch
            return work.loss(self.model(x), y)

        def on_train_batch_end(self, *_: Any) -> None:
            watch()

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)  # some versions refuse it for fused optimizers

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self)

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if AUTOCAST else "32-true",
            max_epochs=1,
            log_every_n_steps=LOG_EVERY,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), batches)
    return watch.numbers(work.unit, work.per_step)


class LossOnly(nn.Module):
    """A model that returns its own loss, as the Hugging Face Trainer expects, and keeps no logits for it."""

    def __init__(self, work: Training) -> None:
        super().__init__()
        self.work, self.inner = work, work.model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.work.loss(self.inner(x), labels)}


def huggingface(work: Training) -> Numbers:
    """Train by the Hugging Face Trainer with torch_compile."""
    from transformers import Trainer as TheirTrainer, TrainerCallback

    quiet()
    batches = Shuffled(work)
    listed = [{"x": x, "labels": y} for x, y in batches]
    watch = work.watch()

    class ListTrainer(TheirTrainer):
        def get_train_dataloader(self) -> Any:
            return listed

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch()

    model = LossOnly(work)
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf_arguments(
            folder,
            use_cpu=DEVICE.type != "cuda",
            bf16=AUTOCAST,
            torch_compile=True,
            max_steps=watch.num_steps,
            per_device_train_batch_size=work.batch,
            max_grad_norm=CLIP_NORM,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        samples = Named(batches.x, batches.y)
        constant = torch.optim.lr_scheduler.LambdaLR
        optimizer = work.optimizer(model)
        ListTrainer(
            model,
            arguments,
            train_dataset=samples,
            optimizers=(optimizer, constant(optimizer, lambda _: 1.0)),
            callbacks=[Watch()],
        ).train()
    return watch.numbers(work.unit, work.per_step)
