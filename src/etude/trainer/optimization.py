"""The step and optimizer of a run, from objects, functions or names."""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from etude.config import lookup
from etude.config.signature import parameters_of
from etude.core import ConfigError, Task, TrainingError
from etude.core.deferred import recording_of
from etude.core.spelling import listed
from etude.distributed.agreement import check_model
from etude.distributed.parallel import check_inside, check_whole, wrap_data_parallel
from etude.distributed.shards import model_param
from etude.engine.capture import Capture
from etude.engine.captured_evaluation import CapturedEvaluation
from etude.engine.compiled import CompiledTask
from etude.engine.splitter import MicroBatchSplitter
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.optim import AdamW
from etude.optim.eager import without_compiler
from etude.optim.elements import check_divisible
from etude.optim.groups import NamedParams, names_of, outer_params
from etude.optim.several import Optimizers, check_shares, everything_in
from etude.trainer.arguments import Section, build_named, expect
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine, making_model

if TYPE_CHECKING:
    from etude.distributed.sharding import Shards

logger = logging.getLogger("etude")

OptimizerLike = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    | Section
    | None
)


@runtime_checkable
class GroupsParameters(Protocol):
    """A model that tells which of its parameters need different optimizer settings."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable parameters as optimizer parameter groups."""


def make_step(
    model: nn.Module,
    task: Task,
    optimizer: OptimizerLike,
    config: TrainerConfig,
    machine: Machine,
    *,
    uses_all_parameters: bool = True,
) -> Step:
    """Move a model to the device, create its optimizer, and return the step that trains it.

    Without `uses_all_parameters` a step may leave out parameters that the optimizer has.
    """
    check_whole(model)
    if any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
        raise ConfigError(
            "the model is of TorchScript, which cannot be trained here; pass the module it was made from"
        )
    task.join(model)
    with making_model(machine.device):
        if machine.world.size > 1:
            check_model(machine.world, model)
        machine.place(model, config)
        optimizer, shards = _divide(model, task, optimizer, machine)
        made = make_optimizer(optimizer, model, config, shards)
        if machine.device.type == "cpu" and any(group.get("capturable") for group in made.param_groups):
            raise ConfigError("the optimizer has capturable=True, which a run sets itself on a GPU; remove it")
        if machine.world.is_main:
            _warn_of_untrained(made, model)
        task.extend(made)
        wrapped = model
        if machine.world.size > 1:
            check_inside(model, made)
        if machine.world.size > 1 and shards is None:
            unused = config.find_unused_parameters or not uses_all_parameters
            wrapped = wrap_data_parallel(model, machine.world, machine.device, find_unused_parameters=unused)
    clip = {"clip_norm": config.gradient_clip_norm, "clip_value": config.gradient_clip_value}
    if shards is not None:
        check_divisible(made)
    updater = Updater(made, **clip, precision=machine.precision, shards=shards)
    metrics = None if isinstance(config.train_metrics, list) else config.train_metrics
    size = None if config.micro_batch_size == "auto" else config.micro_batch_size
    world = machine.data_world
    splitter = MicroBatchSplitter(size, world=world)
    step = Step(wrapped, task, updater, machine.precision, world=world, metrics=metrics, splitter=splitter)
    _recover(step, config)
    if machine.captures(config.capture):
        step.capture = Capture(step, needed=config.capture == "on")
        machine.evaluation = CapturedEvaluation(step.capture.recorder, needed=step.capture.needed)
    return step


def _divide(
    model: nn.Module, task: Task, optimizer: OptimizerLike, machine: Machine
) -> tuple[OptimizerLike, "Shards | None"]:
    """Divide the model over the processes, if the layout says so; return the optimizer for it, and the shards."""
    if not machine.layout.sizes.divides_model:
        return optimizer, None
    from etude.distributed.sharding import (  # takes long to import
        DeferredWeights,
        Shards,
        divide_model,
        follow_shards,
    )

    names, recording = names_of(model), recording_of(model)
    deferred = None if recording is None else DeferredWeights(model, recording)
    divide_model(model, machine.layout, machine.precision.name, task.used_outside(model))
    if deferred is not None:
        deferred.draw(machine.device, machine.world)
    shards = Shards(model, machine.data_world)
    follow_shards(optimizer, names, model, shards)
    return optimizer, shards


def _recover(step: Step, config: TrainerConfig) -> None:
    """Let a step that runs out of memory be done again, if the config says so or leaves a size open."""
    can = not step.world.in_lockstep and (step.world.size == 1 or step.objective.can_defer)
    if config.on_out_of_memory == "split" and not can:
        raise ConfigError(
            f"training.on_out_of_memory is split, which {step.world.size} processes cannot do with "
            f"{type(step.task).__name__}: they exchange counts during a step; set it to error"
        )
    step.splitter.recovers = can and (config.on_out_of_memory == "split" or config.implies_splitting)
    step.objective.defers = step.splitter.recovers and step.world.size > 1


def compile_step(step: Step, config: TrainerConfig, machine: Machine, loaders: Loaders) -> CompiledTask:
    """Use compiled code for the terms of a step if the config says so or leaves it open; return what decides."""
    way = machine.compiled(config.compile)
    compiled = CompiledTask(
        step.objective.task,
        mode=config.compile,
        way=way,
        batch_size=loaders.batch_size if config.micro_batch_size is None else None,
        notice=lambda words: step.notice(words),
        warn=lambda words: step.warn(words),
    )
    step.splitter.listeners.append(compiled.resize)
    if way is None:
        step.forward = compiled
    return compiled


