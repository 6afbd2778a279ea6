"""Building a `Trainer` from a validated config: data, model, loss, optimizer, schedule, then callbacks."""

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch

from etude.config import Feature, RunDraft, Selection, build_selection
from etude.core import CheckpointError, ConfigError, DataError
from etude.core.deferred import deferred_weights
from etude.core.random import set_seed
from etude.core.spelling import shorten
from etude.data import DataLoader, DataLoaderFactory, DataSplits
from etude.data.splits import SplitName
from etude.distributed import World
from etude.engine.callback import Callback
from etude.experiment.config import MODEL_SIZES, ExperimentConfig
from etude.experiment.features import features_for
from etude.monitor import RunFolder
from etude.optim import AdamW
from etude.trainer import Trainer, TrainerConfig, resolve_device
from etude.trainer.machine import making_model
from etude.trainer.schedule import PlannedSchedule


@dataclass(frozen=True, slots=True)
class Data:
    """The data of an experiment and how its batches are made."""

    splits: DataSplits
    config: TrainerConfig
    device: torch.device
    world: World
    place: str
    """Location of the data section, for messages."""
    share: tuple[int, int] = (0, 1)
    """Which part of every batch this process gets, of how many."""
    features: tuple[Feature, ...] = ()
    """Streams required by the config, and streams of the data."""

    @property
    def names(self) -> list[SplitName]:
        """The splits that the data has."""
        return [name for name in get_args(SplitName) if getattr(self.splits, name) is not None]

    def loader(self, split: str) -> DataLoader | None:
        """Return a loader over a split, or None if the data has no such split."""
        name = next((name for name in self.names if name == split), None)
        if name is None:
            return None
        try:
            return self.loader_over(getattr(self.splits, name), training=name == "train")
        except DataError as error:
            raise DataError(f"{self.place}, split {name}: {error}") from error

    def loader_over(self, part: Any, *, training: bool = False) -> DataLoader:
        """Return a loader over samples of the same kind."""
        factory = DataLoaderFactory.from_config(
            self.config, device=self.device, rank=self.share[0], world_size=self.share[1]
        )
        return factory.create(part, training=training)


def build_data(config: ExperimentConfig, world: World) -> Data:
    """Build the `data` section and the data of features; one process per machine downloads it, the others wait."""
    where = data_key(config)
    first = world.local_rank == 0
    fetched = world.attempt(lambda: _load(config, where), here=first)
    splits = fetched if first else _load(config, where)
    assert splits is not None
    device = resolve_device(config.training.device, world.local_rank)
    of_data = features_for((), [type(splits.token_schema).__module__])
    features = tuple(dict.fromkeys((*config.features, *of_data)))
    place = config.document.place(where)
    return Data(splits, config.sections["training"], device, world, place, _share(config, world), features)


def _share(config: ExperimentConfig, world: World) -> tuple[int, int]:
    """Return the part of every batch that this process gets: those that divide layers between them get the same."""
    tensor = config.sections["parallel"].tensor
    return world.rank // tensor, max(1, world.size // tensor)


def recorded_data(config: ExperimentConfig, meta: Mapping[str, Any], world: World) -> Data:
    """Return the data as a checkpoint's `meta` records it: sizes and facts, without samples."""
    sizes = meta["model_sizes"]
    splits = DataSplits(
        None,
        vocab_size=sizes.get("vocab_size"),
        num_types=sizes.get("n_types"),
        num_classes=sizes.get("num_classes"),
        input_shape=tuple(sizes["input_shape"]) if "input_shape" in sizes else None,
        num_targets=sizes.get("out_features") if sizes.get("num_classes") is None else None,
        facts=meta.get("data") or {},
    )
    device = resolve_device(config.training.device, world.local_rank)
    place = config.document.place(data_key(config))
    share = _share(config, world)
    return Data(splits, config.sections["training"], device, world, place, share, tuple(config.features))


def data_key(config: ExperimentConfig) -> str:
    """Return the section that defines the data; raise ConfigError if there is none."""
    own = [path for feature in config.features for path, _ in feature.data_sets(config.sections).values()]
    if config.selection("data") is None and own:
        return own[0].partition(".")[0]
    config.require("data")
    return "data"


def _load(config: ExperimentConfig, where: str) -> DataSplits:
    selection = config.selection("data")
    splits = None if selection is None else _build_splits(config, "data", selection)
    for feature in config.features:
        own = {
            name: _build_splits(config, path, one) for name, (path, one) in feature.data_sets(config.sections).items()
        }
        try:
            splits = feature.join_data(config.sections, config.document, splits, own)
        except DataError as error:
            raise DataError(f"{config.document.place(where)}: {error}") from error
    assert splits is not None
    return splits


def _build_splits(config: ExperimentConfig, path: str, selection: Selection) -> DataSplits:
    splits = build_component(config, path, selection)
    if not isinstance(splits, DataSplits):
        raise ConfigError(f"data '{selection.component.name}' must return DataSplits, got {type(splits).__name__}")
    return splits


