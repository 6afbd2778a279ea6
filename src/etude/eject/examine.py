"""Model, optimizer, schedule and loss of an experiment as source text; what is not plain is refused."""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from etude.config.signature import parameters_of
from etude.core import ConfigError
from etude.core.random import aside, host_draws
from etude.data import DataSplits
from etude.eject.plain import Transformer
from etude.eject.refusal import refuse
from etude.eject.source import Sources
from etude.eject.text import LossText, call, literal
from etude.engine.objective import Objective
from etude.experiment import ExperimentConfig
from etude.losses.inferred import InferredLoss
from etude.losses.language import LanguageModelingLoss
from etude.losses.strategies import ClassificationLoss, LossStrategy
from etude.losses.task import SupervisedTask
from etude.losses.wrapped import FunctionLoss
from etude.models import CausalTransformerLM
from etude.trainer import Trainer

_PLAIN_MODELS: dict[Any, tuple[Any, tuple[str, ...]]] = {CausalTransformerLM: (Transformer, ("n_types", "max_len"))}
"""Model → the same model without what only other uses need, and arguments that it does not have."""
_KERNELS = ("foreach", "fused")
_REGRESSION: dict[Any, tuple[str, tuple[str, ...]]] = {
    nn.MSELoss: ("mse_loss", ()),
    nn.L1Loss: ("l1_loss", ()),
    nn.HuberLoss: ("huber_loss", ("delta",)),
}
"""Loss of torch → its function and the options of it."""


def check_trainer(config: ExperimentConfig, trainer: Trainer) -> None:
    """Raise ConfigError for a task, an objective or parameters that the written step does not have."""
    if type(trainer.task) is not SupervisedTask or type(trainer.step.objective) is not Objective:
        raise refuse(config, "loss", f"{type(trainer.task).__name__} is more than one plain loss")
    params = list(trainer.model.parameters())
    updated = [id(one) for group in trainer.optimizer.param_groups for one in group["params"]]
    if sorted(updated) != sorted(map(id, params)):
        raise refuse(config, "optimizer", "it does not have each parameter of the model once; some may be frozen")
    if {param.dtype for param in params} not in ({torch.float32}, {torch.float64}):
        raise refuse(config, "model", "its weights are not all float32, or all float64")
    if trainer.learning_rate.callbacks:
        raise refuse(config, "scheduler", "a schedule that follows a metric is not written; use another one")


def optimizer_text(config: ExperimentConfig, trainer: Trainer) -> list[str]:
    """Return the lines that make torch's optimizer with the settings and kernels of the trainer's."""
    optimizer = trainer.optimizer
    kinds = [kind for kind in type(optimizer).__mro__ if vars(torch.optim).get(kind.__name__) is kind]
    own = type(optimizer).__module__ == "etude.optim.optimizers"
    if not kinds or not (own or kinds[0] is type(optimizer)):
        raise refuse(config, "optimizer", f"{type(optimizer).__name__} is not an optimizer of torch")
    known = inspect.signature(kinds[0]).parameters
    first, *others = optimizer.param_groups
    given = {
        name: first[name]
        for name, parameter in known.items()
        if name in first and name not in ("lr", "params", *_KERNELS) and first[name] != parameter.default
    }
    given |= {name: True for name in _KERNELS if first.get(name)}
    name = f"torch.optim.{kinds[0].__name__}"
    if not others:
        return [f"optimizer = {call(name, given, 'model.parameters()', 'lr=LEARNING_RATE')}"]
    lines = []
    for group in optimizer.param_groups:
        changed = {key: group[key] for key in known if key in group and key != "params" and group[key] != first[key]}
        settings = [f'"{key}": {literal(value)}' for key, value in changed.items()]
        lines += [f"    {line}" for line in _members(trainer.model, group["params"], settings)]
    named = ["named = dict(model.named_parameters())"] if any("named[" in line for line in lines) else []
    return [*named, "groups = [", *lines, "]", f"optimizer = {call(name, given, 'groups', 'lr=LEARNING_RATE')}"]


def _members(model: nn.Module, params: list[Tensor], settings: list[str]) -> list[str]:
    """Return the lines of a parameter group: all matrices, all vectors, or parameters by name."""
    ids = [id(one) for one in params]
    for test in (">= 2", "< 2"):
        if ids == [id(one) for one in model.parameters() if (one.dim() >= 2) == (test == ">= 2")]:
            chosen = f'"params": [param for param in model.parameters() if param.dim() {test}]'
            return [f"{{{', '.join([chosen, *settings])}}},"]
    names = {id(one): name for name, one in model.named_parameters()}
    listed = [f'        named["{names[one]}"],' for one in ids]
    return ["{", '    "params": [', *listed, "    ],", *(f"    {one}," for one in settings), "},"]


