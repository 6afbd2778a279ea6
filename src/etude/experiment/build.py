"""From a validated config to a `Trainer`: data, model, loss, optimizer, schedule and callbacks, in that order."""

from dataclasses import dataclass
from typing import Any

import torch

from etude.config import Selection, build_selection
from etude.core import ConfigError
from etude.core.random import set_seed
from etude.data import DataLoader, DataSplits
from etude.distributed import World
from etude.experiment.config import ExperimentConfig
from etude.monitor import RunFolder
from etude.optim import AdamW
from etude.trainer import Trainer, TrainerConfig, planned_steps, resolve_device


@dataclass(frozen=True, slots=True)
class Data:
    """The data of an experiment and how its batches are made."""

    splits: DataSplits
    config: TrainerConfig
    device: torch.device
    world: World

    def loader(self, split: Any) -> DataLoader | None:
        """Return a loader over a split, or None if the data has no such split."""
        if getattr(self.splits, split, None) is None:
            return None
        config = self.config
        return self.splits.make_loader(
            split,
            config.batch_size,
            drop_last=split == "train" and config.drop_last,
            seed=config.seed,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.device,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
        )


def build_data(config: ExperimentConfig, world: World) -> Data:
    """Build the `data` section; one process of a machine fetches it, the others wait and read what it cached."""
    selection = config.require("data")
    if world.local_rank != 0:
        world.barrier()
    splits = _build(config, "data", selection)
    if world.local_rank == 0:
        world.barrier()
    if not isinstance(splits, DataSplits):
        raise ConfigError(f"data '{selection.component.name}' must return DataSplits, got {type(splits).__name__}")
    return Data(splits, config.training, resolve_device(config.training.device, world.local_rank), world)


def build_trainer(
    config: ExperimentConfig,
    *,
    folder: RunFolder | None = None,
    world: World | None = None,
    progress: bool = True,
) -> Trainer:
    """Build everything and return the trainer; the seed is set first, so that the weights are always the same."""
    training = config.training
    if training.meaningful_loss is not None and training.meaningful_loss.enabled:
        raise ConfigError(
            "training.meaningful_loss needs a vocabulary and codebooks, which a config file cannot give yet; "
            "set training.meaningful_loss.enabled=false"
        )
    world = world if world is not None else World()
    set_seed(training.seed)
    model = _build(config, "model", config.require("model"))
    data = build_data(config, world)
    train_loader = data.loader("train")
    assert train_loader is not None
    supplied = {
        "total_steps": planned_steps(training, len(train_loader)),
        "steps_per_epoch": planned_steps(
            training.model_copy(update={"epochs": 1, "max_steps": None}), len(train_loader)
        ),
    }
    loss, optimizer, scheduler = (config.selection(one) for one in ("loss", "optimizer", "scheduler"))
    callbacks = config.sections.get("callbacks") or []
    return Trainer(
        model,
        train_loader,
        data.loader("validation"),
        config=training,
        optimizer=AdamW
        if optimizer is None
        else lambda params: _build(config, "optimizer", optimizer, params=params),
        scheduler=None if scheduler is None else _build(config, "scheduler", scheduler, **supplied),
        loss=None if loss is None else _build(config, "loss", loss),
        callbacks=[_build(config, f"callbacks.{place}", one) for place, one in enumerate(callbacks)],
        output_dir=folder,
        progress=progress,
        name=config.name,
        world=world,
        meta={"experiment": config.name},
    )


def _build(config: ExperimentConfig, path: str, selection: Selection, **provided: Any) -> Any:
    return build_selection(selection, path=path, document=config.document, provided=provided)
