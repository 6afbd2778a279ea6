"""The aggregators and scalarizers of torchjd as weightings by name: `weighting: {name: mgda, max_iters: 50}`.

An aggregator makes one gradient of shared parameters from those of the tasks; a scalarizer makes one loss, and its
derivatives are the coefficients. The keys of a section are torchjd's own arguments; one that is a vector over tasks is
given by task name. Where torchjd has a method in both forms, the aggregator is meant. PCGrad, FAMO, DWA, IMTL-L,
uncertainty (torchjd: UW) and static (Constant, Sum) are our own. Methods with a state of their own
(ExcessMTL, GradVac, NashMTL, PCD) are left out: checkpoints could not hold it.

Most of these methods solve a small problem on the host: every step waits for the device once.
"""

import functools
import importlib
import inspect
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic_core import PydanticUndefined
from torch import Tensor

from etude.config.registry import register
from etude.config.signature import parameters_of
from etude.core.errors import ConfigError, TrainingError
from etude.core.random import aside, mix
from etude.multitask.weighting.base import Needs, Weighting, is_active

CLASSES = {
    "aligned_mtl": "aggregation.AlignedMTL",
    "cagrad": "aggregation.CAGrad",
    "config": "aggregation.ConFIG",
    "cosmos": "scalarization.COSMOS",
    "dualproj": "aggregation.DualProj",
    "fairgrad": "aggregation.FairGrad",
    "geometric_mean": "scalarization.GeometricMean",
    "graddrop": "aggregation.GradDrop",
    "imtl_g": "aggregation.IMTLG",
    "krum": "aggregation.Krum",
    "mean": "aggregation.Mean",
    "mgda": "aggregation.MGDA",
    "pbi": "scalarization.PBI",
    "random": "aggregation.Random",
    "stch": "scalarization.STCH",
    "trimmed_mean": "aggregation.TrimmedMean",
    "upgrad": "aggregation.UPGrad",
}
"""Names in config files, and the classes of torchjd they stand for."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Vector = Mapping[str, float]
"""Numbers by task."""


class TorchjdWeighting(Weighting):
    """A method of torchjd, made from its class and its settings; vectors over tasks are mappings from task names.

    `seed` is that of methods that draw random numbers, which are a function of it and the step. Tasks that are inactive
    in a step are left out of the method.
    """

    def __init__(self, tasks: Sequence[str], kind: type, seed: int = 0, **settings: Any) -> None:
        super().__init__(tasks)
        self.kind, self.seed = kind, seed
        self._settings = settings
        for name, values in settings.items():
            if isinstance(values, Mapping):
                self.vector(values, 0.0, name)
                if missing := [task for task in self.tasks if task not in values]:
                    raise ConfigError(f"{name} has no number for the task '{missing[0]}'; give one for each task")
        self._methods: dict[tuple[Any, ...], Any] = {}
        self._method(range(len(self.tasks)), torch.zeros(()))  # settings that it refuses are refused now

    def _method(self, places: Sequence[int], like: Tensor) -> Any:
        """Return the method for these tasks; made once."""
        key = (*places, like.device, like.dtype)
        if key not in self._methods:
            settings = dict(self._settings)
            for name, values in settings.items():
                if isinstance(values, Mapping):
                    settings[name] = torch.tensor([values[self.tasks[place]] for place in places]).to(like)
            try:
                self._methods[key] = self.kind(**settings)
            except ImportError as error:
                raise ConfigError(f"{' '.join(str(error).split())} (or: pip install 'etude[torchjd]')") from error
        return self._methods[key]

    def _call(self, places: Sequence[int], values: Tensor) -> Tensor:
        try:
            result: Tensor = self._method(places, values)(values)
        except ValueError as error:
            raise TrainingError(
                f"{self.kind.__name__} of torchjd, with {len(values)} of {len(self.tasks)} tasks in this step: {error}"
            ) from error
        return result


def _places(active: Tensor) -> list[int]:
    """Return the numbers of the tasks that are active in this step; the host waits for the device here."""
    return [place for place, part in enumerate(active.tolist()) if part]


class TorchjdAggregator(TorchjdWeighting):
    """Makes the gradient of shared parameters; the others take that of the weighted sum."""

    needs: ClassVar[Needs] = "gradients"

    @torch.no_grad()
    def merge(self, gradients: Tensor, step: int, active: Tensor) -> Tensor:
        """Return what the aggregator makes of the gradients of the active tasks."""
        places = _places(active)
        if not places:
            return torch.zeros_like(gradients[0])
        rows = gradients if len(places) == len(self.tasks) else gradients[places]
        with aside(mix(self.seed, step)):
            return self._call(places, rows).to(gradients.dtype)


class TorchjdScalarizer(TorchjdWeighting):
    """Weighs the losses by the derivatives of one loss made of them all."""

    needs: ClassVar[Needs] = "losses"
    used: Tensor
    """The coefficients of every task in the last step it was active in, for people."""

    def __init__(self, tasks: Sequence[str], kind: type, seed: int = 0, **settings: Any) -> None:
        super().__init__(tasks, kind, seed, **settings)
        self.register_buffer("used", torch.zeros(len(self.tasks)))

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the derivatives by the losses of the active tasks, times the scale."""
        places = _places(is_active(losses, scale))
        found = torch.zeros_like(losses)
        if places:
            values = losses.detach()[places].requires_grad_()
            with torch.enable_grad():
                total = self._call(places, values)
            found[places] = torch.autograd.grad(total, values)[0]
        found = found if scale is None else found * scale
        self.used[places] = found[places].to(self.used)
        return found

    def latest(self, scale: Tensor) -> Tensor:
        """Return the coefficients of the last step."""
        return self.used


class _Factory:
    """Makes one of the weightings; torchjd is imported when its signature is asked for, or when it is called."""

    def __init__(self, path: str) -> None:
        self._module, _, self._class = path.rpartition(".")

    def __call__(self, **settings: Any) -> TorchjdWeighting:
        made = TorchjdAggregator if self._module == "aggregation" else TorchjdScalarizer
        return made(kind=self.kind(), **settings)

    def kind(self) -> type:
        """Return the class of torchjd."""
        try:
            found: type = getattr(importlib.import_module(f"torchjd.{self._module}"), self._class)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self._class} is a method of torchjd (0.18 or newer), which is not installed: "
                f"pip install 'etude[torchjd]'"
            ) from error
        return found

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class as a file can give it, and `tasks` and `seed`; open if torchjd is not there to tell it."""
        parameters = [
            inspect.Parameter("tasks", _KEYWORD, annotation=Sequence[str]),
            inspect.Parameter("seed", _KEYWORD, annotation=int, default=0),
        ]
        try:
            arguments = parameters_of(self.kind())[0]
        except ConfigError:
            return inspect.Signature([*parameters, inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)])
        for name, (hint, default) in arguments.items():
            if (said := _in_files(hint)) is not None:
                default = inspect.Parameter.empty if default is PydanticUndefined else default
                parameters.append(inspect.Parameter(name, _KEYWORD, annotation=said, default=default))
        return inspect.Signature(parameters)


def _in_files(hint: Any) -> Any:
    """Return the type of an argument as a file can give it: a vector as a mapping; None for what no file can hold."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kept = [one for one in members if one in (int, float, bool, str) or typing.get_origin(one) is typing.Literal]
    if not kept and Tensor in members:
        kept = [Vector]
    if not kept:
        return None
    return functools.reduce(operator.or_, [*kept, None] if type(None) in members else kept)


for _name, _path in CLASSES.items():
    register("weighting", _name)(_Factory(_path))
