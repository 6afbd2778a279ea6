"""Checking a config without its data: everything but the data is built, with small or no weights."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from etude.callbacks.swapped import OptimizerWeights
from etude.config import RunDraft, Selection, build_selection
from etude.config.schema import check_installed
from etude.core import ConfigError
from etude.engine.callback import RunParts
from etude.engine.callback_list import CallbackList
from etude.engine.learning_rate import LearningRate
from etude.engine.recompute import recompute_activations
from etude.experiment.build import data_key
from etude.experiment.config import ExperimentConfig
from etude.losses import SupervisedTask
from etude.optim import AdamW
from etude.optim.groups import NamedParams, outer_params
from etude.optim.schedule_free import with_modes
from etude.trainer import resolve_device
from etude.trainer.arguments import as_callbacks
from etude.trainer.optimization import GroupsParameters, make_optimizer

_ANY: dict[str, Any] = {
    **dict.fromkeys(("num_classes", "out_features"), 10),
    "vocab_size": 1000,
    "n_types": 4,
    "input_shape": (3, 64, 64),
    "in_features": 3 * 64 * 64,
    "steps_per_epoch": 10**6,
}
"""Placeholders for sizes known from the data: no mistake of a config depends on them."""
_MANY_STEPS = 10**12


def check_experiment(config: ExperimentConfig) -> tuple[torch.optim.Optimizer, CallbackList]:
    """Raise ConfigError or DataError for anything that `train` would refuse before its first step without data.

    Nothing is downloaded or written. The model is built without memory for its weights. Returns the optimizer, with
    small weights, and the callbacks.
    """
    resolve_device(config.training.device)
    selection = config.require("model")
    data_key(config)
    _check_data(config)
    vocab_size = selection.arguments.get("vocab_size") or _ANY["vocab_size"]
    draft = RunDraft(config.sections, config.document, vocab_size=vocab_size)
    draft.model = on_meta(lambda: _build(config, "model", selection))
    if not isinstance(draft.model, nn.Module):
        raise ConfigError(f"{config.document.place('model')}: {selection.component.name} did not return an nn.Module")
    sections: list[Selection] = config.sections.get("callbacks") or []
    callbacks = [_build(config, f"callbacks.{place}", one) for place, one in enumerate(sections)]
    for feature in config.features:
        on_meta(partial(feature.after_model, draft))
    strategies: dict[str, Any] = {}
    for key in ("loss", "validation_loss"):
        loss = config.selection(key)
        if loss is not None and not loss.component.provided:  # otherwise it needs values known only from the data
            strategies[key] = _build(config, key, loss)
    model = draft.model
    task = draft.trainer.get("task") or SupervisedTask(strategies.get("loss"))
    listed = CallbackList(as_callbacks([*callbacks, *draft.callbacks], config=config.training))
    for one in listed:
        one.check_installed()
        one.prepare(model)
    if (blocks := config.training.recomputed_blocks) is not None:
        recompute_activations(model, **blocks)
    # As in a run before callbacks are bound: parameters that are unfrozen later are in the optimizer from the start.
    optimizer = small_optimizer(config, small_weights(model))
    listed.bind(RunParts(model, task))
    if with_modes(optimizer):
        listed.append(swap := OptimizerWeights())
        swap.bind(RunParts(model, task, learning_rate=LearningRate(optimizer, None)))
    if (scheduler := config.selection("scheduler")) is not None:
        # A run has at most `max_steps`; otherwise its length depends on the data.
        schedule = _build(config, "scheduler", scheduler, total_steps=config.training.max_steps or _MANY_STEPS)
        try:
            LearningRate(optimizer, schedule)
        except ConfigError as error:
            raise ConfigError(f"{config.document.place('scheduler')}: {error}") from error
    return optimizer, listed


def _check_data(config: ExperimentConfig) -> None:
    """Raise an error if a data set needs a package that is not installed."""
    found = {"data": config.selection("data")}
    for feature in config.features:
        found |= dict(feature.data_sets(config.sections).values())
    for path, selection in found.items():
        if selection is not None:
            check_installed(selection, path=path, document=config.document)


def small_weights(model: nn.Module) -> "SmallWeights":
    """Return small weights with the names and numbers of dimensions of the model's, in their order and groups."""
    found = [(name, id(one), _weight_like(one)) for name, one in model.named_parameters()]
    small = {key: one for _, key, one in found}
    own = model.parameter_groups() if isinstance(model, GroupsParameters) else []
    groups = [{**group, "params": [small[id(one)] for one in group["params"]]} for group in own]
    outer = frozenset(id(small[key]) for key in outer_params(model))
    return SmallWeights({name: one for name, _, one in found}, groups, outer)


def small_optimizer(config: ExperimentConfig, small: "SmallWeights") -> torch.optim.Optimizer:
    """Build the optimizer on small weights."""
    selection = config.selection("optimizer")

    def build(params: NamedParams) -> Any:
        params = NamedParams(params, params.names, small.outer)
        return AdamW(params) if selection is None else _build(config, "optimizer", selection, params=params)

    return make_optimizer(build, small, config.sections["training"])


class SmallWeights(nn.Module):
    """Small weights under the names of a model's."""

    def __init__(self, weights: dict[str, nn.Parameter], groups: list[dict[str, Any]], outer: frozenset[int]) -> None:
        """`outer` are the ids of those of embeddings and of the output layer."""
        super().__init__()
        self.weights = nn.ParameterList(weights.values())
        self.names, self.groups, self.outer = list(weights), groups, outer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups that the model tells; none if it tells none."""
        return self.groups

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return them under the names of the model's."""
        return zip(self.names, self.weights, strict=True)


def _weight_like(weight: nn.Parameter) -> nn.Parameter:
    shape = (1,) if is_lazy(weight) else [min(size, 2) for size in weight.shape]
    return nn.Parameter(torch.zeros(shape, dtype=weight.dtype), requires_grad=weight.requires_grad)


def on_meta(make: Callable[[], Any]) -> Any:
    """Build without memory for weights; if that fails, build normally, and errors of that are mistakes."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # user code may read its weights
        return make()


def _build(config: ExperimentConfig, path: str, selection: Selection, **provided: Any) -> Any:
    """Build a component; values known from the data are supplied only where required."""
    parameters = inspect.signature(selection.component.factory).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty}
    stand_ins = {name: value for name, value in _ANY.items() if name in needed or name == "steps_per_epoch"}
    return build_selection(selection, path=path, document=config.document, provided={**stand_ins, **provided})
