"""Other trainers on the same work, each written as its own documentation shows, all with the fused AdamW kernel."""

import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.work import BATCH_SIZE, CLIP_NORM, LOG_EVERY, Work


def quiet() -> None:
    """Keep warnings and start-up messages of peers out of the way."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def ignite(work: Work) -> None:
    from ignite.engine import Engine, Events

    model = work.model()
    optimizer, schedule = work.optimizer(model)

    def update(_engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.detach()

    trainer = Engine(update)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.run(work.torch_loader(), max_epochs=1)


def fabric(work: Work) -> None:
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    fabric = Fabric(accelerator="cpu", devices=1)
    model = work.model()
    optimizer, schedule = work.optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = work.torch_loader()
    if isinstance(loader, DataLoader):
        loader = fabric.setup_dataloaders(loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())


def accelerate(work: Work) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.model()
    optimizer, schedule = work.optimizer(model)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, work.torch_loader())
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())


class WithLoss(nn.Module):
    """A model that returns its own loss, as the Hugging Face Trainer expects."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Named(Dataset[dict[str, Tensor]]):
    """Samples as mappings."""

    def __init__(self, data: Tensor, labels: Tensor) -> None:
        self.data, self.labels = data, labels

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.data[index], "labels": self.labels[index]}


def hf_arguments(folder: Any, **settings: Any) -> Any:
    """Return TrainingArguments without anything that leaves this machine or prints."""
    from transformers import TrainingArguments

    common = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    return TrainingArguments(output_dir=str(folder), **(common | settings))


def huggingface(work: Work) -> None:
    from transformers import Trainer

    class ListTrainer(Trainer):
        """Takes the batches that everyone has, instead of collating samples."""

        def get_train_dataloader(self) -> Iterable[Mapping[str, Tensor]]:
            if work.batches is None:
                return super().get_train_dataloader()
            return [{"x": x, "labels": y} for x, y in work.batches]

    model = WithLoss(work.model())
    arguments = hf_arguments(
        work.folder,
        max_steps=work.num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    ListTrainer(
        model, arguments, train_dataset=Named(work.data, work.labels), optimizers=work.optimizer(model)
    ).train()


def lightning(work: Work, *, log: bool, bar: bool) -> None:
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            if log:
                self.log("loss", loss, prog_bar=bar)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer, schedule = work.optimizer(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(work.folder) if log else False,
        enable_progress_bar=bar,
        enable_model_summary=bar,
        enable_checkpointing=bar,
        default_root_dir=work.folder,
    )
    trainer.fit(Module(), work.torch_loader())


def lightning_bare(work: Work) -> None:
    lightning(work, log=False, bar=False)


def lightning_logging(work: Work) -> None:
    lightning(work, log=True, bar=False)


def lightning_default(work: Work) -> None:
    lightning(work, log=True, bar=True)


PEERS = {
    "ignite": (ignite, ("ignite",)),
    "Fabric": (fabric, ("lightning",)),
    "accelerate": (accelerate, ("accelerate",)),
    "HF Trainer": (huggingface, ("transformers", "accelerate")),
    "Lightning, bare": (lightning_bare, ("lightning",)),
    "Lightning, logging": (lightning_logging, ("lightning",)),
    "Lightning, default bar": (lightning_default, ("lightning",)),
}
"""Each trainer, and the modules it needs."""