def build_trainer(
    config: ExperimentConfig,
    *,
    data: Data | None = None,
    folder: RunFolder | None = None,
    world: World | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Build everything (the data only if not given) and return the trainer; `callbacks` come after the config's.

    The seed is set first, so that initial weights are reproducible.
    """
    training: TrainerConfig = config.sections["training"]
    if folder is None:  # nothing is written
        training = training.model_copy(update={"checkpoint_dir": None, "save_checkpoints": False})
    world = world if world is not None else World()
    selection = config.require("model")
    data = data if data is not None else build_data(config, world)
    draft = RunDraft(
        config.sections,
        config.document,
        world.size,
        data.splits,
        data.splits.vocab_size,
        facts={"experiment": config.name},
    )
    sizes = sizes_of(config, data, draft)
    if isinstance(transform := training.batch_transform, Selection):
        built = build_component(config, "training.batch_transform", transform, **sizes)
        training = training.model_copy(update={"batch_transform": built})
    set_seed(training.seed)
    deferred = config.sections["parallel"].meta_device
    with making_model(torch.device("cpu")), deferred_weights() if deferred else nullcontext():
        draft.model = build_component(config, "model", selection, **sizes)
    # the trainer makes the loaders itself if it must find the size of batches
    loader: Any = (lambda name: getattr(data.splits, name)) if training.batch_size == "auto" else data.loader
    train_loader = loader("train")
    if train_loader is None and folder is not None:
        raise DataError(f"{data.place}: there is no train split (there are: {', '.join(data.names) or 'none'})")
    names = ("loss", "validation_loss", "optimizer", "scheduler")
    loss, val_loss, optimizer, scheduler = (config.selection(one) for one in names)
    sections = config.sections.get("callbacks") or []
    known = {} if data.splits.tokenizer is None else {"tokenizer": str(data.splits.tokenizer)}
    draft.facts |= known
    draft.callbacks += [
        build_component(config, f"callbacks.{place}", one, **known) for place, one in enumerate(sections)
    ]
    draft.callbacks += callbacks
    classes = data.splits.facts.get("classes") if data.splits.facts else None
    named = {} if classes is None else {"class_names": classes}
    if data.splits.facts:
        draft.callbacks.append(DataFacts(data.splits.facts))
    for feature in data.features:
        feature.after_model(draft)
    return Trainer(
        draft.model,
        train_loader,
        loader("validation"),
        config=training,
        optimizer=AdamW
        if optimizer is None
        else lambda params: build_component(config, "optimizer", optimizer, params=params),
        scheduler=None if scheduler is None else PlannedSchedule(scheduler, config.document),
        loss=None if loss is None else build_component(config, "loss", loss, **draft.given),
        val_loss=None if val_loss is None else build_component(config, "validation_loss", val_loss, **draft.given),
        metrics=[
            build_component(config, f"metrics.{place}", one, **named)
            for place, one in enumerate(config.sections.get("metrics") or [])
        ],
        callbacks=draft.callbacks,
        output_dir=folder,
        progress=progress,
        name=config.name,
        world=world,
        parallel=config.sections["parallel"],
        whole_config=config.to_dict(),
        meta=draft.facts,
        **draft.trainer,
    )


class DataFacts(Callback):
    """Stores facts about the data in every checkpoint, and refuses to resume with other data."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts under the key `data`."""
        return {"data": self._facts}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if a fingerprint differs.

        Other facts only explain the difference: a mean may differ in its last digits on another machine.
        """
        before, now = flat(saved.get("data")), flat(json.loads(json.dumps(self._facts)))
        different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if before and any(key.endswith("fingerprint") for key in different):
            changes = [
                f"{key} {shorten(str(before.get(key)), 60)} → {shorten(str(now.get(key)), 60)}" for key in different
            ]
            raise CheckpointError(
                f"{place}: the data has changed since this checkpoint was written ({'; '.join(changes[:3])}); "
                f"restore the files, or start a new run"
            )


def flat(facts: Any, path: str = "") -> dict[str, Any]:
    """Return nested mappings by dotted path."""
    if not isinstance(facts, Mapping):
        return {path: facts} if path else {}
    found: dict[str, Any] = {}
    for key, value in facts.items():
        found |= flat(value, f"{path}.{key}" if path else key)
    return found


def sizes_of(config: ExperimentConfig, data: Data, draft: RunDraft) -> dict[str, Any]:
    """Return the sizes that the data and the features give the model, and note them in the draft."""
    for feature in data.features:
        feature.before_model(draft)
    sizes = data.splits.model_sizes()
    if draft.vocab_size is not None:
        sizes["vocab_size"] = draft.vocab_size
    _check_sizes(config, config.require("model"), sizes)
    draft.facts["model_sizes"] = sizes
    return sizes


def _check_sizes(config: ExperimentConfig, model: Selection, sizes: Mapping[str, Any]) -> None:
    """Refuse a model that lacks a required size, or whose vocabulary is smaller than that of the data."""
    parameters = inspect.signature(model.component.factory).parameters
    for name in MODEL_SIZES:
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and model.arguments.get(name) is None and name not in sizes:
            raise ConfigError(
                f"{config.document.place('model')}: {model.component.name} needs {name}, which the data does not "
                f"define; set model.{name}"
            )
    given, vocab_size = model.arguments.get("vocab_size"), sizes.get("vocab_size")
    if vocab_size is not None and isinstance(given, int) and given < vocab_size:
        raise ConfigError(
            f"{config.document.place('model.vocab_size')}: the data has {vocab_size} tokens, the model only "
            f"{given}; increase model.vocab_size, or remove it to use that of the data"
        )


def build_component(config: ExperimentConfig, path: str, selection: Selection, **provided: Any) -> Any:
    """Build a component of a config; `provided` are values that it may take besides its own."""
    return build_selection(selection, path=path, document=config.document, provided=provided)
