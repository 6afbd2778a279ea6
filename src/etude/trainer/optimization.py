"""The step and optimizer of a run, from objects, functions or names."""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from etude.callbacks import LRSchedule
from etude.callbacks.swapped import OptimizerWeights
from etude.checkpoint.optimizer_needs import needed_state
from etude.config import lookup
from etude.config.signature import parameters_of
from etude.core import ConfigError, Task, TrainingError
from etude.core.deferred import recording_of
from etude.core.spelling import listed
from etude.distributed.agreement import check_model
from etude.distributed.parallel import check_inside, check_whole, wrap_data_parallel
from etude.distributed.shards import model_param
from etude.engine.callback import Callback
from etude.engine.capture import Capture
from etude.engine.captured_evaluation import CapturedEvaluation
from etude.engine.compiled import CompiledTask
from etude.engine.splitter import MicroBatchSplitter
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.optim import AdamW
from etude.optim.device import DeviceOptimizer
from etude.optim.eager import without_compiler
from etude.optim.elements import check_divisible
from etude.optim.groups import NamedParams, names_of, outer_params
from etude.optim.schedule_free import HasModes
from etude.optim.scheduled import Setting, set_setting
from etude.optim.several import Optimizers, check_shares, everything_in, optimizers_in, owner_of
from etude.trainer.arguments import Section, build_named, expect
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine, making_model

if TYPE_CHECKING:
    from etude.distributed.sharding import Shards

logger = logging.getLogger("etude")

_OF_KERNELS = ("fused", "foreach", "capturable")
"""Arguments of optimizers that are chosen for the device."""
_OF_STEPPED = ("lr", "momentum", "betas")
"""Arguments of optimizers that a torch scheduler may change; it has a warning of its own."""

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


@contextmanager
def hyperparameters(
    optimizer: torch.optim.Optimizer, callbacks: Iterable[Callback], *, keep: bool | None
) -> Iterator[None]:
    """Load a checkpoint in this context; with `keep`, learning rate, weight decay and so on do not change.

    These are arguments of the optimizer. What else a group holds is state, such as a count of steps. With None they
    are those of the checkpoint, and a warning names those that change.
    """
    known = [_arguments(optimizer, place) for place in range(len(optimizer.param_groups))]
    mine = [
        {key: value for key, value in group.items() if key in names or key.startswith("initial_")}
        for group, names in zip(optimizer.param_groups, known, strict=True)
    ]
    is_stepped = any(isinstance(one, LRSchedule) for one in callbacks)  # it changes rates, and may change momentum
    if keep and is_stepped:
        raise ConfigError(
            "keep_hyperparameters cannot change the rates inside a torch scheduler; use a function of the step, "
            "such as etude.optim.cosine"
        )
    yield
    moved = _OF_STEPPED if is_stepped else ()
    if keep is None and (changed := _differences(mine, optimizer.param_groups, moved)):
        logger.warning(
            "training continues with the settings of the checkpoint: %s; to change them, load it with "
            "load_checkpoint(path, keep_hyperparameters=True)%s",
            ", ".join(changed),
            " and use a function of the step in place of the torch scheduler" * is_stepped,
        )
    if not keep:
        return
    before = _shares_of_averages(optimizer)
    for group, settings in zip(optimizer.param_groups, mine, strict=True):
        for key in [one for one in group if one.startswith("initial_")]:  # base values of the checkpoint
            del group[key]
        group.update(settings)
    _complete_states(optimizer)
    if _shares_of_averages(optimizer) != before:
        for one in callbacks:
            if isinstance(one, OptimizerWeights):
                one.begin_again()  # the optimizer computes them from its averages


def _differences(
    given: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], moved: Collection[str] = ()
) -> list[str]:
    """Return "lr 0.1, not 0.2" for the settings that loading has changed, each once, without those `moved`."""
    pairs = [(_base_settings(one, own), _base_settings(own, own)) for own, one in zip(given, loaded, strict=True)]
    return list(
        dict.fromkeys(
            f"{key} {now[key]}, not {before[key]}"
            for now, before in pairs
            for key in before
            if now[key] != before[key] and key not in moved
        )
    )


def _base_settings(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return settings as words, those that have a schedule without its factor."""
    found = {key: group[key] for key in names if not key.startswith("initial_") and key not in _OF_KERNELS}
    for key in ("lr", *get_args(Setting)):
        if f"initial_{key}" in group:
            set_setting(found, key, group[f"initial_{key}"])
    return {key: _in_words(value) for key, value in found.items()}


def _in_words(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_in_words, value))})"
    is_number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
    return f"{float(value):.4g}" if is_number else str(value)


def _shares_of_averages(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the settings by which optimizers with averages compute the weights of training from them."""
    groups = [group for one in optimizers_in(optimizer) if isinstance(one, HasModes) for group in one.param_groups]
    return [group["betas"][0] if "betas" in group else group.get("momentum") for group in groups]


def _complete_states(optimizer: torch.optim.Optimizer) -> None:
    """Begin the states that settings need and a checkpoint lacks, such as those of `amsgrad`, with zeros."""
    for place, group in enumerate(optimizer.param_groups):
        owner = owner_of(optimizer, place)
        begun = [param for param in group["params"] if owner.state.get(param)]
        if not begun or isinstance(owner, DeviceOptimizer):  # these begin them by themselves
            continue
        settings = {key: value for key, value in group.items() if key != "params"}
        needed = needed_state(owner, settings, model_param(begun[0])) or {}
        for key in [key for key, like in needed.items() if isinstance(like, Tensor) and like.is_meta]:
            for param in begun:
                owner.state[param].setdefault(key, torch.zeros_like(param, requires_grad=False))


def _arguments(optimizer: torch.optim.Optimizer, place: int) -> set[str]:
    """Return the arguments of the optimizer that updates a group, also those that it passes on to its base classes."""
    kinds = [one for one in type(owner_of(optimizer, place)).__mro__ if issubclass(one, torch.optim.Optimizer)]
    return {name for one in kinds for name in inspect.signature(one).parameters} - {"params"}


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
