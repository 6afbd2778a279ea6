"""`predict`: the outputs of any model for any data, without a Trainer."""

from typing import Any

import torch
from torch import nn

from etude.core import ConfigError, Task
from etude.core.arguments import as_whole
from etude.core.model import is_divided
from etude.engine.precision import PrecisionName
from etude.trainer.arguments import as_config, check_model
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine


def predict(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    precision: PrecisionName = "fp32",
    task: Task | None = None,
) -> Any:
    """Return the model's outputs for all samples, in the order of the data, on the CPU, as `Trainer.predict` does.

    data: a tensor or array of inputs, a pair of inputs and labels, a Dataset, or a loader, which has its own batch
        size.
    device: where the model runs, and where it stays; by default where it is.
    task: a `Task` that calls the model in its own way, such as a `MultiTask`.

    >>> predict(nn.Linear(4, 3), torch.zeros(10, 4)).shape
    torch.Size([10, 3])

    Raises ConfigError for a model that processes divide: only its Trainer knows which of them have the same samples.
    """
    first = next(check_model(model).parameters(), None)
    where = str(device if device is not None else "cpu" if first is None else first.device)
    if any(map(is_divided, model.parameters())):
        raise ConfigError("the model is divided over processes; use `predict` of the Trainer that has divided it")
    size = as_whole("batch_size", batch_size, least=1)
    config = as_config({"batch_size": size, "precision": precision}, device=where, use_amp=None, compile_model=None)
    machine = Machine.from_config(config)
    model.to(machine.device)
    loaders = Loaders(config=config, machine=machine, model=model)
    return machine.predict(model, task if task is not None else Task(), loaders.in_order(data))
