"""`etude train --dry-run`: what a run on any number of processes needs, without training and without its devices."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from etude.callbacks.ema import EMA
from etude.checkpoint.optimizer_needs import needed_state
from etude.config import RunDraft
from etude.core import ConfigError, Task
from etude.core.batch import map_tensors
from etude.core.blocks import modules_matching, repeated_blocks
from etude.data import DataLoader
from etude.data.order.permutation import ShuffledOrder
from etude.data.order.sampler import share
from etude.data.sources.streams import StreamBatches
from etude.distributed import World
from etude.distributed.mesh import DATA, SHARD, TENSOR, Layout
from etude.distributed.settings import ParallelConfig, Sizes, memory_of
from etude.distributed.sharding import divide_model
from etude.distributed.tensor_parallel import divide_layers
from etude.engine.callback_list import CallbackList
from etude.experiment.build import Data, build_component, build_data, sizes_of
from etude.experiment.check import check_experiment, on_meta, small_optimizer, small_weights
from etude.experiment.config import ExperimentConfig
from etude.experiment.needs import DryRun, size_in_words
from etude.losses import SupervisedTask
from etude.optim.device import DeviceOptimizer
from etude.optim.elements import check_divisible
from etude.optim.several import everything_in, optimizers_in
from etude.optim.wrappers import Lookahead
from etude.trainer import TrainerConfig
from etude.trainer.arguments import check_divided
from etude.trainer.loaders import check_shares, total_steps
from etude.trainer.machine import Machine

MOST_WORLD = 2**17
MOST_CHECKED = 2_000_000
"""Samples up to which every index of an epoch is counted."""


def dry_run(config: ExperimentConfig, world: int = 1) -> DryRun:
    """Check a config as `train` would on `world` processes, and return what the run needs.

    The data is opened, the model is built without memory for its weights, and a device that is missing here is no
    mistake. Raises ConfigError or DataError for anything that `train` would refuse before its first step.
    """
    if not 1 <= world <= MOST_WORLD:
        raise ConfigError(f"--world {world}: must be from 1 to {MOST_WORLD:,}")
    training: TrainerConfig = config.sections["training"].model_copy(update={"device": "cpu"})
    config = replace(config, sections={**config.sections, "training": training})
    optimizer, callbacks = check_experiment(config)
    data = build_data(config, World())
    model, task = _meta_model(config, data, callbacks)
    found = DryRun(config.name, world)
    found.sizes = _sizes(found, config.sections["parallel"], model)
    if found.sizes.divides_model:
        check_divisible(optimizer)
        check_divided(training, callbacks)
    _measure_model(found, config, model)
    if (has_average := any(isinstance(one, EMA) for one in callbacks)) and found.checkpoint is not None:
        found.checkpoint += found.gradients
    if world > 1:
        Machine("cpu", world=World(size=world)).captures(training.capture)
    loader = data.loader("train") if training.batch_size != "auto" else None
    if loader is not None:
        check_shares(loader, found.sizes.replicas)
    if loader is not None and isinstance(training.batch_size, int):
        _measure_data(found, loader, training)
        with _tensor_part(found, config, model, lambda: _meta_model(config, data, callbacks)[0]) as part:
            _measure_activations(found, part, task, loader)
    elif not isinstance(training.batch_size, int):
        found.no_activations = "training.batch_size is no number"
        found.warnings.append(f"training.batch_size is {training.batch_size}: give a number to see shares and steps")
    found.samples = {name: len(part) for name in data.names if (part := _sized(data, name)) is not None}
    if found.sizes.divides_model:
        _measure_parts(found, config, model)
    if has_average:
        found.average = found.gradients
    return found


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Make a process group of any size in this one process, whose collectives do nothing: for meshes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meta_model(config: ExperimentConfig, data: Data, callbacks: CallbackList) -> tuple[nn.Module, Task]:
    """Return the model with the sizes of the data, without memory for its weights, and the task that calls it.

    Callbacks have frozen what they freeze.
    """
    selection = config.require("model")
    draft = RunDraft(config.sections, config.document, 1, data.splits, data.splits.vocab_size)
    sizes = sizes_of(config, data, draft)
    draft.model = on_meta(partial(build_component, config, "model", selection, **sizes))
    for feature in data.features:
        on_meta(partial(feature.after_model, draft))
    for one in callbacks:
        one.prepare(draft.model)
    return draft.model, draft.trainer.get("task") or SupervisedTask()


def _sizes(found: DryRun, settings: ParallelConfig, model: nn.Module) -> Sizes:
    """Return how the processes divide data and model; raise ConfigError if the sizes do not fit their number."""
    memory = None
    if settings.shard == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        memory = memory_of(device)
        found.warnings.append(
            f"parallel.shard is auto, which depends on the memory of the device: this machine's {device.type} has "
            f"{size_in_words(memory)}"
        )
    parameters = sum(one.numel() for one in model.parameters() if not is_lazy(one))
    return settings.sizes(found.world, parameters, memory)


def _measure_parts(found: DryRun, config: ExperimentConfig, model: nn.Module) -> None:
    """Divide the model as the first process would, and measure what that holds."""
    settings: ParallelConfig = config.sections["parallel"]
    units = repeated_blocks(model) if settings.blocks is None else modules_matching(model, settings.blocks)
    blocks = sorted((_bytes(model.get_submodule(name).parameters()) for name in units), reverse=True)
    rest = found.weights - sum(blocks)
    found.gathered = sum(sorted((*blocks, rest), reverse=True)[:2]) if found.sizes.shard > 1 else 0
    found.gathered //= found.sizes.tensor
    if settings.cpu_offload:
        found.warnings.append("parallel.cpu_offload: weights, gradients and optimizer state are in host memory")
    here = settings.model_copy(update={"cpu_offload": False})
    with fake_world(found.world):
        shape = (found.sizes.data, found.sizes.shard, found.sizes.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=(DATA, SHARD, TENSOR))
        world = World(size=found.world)
        divide_model(model, Layout(world, world, found.sizes, mesh, here), "fp32")
        whole = found.checkpoint
        _measure_model(found, config, model)
        found.checkpoint = whole


@contextmanager
def _tensor_part(
    found: DryRun, config: ExperimentConfig, model: nn.Module, make: Callable[[], nn.Module]
) -> Iterator[nn.Module]:
    """Yield the model as one process runs it: with its part of the layers that `parallel.tensor` divides."""
    if found.sizes.tensor == 1:
        yield model
        return
    part = make()
    with fake_world(found.sizes.tensor):
        divide_layers(part, init_device_mesh("cpu", (found.sizes.tensor,)), config.sections["parallel"].tensor_plan)
        yield part


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _measure_model(found: DryRun, config: ExperimentConfig, model: nn.Module) -> None:
    if any(is_lazy(one) for one in model.parameters()):
        found.warnings.append("the model has lazy layers: parameters whose size its first batch decides are missing")
    params = [one for one in model.parameters() if not is_lazy(one)]
    trained = [one for one in params if one.requires_grad]
    found.parameters, found.trained = sum(map(Tensor.numel, params)), sum(map(Tensor.numel, trained))
    found.weights = _bytes(params) + _bytes(one for one in model.buffers() if not is_lazy(one))
    found.gradients = _bytes(trained)
    found.buckets = found.gradients if found.world > 1 and not found.sizes.divides_model else 0
    found.optimizer = _optimizer_bytes(config, model)
    found.checkpoint = None if found.optimizer is None else found.weights + found.optimizer


def _optimizer_bytes(config: ExperimentConfig, model: nn.Module) -> int | None:
    """Return the size of the optimizer's state: that of one step on small weights, enlarged."""
    small = small_weights(model)
    optimizer = small_optimizer(config, small)
    large = dict(zip(map(id, small.weights), model.parameters(), strict=True))
    total = 0
    for one in everything_in(optimizer):
        kept = [_local(large[id(param)]) for group in one.param_groups for param in group["params"]]
        total += (_bytes(kept) + 8) * isinstance(one, Lookahead)  # its slow weights, and a count
    for one in optimizers_in(optimizer):
        for group in one.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for param in group["params"]:
                state = _state(one, settings, large[id(param)])
                if state is None:
                    return None
                total += _bytes(value for value in state.values() if isinstance(value, Tensor))
    return total


