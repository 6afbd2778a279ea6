"""`Loaders`: turns any data that users pass into batches on the device, and knows how many steps a run has."""

import inspect
import logging
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler as TorchBatchSampler,
    DataLoader as TorchDataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from etude.config import Selection, build_selection
from etude.core import Clock, ConfigError, DataError, Loader
from etude.core.by_epoch import ByEpoch
from etude.core.loader import ChoosesStreams
from etude.data import (
    BatchSampler,
    BatchSource,
    DataLoader,
    DataLoaderFactory,
    LoaderData,
    StreamLoader,
    Streams,
    TensorData,
    as_loader,
)
from etude.data.mixing import BatchTransform
from etude.data.sources.arrays import as_tensor, is_array, is_pair
from etude.distributed import World
from etude.engine.step import GradientAccumulator
from etude.trainer.arguments import expect
from etude.trainer.changed_loaders import ChangedLoader, DeviceLoader, TransformedLoader
from etude.trainer.config import TrainerConfig
from etude.trainer.machine import Machine
from etude.trainer.unpadded import unpadded

logger = logging.getLogger("etude")

_WHOLE_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that give every process all samples."""
_ALL_ONCE = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that draw every sample once, unless with replacement."""
_OF_TORCH = ("pin_memory", "persistent_workers", "prefetch_factor")
"""Settings that are also attributes of torch's DataLoader."""
_TRANSFORM = "batch_transform"
_OF_VALIDATION = ("validate_interval", "validate_every_steps", "keep_best")
"""Settings that have no effect without validation."""


@runtime_checkable
class FetchesMany(Protocol):
    """A map-style dataset outside torch that fetches several samples at once, such as Hugging Face's."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples at these indices."""
        ...


