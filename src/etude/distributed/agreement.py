"""What must be the same on all ranks: versions, settings, model and data. A difference is refused before training."""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.core.errors import ConfigError, TrainingError
from etude.core.spelling import shorten
from etude.lazy import package_version

if TYPE_CHECKING:
    from etude.distributed.world import World

_MOST = 3
"""Differences in one message."""
_CLOSE = 0.01
"""How much losses of the same samples may differ: rounding in half precision."""


def check_same(world: "World", facts: Mapping[str, object], remedy: str) -> None:
    """Raise ConfigError on every rank if a fact, which must be JSON, is not the same on all ranks."""
    if world.size == 1:
        return
    found = [json.loads(text) for text in world.gather_text(json.dumps(facts, default=str))]
    names = dict.fromkeys(name for one in found for name in one)
    different = [name for name in names if any(one.get(name) != found[0].get(name) for one in found)]
    if different:
        words = "; ".join(f"{name}: {_by_rank([one.get(name) for one in found])}" for name in different[:_MOST])
        more = f"; {len(different) - _MOST} more" if len(different) > _MOST else ""
        error = ConfigError(f"the processes of this run differ in {words}{more}; {remedy}")
        error.reported_elsewhere = not world.is_main
        raise error


def check_losses(world: "World", sums: Mapping[str, Tensor]) -> None:
    """Raise TrainingError if ranks that divide layers, and so have the same samples, found different losses."""
    assert world.parent is not None
    mine = [world.rank, {name: float(one) for name, one in sums.items()}]  # synchronises
    first: dict[int, dict[str, float]] = {}
    for rank, found in map(json.loads, world.parent.gather_text(json.dumps(mine))):
        for name, value in first.setdefault(rank, found).items():
            if not math.isclose(found[name], value, rel_tol=_CLOSE, abs_tol=1e-6) and math.isfinite(value):
                raise TrainingError(
                    f"processes that divide layers found different losses for the same samples ({name}: {value:g} and "
                    f"{found[name]:g}), so the output of a layer is still divided; let the tensor plan end with "
                    "rowwise or colwise_gathered"
                )


def _by_rank(values: list[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shorten(str(value), 60), []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(few) > 1)} {', '.join(map(str, few[:4]))}{' …' * (len(few) > 4)}"
        for value, few in ranks.items()
    )


def check_versions(world: "World") -> None:
    """Refuse processes with different versions of the library, torch or Python."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"etude": package_version(), "torch": torch.__version__, "Python": python}
    check_same(world, versions, "install the same versions on all machines")


def check_model(world: "World", model: nn.Module) -> None:
    """Refuse models whose parameters have other names, shapes or dtypes on another rank, or no shapes yet."""
    params = [*model.named_parameters()]
    if lazy := [name for name, param in params if is_lazy(param)]:
        raise ConfigError(
            f"{lazy[0]} has no shape yet, so processes cannot share it; run the model on a batch before training"
        )
    shapes = json.dumps([[name, list(param.shape), str(param.dtype)] for name, param in params])
    described = f"{sum(param.numel() for _, param in params):,} parameters, shapes {_digest(shapes)}"
    check_same(world, {"the model": described}, "create the same model in every process")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