@without_compiler()
def make_optimizer(
    optimizer: Any, model: nn.Module, config: TrainerConfig, shards: "Shards | None" = None
) -> torch.optim.Optimizer:
    """Return the given optimizer, or one built from a name, class or function of the parameters; default AdamW.

    Several given ones become one. With `shards` it is one of the local shards of the parameters.
    """
    names, own = names_of(model), [param for param in model.parameters() if param.requires_grad]
    params = own if shards is None else [shards.local(param) for param in own]
    if shards is not None:
        names = shards.named(names)
    if not params:
        raise ConfigError("the model has no parameters that require gradients: there is nothing to train")
    if isinstance(optimizer, (list, tuple)):
        for one in optimizer:
            check_optimizer(one, params)
        check_shares(optimizer, names, params)
        optimizer = Optimizers(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, params)
        _check_settings(optimizer, config)
        follow_parameters(optimizer)
        return optimizer
    groups = _named_params(model, params, names, shards)
    chosen = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    given: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    if optimizer is None:
        return AdamW(groups, **given)
    made = optimizer_factory(optimizer, given)(groups)
    check_optimizer(made, params)
    _check_settings(made, config)
    return made


def _warn_of_untrained(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Warn of parameters that require a gradient and are not in the optimizer: a part of the model was forgotten."""
    if left := left_out(model, optimizer):
        logger.warning(
            "the optimizer does not have %s, so %s not trained; add them, or freeze them with requires_grad_(False)",
            listed(left, shorten=True),
            "this parameter is" if len(left) == 1 else f"these {len(left)} parameters are",
        )


def _named_params(
    model: nn.Module, params: list[nn.Parameter], names: Mapping[int, str], shards: "Shards | None"
) -> NamedParams:
    """Return the parameters of a model, or the groups that it tells, with their names."""
    outer = outer_params(model)
    found = model.parameter_groups() if isinstance(model, GroupsParameters) else []
    if shards is not None:
        outer = frozenset(shards.named(dict.fromkeys(outer, "")))
        found = [{**group, "params": [shards.local(param) for param in group["params"]]} for group in found]
    trained = {id(param) for param in params}
    frozen = frozenset(name for key, name in names.items() if key not in trained)
    groups = NamedParams(params, names, outer, frozen=frozen)
    return groups.with_items(found) if len(found) > 1 else groups


def _check_settings(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> None:
    """Raise ConfigError if the config has a learning rate or weight decay that differs from the optimizer's."""
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        value = getattr(config, key)
        made = [float(one.get(name, 0.0)) for one in (optimizer.defaults, *optimizer.param_groups)]
        if value is not None and value not in made:
            raise ConfigError(
                f"training.{key} is {value:g}, but the given optimizer has {name} {made[-1]:g}; remove one of them"
            )


@without_compiler()
def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, loaded before the model was moved, to the devices of its parameters."""
    tensors = (
        (param, value)
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    if any(value.device != param.device for param, value in tensors):
        optimizer.load_state_dict(optimizer.state_dict())  # load_state_dict moves the state


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters that require gradients but that the optimizer lacks."""
    held = {id(model_param(param)) for group in optimizer.param_groups for param in group["params"]}
    return [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in held]


def optimizer_factory(optimizer: Any, settings: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function of the parameters from such a function, an optimizer class, or a name.

    A class or a name gets `settings` (learning rate and weight decay of the config) unless it has its own. Raises
    ConfigError for anything else.
    """
    if isinstance(optimizer, (str, Mapping)):
        section = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
        own = {"lr"} if "learning_rate" in section else set(section)
        if "." in str(section.get("name")):  # a class that is not etude's may have no weight decay
            takes = parameters_of(lookup("optimizer", section["name"]).factory)[0]
            settings = {key: value for key, value in settings.items() if key in takes}
        section = {**{key: value for key, value in settings.items() if key not in own}, **section}
        return lambda params: build_named("optimizer", section, "optimizer", params=params)
    is_class = isinstance(optimizer, type)
    if not (is_class and issubclass(optimizer, torch.optim.Optimizer)):
        expect("optimizer", optimizer, callable(optimizer), "an optimizer, a function that makes one, or a name")

    def make(params: Any) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = optimizer(params, **(settings if is_class else {}))
        except TypeError as error:
            raise ConfigError(f"optimizer cannot be built from the parameters: {error}") from error
        return made

    return make


def check_optimizer(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Raise ConfigError for a non-optimizer or one with a closure, TrainingError for one of another model."""
    if isinstance(optimizer, (list, tuple)):  # `Trainer` has made one of them
        raise ConfigError("optimizer is a list; make one of it with etude.optim.Optimizers([…])")
    expect("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "or make a torch optimizer")
    kind: Any = type(optimizer)
    for one in map(type, everything_in(optimizer)):
        if _needs_closure(one):
            raise ConfigError(
                f"optimizer {one.__name__} needs a closure that computes the loss several times per step, "
                "which is not supported; use another one, such as 'adamw'"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer {kind.__name__} has differentiable=True, with which only a loop of your own can step; remove it"
        )
    for rate in (group.get("lr") for group in optimizer.param_groups):
        if not isinstance(rate, (Real, Tensor)):
            raise ConfigError(
                f"optimizer {kind.__name__} has {rate!r:.60} as the learning rate of a parameter group, but "
                "a run logs and schedules a number; set lr"
            )
        if isinstance(rate, Real) and not 0 <= float(rate) < math.inf:  # torch checks that of the optimizer alone
            raise ConfigError(
                f"optimizer {kind.__name__} has {rate} as the learning rate of a parameter group; set a finite lr of "
                "at least 0"
            )
    mine = set(map(id, params))
    if not any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
        raise TrainingError("the optimizer holds none of the model's parameters: build it from model.parameters()")


@functools.cache
def _needs_closure(kind: Any) -> bool:
    """Whether the steps of an optimizer compute the loss themselves."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return issubclass(kind, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty)