class Loaders:
    """The training and validation data of a run, as loaders whose batches are on the device.

    >>> data = torch.zeros(10, 4), torch.zeros(10, dtype=torch.long)
    >>> config = TrainerConfig(batch_size=2, epochs=3, grad_accum_steps=2)
    >>> loaders = Loaders(data, config=config, machine=Machine("cpu"), model=nn.Linear(4, 2))
    >>> loaders.num_batches, loaders.steps_per_epoch, loaders.total_steps(config)
    (5, 3, 9)
    """

    def __init__(
        self,
        train: Any = None,
        validation: Any = None,
        *,
        config: TrainerConfig,
        machine: Machine,
        model: nn.Module | None = None,
        names: tuple[str, str] = ("train_loader", "val_loader"),
    ) -> None:
        """Make both loaders; either may be None.

        Arrays get the dtype of `model`; `names` are the argument names used in errors.
        """
        self.accumulator = GradientAccumulator(accumulation_steps=config.grad_accum_steps)
        """How many training batches make a step."""
        self._config = config
        self._machine = machine
        self._model = model
        self.train = self._named(train, names[0], training=True)
        if self.train is not None and (transform := _transform_of(config)) is not None:
            self.train = TransformedLoader(self.train, transform, config.seed)
        self.validation = self._named(validation, names[1], training=False)
        if machine.world.is_main and train is not None:
            _warn_of_kept(train, config, machine.data_world)
            if validation is None:
                _warn_of_no_validation(config)

    def make(self, source: Any, *, training: bool) -> Loader:
        """Return a loader over another loader, a Dataset, a source of batches, streams, tensors or arrays.

        Data that is not a loader is shuffled in training, in an order determined by seed, epoch and position alone.
        With several processes each gets its share.
        """
        device, world = self._machine.device, self._machine.data_world
        source = _as_tensors(source, self._model)
        known = (Tensor, Dataset, FetchesMany, BatchSource, TensorData, LoaderData, Streams)
        if isinstance(source, known) or is_pair(source):
            source = DataLoaderFactory.from_config(self._config, device=device).create(source, training=training)
        loader = _share(source, world, training=training)
        if not isinstance(loader, Loader):
            loader = as_loader(loader, seed=self._config.seed, world_size=world.size)
        if device.type == "cpu" or (isinstance(loader, DataLoader) and loader.device == device):
            return loader
        return DeviceLoader(loader, device)

    def in_order(self, source: Any) -> Loader:
        """Return a loader of every sample once, in the order of the data, for predictions.

        Raises ConfigError or DataError if the order of a source is unknown, or its batches cannot be divided.
        """
        loader = self.make(_in_order(source), training=False)
        size = self._machine.data_world.size
        if size > 1 and not isinstance(_inner(loader), DataLoader):
            raise ConfigError(
                f"the batches of a {type(source).__name__} cannot be divided among {size} processes in order; pass the "
                "data itself, a Dataset, or an etude DataLoader"
            )
        return loader

    @property
    def sources(self) -> tuple[Loader | None, Loader | None]:
        """The training and validation loaders, before batches are moved to the device."""
        return _inner(self.train), _inner(self.validation)

    def choose_all(self) -> None:
        """Read all streams again, whatever the curriculum of an earlier run has left."""
        sources: tuple[object, ...] = self.sources
        for source in sources:
            if isinstance(source, ChoosesStreams):
                source.choose()

    def sizes(self) -> dict[str, int | None]:
        """Return what all ranks must agree on: samples of loaders that are divided here, else training batches."""
        train, validation = self.sources
        parts = {"training samples": train, "validation samples": validation}
        found = {name: one.epoch_samples for name, one in parts.items() if isinstance(one, DataLoader)}
        return {**found, "training batches per epoch": self.num_batches}

    @property
    def batch_size(self) -> int | None:
        """Samples of a full training batch; None if it must be read from the batches."""
        source = self.sources[0]
        if not isinstance(source, DataLoader) or isinstance(source, StreamLoader) or len(source) == 1:
            return None
        return source.batch_size if source.batch_sizes is None else None

    @property
    def num_batches(self) -> int | None:
        """Training batches per epoch; None if the loader does not know."""
        return None if self.train is None else num_batches(self.train)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of the first epoch; None if the loader has no length."""
        return None if self.num_batches is None else self.accumulator.num_steps(self.num_batches, range(1))

    @property
    def steps_per_any_epoch(self) -> int | None:
        """Optimizer steps of every epoch; None if epochs differ, or if the loader has no length."""
        return steps_per_any_epoch(self._config, self.sources[0])

    def total_steps(self, config: TrainerConfig, clock: Clock | None = None) -> int | None:
        """Return the optimizer steps of a whole run; None if the loader has no length and max_steps is not set."""
        return total_steps(config, self.sources[0], clock)

    def _named(self, source: Any, name: str, *, training: bool) -> Loader | None:
        if source is None:
            return None
        try:
            return self.make(source, training=training)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{name}: {error}") from error


def num_batches(loader: Loader) -> int | None:
    """Return the batches per epoch; None if the loader does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def total_steps(config: TrainerConfig, loader: Loader | None, clock: Clock | None = None) -> int | None:
    """Return the optimizer steps of a whole run; None if the loader has no length and max_steps is not set.

    With `clock`, the progress of the run, these are the steps so far, which may have had batches of another size, and
    those that are left.
    """
    epochs = config.num_epochs
    if epochs is None or not isinstance(loader, DataLoader):
        return planned_steps(config, None if loader is None else num_batches(loader))
    accumulator = GradientAccumulator(accumulation_steps=config.grad_accum_steps)
    steps, start = 0, 0
    if clock is not None and (batches := loader.batches_from(clock.epoch, clock.position)) is not None:
        this_epoch = -(-batches // accumulator.steps_at(clock.epoch)) if clock.epoch < epochs else 0
        steps, start = clock.step + this_epoch, clock.epoch + 1
    sizes = loader.batch_size if loader.batch_sizes is None else loader.batch_sizes
    spans = ByEpoch("batch_size", sizes).spans(range(start, max(start, epochs)))
    steps += sum(accumulator.num_steps(loader.batches_in(span.start), span) for span, _ in spans)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def steps_per_any_epoch(config: TrainerConfig, loader: Loader | None) -> int | None:
    """Return the optimizer steps of every epoch; None if epochs differ, or if the loader has no length."""
    accumulator = GradientAccumulator(accumulation_steps=config.grad_accum_steps)
    varies = len(accumulator.schedule.values) > 1 or (
        isinstance(loader, DataLoader) and loader.batch_sizes is not None
    )
    if varies or loader is None or (batches := num_batches(loader)) is None:
        return None
    return accumulator.num_steps(batches, range(1))


def planned_steps(config: TrainerConfig, num_batches: int | None) -> int | None:
    """Return the optimizer steps of a whole run with `num_batches` batches per epoch; None if it has no known end."""
    epochs, max_steps = config.num_epochs, config.max_steps
    if epochs is None or num_batches is None:
        return max_steps
    steps = GradientAccumulator(accumulation_steps=config.grad_accum_steps).num_steps(num_batches, range(epochs))
    return steps if max_steps is None else min(steps, max_steps)


def _transform_of(config: TrainerConfig) -> BatchTransform | None:
    """Return the batch transform of a config, built if it is only named."""
    given: Any = config.batch_transform
    made = build_selection(given, path=f"training.{_TRANSFORM}") if isinstance(given, Selection) else given
    if made is not None:
        fits = callable(made) and _takes_two(made)
        expect(f"config.{_TRANSFORM}", made, fits, "a name, or a function of (batch, random)")
    transform: BatchTransform | None = made
    return transform


def _takes_two(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _inner(loader: Loader | None) -> Loader | None:
    while isinstance(loader, ChangedLoader):
        loader = loader.loader
    return loader


# ------------------------------------------------------------------------------------------------ what is given


def _as_tensors(source: Any, model: nn.Module | None) -> Any:
    """Return arrays, data frames and, in a pair, lists of numbers as tensors; anything else unchanged.

    Floating-point values get the dtype of the model, because NumPy's default is float64.
    """
    if is_pair(source):
        return tuple(_as_tensor(one, name, model) for one, name in zip(source, ("data", "labels"), strict=True))
    return _as_tensor(source, "data", model) if is_array(source) else source


def _as_tensor(array: Any, name: str, model: nn.Module | None) -> Tensor:
    if isinstance(array, Tensor):
        return array
    params = () if model is None else model.parameters()
    formats = (param.dtype for param in params if param.is_floating_point())
    tensor = as_tensor(array, name, next(formats, torch.get_default_dtype()))
    return tensor if tensor.is_floating_point() or tensor.dtype in (torch.bool, torch.uint8) else tensor.long()


def _in_order(source: Any) -> Any:
    """Return a source whose samples come in the order of the data: one that shuffles or groups them is replaced."""
    if isinstance(source, DataLoader):
        return source.in_order()
    if isinstance(source, LoaderData):
        return LoaderData(source.data, {**source.options, "bucket_batches": 0})
    if not isinstance(source, TorchDataLoader) or isinstance(source.dataset, IterableDataset):
        return source
    batches: Any = source.batch_sampler
    known = batches is None or type(batches) is TorchBatchSampler or isinstance(batches, BatchSampler)
    sampler = getattr(batches, "sampler", source.sampler)
    known = known and (isinstance(batches, BatchSampler) or type(sampler) in _ALL_ONCE)
    if not known or getattr(sampler, "replacement", False) or source.batch_size is None or source.worker_init_fn:
        what = sampler if known or type(batches) is TorchBatchSampler else batches
        raise ConfigError(
            f"this torch DataLoader (with a {type(what).__name__}) cannot be read in the order of its data; pass the "
            "Dataset itself, or a DataLoader with shuffle=False"
        )
    options = {"batch_size": source.batch_size, "num_workers": source.num_workers, "collate_fn": source.collate_fn}
    return LoaderData(source.dataset, options)


def _warn_of_kept(source: Any, config: TrainerConfig, world: World) -> None:
    """Warn about settings that contradict a loader passed by the user: they cannot change it."""
    of_torch = isinstance(source, TorchDataLoader)
    names = ("batch_size", "drop_last", "num_workers", *(_OF_TORCH if of_torch else ()))
    for name in names:
        value, found = getattr(config, name), getattr(source, name, None)
        if name == "batch_size":
            found = getattr(source, "batch_sizes", None) or found
        if name == "batch_size" and of_torch and found is not None:
            found *= world.size  # it yields the batches of one process
        if name in config.model_fields_set and found is not None and found != value:
            logger.warning(
                "training.%s is %s, but the given loader has %s, which takes precedence; pass the data itself, or "
                "remove the setting",
                name,
                value,
                found,
            )


def _warn_of_no_validation(config: TrainerConfig) -> None:
    """Warn about settings that need validation data if there is none."""
    given = " and ".join(f"training.{name}" for name in config.changed(_OF_VALIDATION) if getattr(config, name))
    if given:
        logger.warning("there is no validation data, so there is no effect of %s; pass a val_loader", given)


# ------------------------------------------------------------------------------------------------ several processes


def _share(source: Any, world: World, *, training: bool) -> Any:
    """Return a source of batches that gives every rank its own share.

    An etude DataLoader or StreamLoader is divided here. A torch DataLoader must have a distributed sampler:
    ConfigError if all ranks would train on the same batches. Other sources are assumed to be divided already.
    Averages over undivided validation batches are still exact, as every rank counts every sample, but counts are not,
    which is a warning. Validation with a DistributedSampler leaves out the samples that it repeats.
    """
    if world.size == 1:
        return source
    if isinstance(source, StreamLoader):
        return source.shared(world.rank, world.size)
    if isinstance(source, DataLoader):
        return _divided(source, world)
    if isinstance(source, TorchDataLoader) and _gives_all(source, world):
        remedy = (
            "pass the Dataset itself, an etude DataLoader, or a torch DataLoader with "
            "sampler=DistributedSampler(dataset)"
        )
        if training:
            raise ConfigError(
                f"each of the {world.size} processes would train on all batches of this torch DataLoader; {remedy}"
            )
        if world.is_main:
            logger.warning(
                "each of the %d processes evaluates all batches of this torch DataLoader: averages are right, but "
                "counts, such as those of a confusion matrix, are those of all processes; %s",
                world.size,
                remedy,
            )
    return unpadded(source) if isinstance(source, TorchDataLoader) and not training else source


def _divided(loader: DataLoader, world: World) -> DataLoader:
    found = loader.world_size
    if found not in (1, world.size):
        raise ConfigError(
            f"the DataLoader was created for {found} processes, but there are {world.size}; create it in the run"
        )
    check_shares(loader, world.size)
    return loader if found == world.size else loader.shared(world.rank, world.size)


def check_shares(loader: DataLoader, world_size: int) -> None:
    """Raise ConfigError if a batch has too few samples to give every rank one."""
    size = min([loader.batch_size, *(loader.batch_sizes or {}).values()])
    if size < world_size:
        raise ConfigError(
            f"batch_size {size} is divided among all {world_size} processes, so it must be at least {world_size}; "
            "increase it or use fewer processes"
        )


def _gives_all(loader: TorchDataLoader[Any], world: World) -> bool:
    batches: Any = loader.batch_sampler
    if isinstance(batches, BatchSampler):
        return batches.world_size != world.size
    if batches is not None and type(batches) is not TorchBatchSampler:
        return False
    return isinstance(loader.sampler if batches is None else batches.sampler, _WHOLE_SAMPLERS)