def add_schedule(config: ExperimentConfig, trainer: Trainer, sources: Sources) -> bool:
    """Add the schedule as the function `lr_factor`; return whether there is one."""
    schedule = trainer.learning_rate.schedule
    if schedule is None:
        return False
    if not isinstance(schedule, FunctionType):
        raise refuse(config, "scheduler", "only one function of the step is written, for all groups and no metric")
    with placed(config, "scheduler"):
        sources.add_closure(schedule, "lr_factor")
    return True


def model_call(config: ExperimentConfig, splits: DataSplits, sources: Sources) -> str:
    """Add the source of the model; return the expression that makes it."""
    selection = config.require("model")
    factory = selection.component.factory
    known = parameters_of(factory)[0]
    sizes = {name: size for name, size in splits.model_sizes().items() if name in known}
    given = {key: value for key, value in (sizes | selection.arguments).items() if value != known[key][1]}
    plain, absent = _PLAIN_MODELS.get(factory, (factory, ()))
    for key in absent:
        if key != "max_len" and given.get(key):
            raise refuse(config, f"model.{key}", "the plain model has no such argument")
    given = {key: value for key, value in given.items() if key not in absent}
    with placed(config, "model"):
        return call(sources.add(plain), given)


@contextlib.contextmanager
def placed(config: ExperimentConfig, key: str) -> Iterator[None]:
    """Report what cannot be written with the key that it belongs to."""
    try:
        yield
    except (ConfigError, TypeError) as error:
        raise refuse(config, key, str(error)) from error


def examine(config: ExperimentConfig, trainer: Trainer) -> tuple[LossText, bool]:
    """Run a copy of the model on the first batch; return its loss, and whether it draws random numbers in training."""
    model, calls = copy.deepcopy(trainer.model), list[tuple[Any, Any]]()
    assert trainer.loaders.train is not None
    batch = next(iter(trainer.loaders.train.iterate(0)))
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    outputs = list[Any]()
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    draws = []
    with aside(0), torch.no_grad():
        for mode in (True, False):
            before = host_draws()
            trainer.task(model.train(mode), batch, metrics=False)
            draws.append(before != host_draws())
    given = [value for args, kwargs in calls[:1] for value in (*args, *kwargs.values()) if value is not None]
    if len(given) != 1 or not isinstance(given[0], Tensor) or not isinstance(outputs[0], Tensor):
        raise refuse(config, "model", "its forward must take one tensor and return one")
    if draws[1]:
        raise refuse(config, "model", "it draws random numbers in evaluation too")
    strategy = trainer.task.strategy  # type: ignore[attr-defined]
    return _loss_text(config, strategy.chosen if isinstance(strategy, InferredLoss) else strategy), draws[0]


def _loss_text(config: ExperimentConfig, strategy: LossStrategy | None) -> LossText:
    """Return the text for a loss; raise ConfigError, with the key, if it cannot be written."""
    half = ".float()" if config.sections["training"].resolved_precision == "bf16" else ""
    if type(strategy) is FunctionLoss and type(strategy.function) in _REGRESSION:
        name, names = _REGRESSION[type(strategy.function)]
        given = {key: getattr(strategy.function, key) for key in names}
        total = call(f"F.{name}", given | {"reduction": "sum"}, f"predictions{half}", "labels")
        return LossText(total, "labels.numel()", output="predictions")
    if type(strategy) not in (LanguageModelingLoss, ClassificationLoss):
        raise refuse(
            config, "loss", f"{type(strategy).__name__} is not cross entropy, mse, l1 or huber; use one of them"
        )
    assert isinstance(strategy, (LanguageModelingLoss, ClassificationLoss))
    if isinstance(strategy, ClassificationLoss) and strategy.class_weights is not None:
        raise refuse(config, "loss.class_weights", "they are not written; remove them")
    is_language = isinstance(strategy, LanguageModelingLoss)
    if isinstance(strategy, LanguageModelingLoss):
        if strategy.fused_head is not False:
            raise refuse(config, "loss.fused_head", "it is not plain PyTorch; set it to false")
        if strategy.shift:
            raise refuse(config, "loss.shift", "the labels are the next tokens already; remove it")
    ignored = strategy.ignore_index if strategy.ignore_index is not None and strategy.ignore_index >= 0 else None
    options = {"ignore_index": ignored, "label_smoothing": strategy.label_smoothing or None}
    listed = "".join(f", {key}={value!r}" for key, value in options.items() if value is not None)
    tensors = f"logits{half}.flatten(0, 1), labels.flatten()" if is_language else f"logits{half}, labels"
    count = "labels.numel()" if ignored is None else f"int((labels != {ignored}).sum())"
    total = f'F.cross_entropy({tensors}, reduction="sum"{listed})'
    return LossText(total, count, is_language=is_language and not strategy.label_smoothing)