def _state(optimizer: Optimizer, settings: Mapping[str, Any], param: Tensor) -> dict[str, Any] | None:
    """Return the state of one process for a parameter, without data; None if it is unknown."""
    found = needed_state(optimizer, settings, _local(param))
    if found is None or not isinstance(optimizer, DeviceOptimizer):
        return found
    whole = needed_state(optimizer, settings, param) if optimizer.whole_states else None
    return found | {kind: value for kind, value in (whole or {}).items() if kind in optimizer.whole_states}


def _measure_data(found: DryRun, loader: DataLoader, training: TrainerConfig) -> None:
    found.batch_size = size = loader.batch_size
    found.steps_per_epoch = total_steps(training.model_copy(update={"epochs": 1, "max_steps": None}), loader)
    found.total_steps = total_steps(training, loader)
    source, world = loader._source, found.sizes.replicas
    spans = [min(size, loader.epoch_samples)]
    if isinstance(source, StreamBatches):
        spans = [span.stop - span.start for span in source.plan.spans(0, 0)]
    shares = sum((share_sizes(count, world) for count in spans), np.zeros(world, dtype=np.int64))
    found.shares = Counter(shares.tolist())
    found.micro_batch = int(shares.max())
    if isinstance(at_once := training.micro_batch_size, int):  # as `MicroBatchSplitter` divides the share
        parts = -(-found.micro_batch // max(1, at_once // world))
        found.micro_batch = -(-found.micro_batch // parts)
    found.warnings += _share_warnings(found)
    if not isinstance(source, StreamBatches):
        check_order(loader)


def _share_warnings(found: DryRun) -> Iterator[str]:
    size, world = found.batch_size or 0, found.sizes.replicas
    if (drawn := sum(count * many for count, many in found.shares.items())) < size:
        idle = found.shares.get(0, 0)
        yield (
            f"training.batch_size {size:,} is more than the {drawn:,} samples of an epoch, so a step has {drawn:,}"
            + (f"; {idle:,} of {world:,} {_parts(found)} have none of them" if idle else "")
        )
    elif len(found.shares) > 1:
        most = max(found.shares)
        yield (
            f"training.batch_size {size:,} is no multiple of {world:,} {_parts(found)}: the result is the same, but "
            f"{found.shares[min(found.shares)]:,} of them wait for the {found.shares[most]:,} that have {most:,} "
            f"samples; {size - size % world:,} or {size - size % world + world:,} would be even"
        )


def _parts(found: DryRun) -> str:
    return "processes" if found.sizes.tensor == 1 else f"groups of {found.sizes.tensor} processes"


def share_sizes(count: int, world: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many of `count` samples each rank has; raise AssertionError if one is lost or drawn twice.

    >>> share_sizes(5, 3).tolist()
    [1, 2, 2]
    """
    begins, ends = share(0, count, np.arange(world), world)
    assert begins[0] == 0
    assert ends[-1] == count
    assert (begins[1:] == ends[:-1]).all(), "a sample is lost, or drawn by two ranks"
    return ends - begins


def check_order(loader: DataLoader) -> None:
    """Raise AssertionError if the first epoch draws a sample twice; a mixture may do so on purpose."""
    sampler = loader.sampler
    if isinstance(sampler.order, ShuffledOrder) and sampler.epoch_samples <= MOST_CHECKED:
        drawn = sampler.order.indices(0, 0, sampler.epoch_samples)
        assert np.bincount(drawn).max() == 1, "a sample is drawn twice"


def _measure_activations(found: DryRun, model: nn.Module, task: Task, loader: DataLoader) -> None:
    """Count what a forward pass keeps for the backward pass, without memory: shapes are all that is computed."""
    weights = {_local(one).untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[Tensor, int]] = {}  # keeps the tensors, whose storage might be given to others

    def keep(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = tensor, storage.nbytes()
        return tensor

    world = -(-sum(count * many for count, many in found.shares.items()) // found.micro_batch)
    try:
        batch = next(iter(loader.shared(world - 1, world).iterate(0)))
        batch = map_tensors(batch, lambda one: one.to("meta"))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            task.predict(model, batch)
    except Exception as error:  # the model needs values, or its device
        found.no_activations = (str(error).splitlines() or [type(error).__name__])[0][:120]
        return
    found.activations = sum(size for _, size in kept.values())


def _sized(data: Data, name: str) -> Any:
    part = getattr(data.splits, name)
    try:
        len(part)
    except TypeError:
        return None
    return part


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in map(_local, tensors))
