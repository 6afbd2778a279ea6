"""Checking a config as far as that goes without its data: everything is built but the data, and small or not at all."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from etude.config import Selection, build_selection
from etude.core import ConfigError
from etude.engine.recompute import recompute_activations
from etude.experiment.config import ExperimentConfig
from etude.experiment.dialects import MOVED_KEYS
from etude.losses import SupervisedTask
from etude.multimodal.loss_section import LOSS_PROVIDED
from etude.multitask.build import build_tasks, own_data
from etude.optim import AdamW
from etude.trainer import resolve_device
from etude.trainer.assembly import blocks_to_recompute, make_optimizer
from etude.trainer.callback_checks import check_callbacks

_ANY = {"vocab_size": 1000, "n_types": 4, "steps_per_epoch": 10**6}
"""Stand for what the data tells: no mistake of a config depends on them."""
_MANY_STEPS = 10**12


def check_experiment(config: ExperimentConfig) -> None:
    """Raise ConfigError or DataError for what `train` would refuse before its first step, if no data is needed for it.

    Nothing is downloaded or written. The model is built without memory for its weights.
    """
    resolve_device(config.training.device)
    selection = config.require("model")
    if not own_data(config):
        config.require("data")
    model = _on_meta(lambda: _build(config, "model", selection))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{config.document.place('model')}: {selection.component.name} made no nn.Module")
    task: Any = SupervisedTask()
    if config.tasks:
        vocab_size = selection.arguments.get("vocab_size") or _ANY["vocab_size"]
        built = _on_meta(lambda: build_tasks(config, model, vocab_size, {}))
        model, task = built.model, built.task
    elif (loss := config.selection("loss")) is not None and not _asks(loss, LOSS_PROVIDED):
        task = SupervisedTask(_build(config, "loss", loss))
    sections: list[Selection] = config.sections.get("callbacks") or []
    check_callbacks(
        [_build(config, f"callbacks.{place}", one) for place, one in enumerate(sections)],
        task,
        model,
    )
    if config.training.activation_checkpointing is not False:
        recompute_activations(model, **blocks_to_recompute(config.training.activation_checkpointing))
    _check_optimizer(config, model)
    if (scheduler := config.selection("scheduler")) is not None:
        # A run has at most `max_steps`; how many it has otherwise, only the data tells.
        _build(config, "scheduler", scheduler, total_steps=config.training.max_steps or _MANY_STEPS)


def _check_optimizer(config: ExperimentConfig, model: nn.Module) -> None:
    """Build the optimizer on small weights, of as many dimensions as the model's."""
    selection = config.selection("optimizer")

    def build(_groups: Any) -> Any:
        params = [_weight_like(one) for one in model.parameters() if one.requires_grad]
        return AdamW(params) if selection is None else _build(config, "optimizer", selection, params=params)

    make_optimizer(build, model, config.training.model_copy(update=dict.fromkeys(MOVED_KEYS)))


def _weight_like(weight: nn.Parameter) -> nn.Parameter:
    shape = (1,) if is_lazy(weight) else [min(size, 2) for size in weight.shape]
    return nn.Parameter(torch.zeros(shape, dtype=weight.dtype))


def _on_meta(make: Callable[[], Any]) -> Any:
    """Build without memory for weights; what cannot be built so is built as it is, and what fails then is a mistake."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # code of any kind, which may read its weights
        return make()


def _asks(selection: Selection, names: tuple[str, ...]) -> bool:
    """Return whether a component takes something that only the data has."""
    return any(name in inspect.signature(selection.component.factory).parameters for name in names)


def _build(config: ExperimentConfig, path: str, selection: Selection, **provided: Any) -> Any:
    """Build a component; of what the data would tell, it is given what it cannot do without."""
    parameters = inspect.signature(selection.component.factory).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty}
    stand_ins = {name: value for name, value in _ANY.items() if name in needed or name == "steps_per_epoch"}
    return build_selection(selection, path=path, document=config.document, provided={**stand_ins, **provided})
