"""Aggregators and scalarizers of torchjd as named weightings: `weighting: {name: mgda, max_iters: 50}`.

An aggregator combines the tasks' gradients of shared parameters into one; a scalarizer combines the losses into one,
and its derivatives are the coefficients. The keys of a section are torchjd's own arguments; vectors over tasks are
mappings from task names. If torchjd has a method in both forms, the aggregator is used. PCGrad, FAMO, DWA, IMTL-L,
uncertainty (torchjd: UW) and static (Constant, Sum) are our own.

Most of these methods solve a small problem on the host, so every step synchronises once.
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
    "excess_mtl": "aggregation.ExcessMTL",
    "fairgrad": "aggregation.FairGrad",
    "geometric_mean": "scalarization.GeometricMean",
    "graddrop": "aggregation.GradDrop",
    "gradvac": "aggregation.GradVac",
    "imtl_g": "aggregation.IMTLG",
    "krum": "aggregation.Krum",
    "mean": "aggregation.Mean",
    "mgda": "aggregation.MGDA",
    "nash_mtl": "aggregation.NashMTL",
    "pbi": "scalarization.PBI",
    "pcd": "aggregation.PCD",
    "random": "aggregation.Random",
    "stch": "scalarization.STCH",
    "trimmed_mean": "aggregation.TrimmedMean",
    "upgrad": "aggregation.UPGrad",
}
"""Names in config files, and the torchjd classes they refer to."""

STATE: dict[str, dict[str, tuple[int, float]]] = {
    "GradVac": {"gramian_weighting._phi_t": (2, 0.0)},
    "NashMTL": {"weighting.prvs_alpha": (1, 1.0)},
    "PCD": {"gramian_weighting._sq_norm_ema": (1, 0.0), "gramian_weighting._n_steps": (0, 0.0)},
}
"""State of a method across steps: attributes, how many of their dimensions are tasks, and their initial value."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Vector = Mapping[str, float]
"""Numbers by task."""

_NEEDS_ALL_TASKS = frozenset({"PCD"})
"""Methods whose state cannot be used with only some of the tasks."""


class TorchjdWeighting(Weighting):
    """A torchjd method, created from its class and settings; vectors over tasks are mappings from task names.

    Methods that draw random numbers derive them from `seed` and the step. Tasks that are inactive in a step are
    excluded from the method, and so is their part of its state.
    """

    def __init__(self, tasks: Sequence[str], kind: type, seed: int = 0, **settings: Any) -> None:
        super().__init__(tasks)
        self.kind, self.seed = kind, seed
        self._settings = settings
        self._vectors = [name for name, value in settings.items() if isinstance(value, Mapping)]
        for name in self._vectors:
            self.vector(settings[name], 0.0, name)
            if missing := [task for task in self.tasks if task not in settings[name]]:
                raise ConfigError(f"{name} has no value for the task '{missing[0]}'; set one for each task")
        self._methods: dict[tuple[Any, ...], Any] = {}
        self._state = STATE.get(kind.__name__, {})
        from torchjd import Stateful

        if issubclass(kind, Stateful) and not self._state:
            raise ConfigError(
                f"{kind.__name__} of torchjd has state that checkpoints cannot hold, so a run could not be resumed; "
                "choose another weighting"
            )
        for path, (dimensions, first) in self._state.items():
            self.register_buffer(_buffer(path), torch.full((len(self.tasks),) * dimensions, first))
        self._make(range(len(self.tasks)), torch.zeros(()))  # reject invalid settings early

    def _make(self, places: Sequence[int], like: Tensor) -> Any:
        """Return the method for these tasks."""
        settings = dict(self._settings)
        for name in self._vectors:
            settings[name] = torch.tensor([settings[name][self.tasks[place]] for place in places]).to(like)
        if "n_tasks" in inspect.signature(self.kind).parameters:
            settings["n_tasks"] = len(places)
        try:
            return self.kind(**settings)
        except ImportError as error:
            raise ConfigError(f"{' '.join(str(error).split())} (or: pip install 'etude[torchjd]')") from error

    def _method(self, places: Sequence[int], values: Tensor) -> Any:
        key = (*places, values.device, values.dtype)
        if key not in self._methods:
            self._methods[key] = method = self._make(places, values)
            if self._state:
                self._call(
                    method, values
                )  # this call creates what depends on shapes; the state it leaves is replaced
        return self._methods[key]

    def _call(self, method: Any, values: Tensor) -> Tensor:
        try:
            result: Tensor = method(values)
        except ValueError as error:
            raise TrainingError(
                f"{self.kind.__name__} of torchjd, with {len(values)} of {len(self.tasks)} tasks in this step: {error}"
            ) from error
        return result

    def _places(self, active: Tensor) -> list[int]:
        """Return the values of the active tasks of this step; this synchronises with the device."""
        places = [place for place, part in enumerate(active.tolist()) if part]
        if 0 < len(places) < len(self.tasks) and self.kind.__name__ in _NEEDS_ALL_TASKS:
            raise TrainingError(
                f"{self.kind.__name__} of torchjd needs all tasks in every step, here are "
                f"{', '.join(self.tasks[place] for place in places)}; set data.draw to together, or choose another "
                f"weighting"
            )
        return places


class TorchjdAggregator(TorchjdWeighting):
    """Combines the gradients of shared parameters; others get that of the weighted sum."""

    needs: ClassVar[Needs] = "gradients"

    @torch.no_grad()
    def merge(self, gradients: Tensor, step: int, active: Tensor) -> Tensor:
        """Return the aggregate of the gradients of the active tasks."""
        places = self._places(active)
        if not places:
            return torch.zeros_like(gradients[0])
        rows = gradients if len(places) == len(self.tasks) else gradients[places]
        with aside(mix(self.seed, step)):
            method = self._method(places, rows)
        with aside(mix(self.seed, step)):
            self._put_state(method, places, step)
            result = self._call(method, rows)
            for path, (dimensions, _) in self._state.items():
                kept = self.get_buffer(_buffer(path))
                kept[_at(places, dimensions)] = torch.as_tensor(operator.attrgetter(path)(method)).to(kept)
        return result.to(gradients.dtype)

    def _put_state(self, method: Any, places: Sequence[int], step: int) -> None:
        """Set the method's state for these tasks."""
        for path, (dimensions, _) in self._state.items():
            part, _, name = path.partition(".")
            value, now = self.get_buffer(_buffer(path))[_at(places, dimensions)], getattr(getattr(method, part), name)
            new = value.to(now) if isinstance(now, Tensor) else value.cpu().double().numpy()
            setattr(getattr(method, part), name, new)
        if self.kind.__name__ == "NashMTL":  # its call counter: at 0 it would set up its problem again
            method.weighting.step = float(step or method.update_weights_every)


class TorchjdScalarizer(TorchjdWeighting):
    """Weights the losses by the derivatives of a combined loss."""

    needs: ClassVar[Needs] = "losses"
    used: Tensor
    """The coefficients of every task in the last step in which it was active, for logs."""

    def __init__(self, tasks: Sequence[str], kind: type, seed: int = 0, **settings: Any) -> None:
        super().__init__(tasks, kind, seed, **settings)
        self.register_buffer("used", torch.zeros(len(self.tasks)))

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the derivatives with respect to the losses of the active tasks, times the scale."""
        places = self._places(is_active(losses, scale))
        found = torch.zeros_like(losses)
        if places:
            values = losses.detach()[places].requires_grad_()
            with torch.enable_grad():
                total = self._call(self._method(places, values), values)
            found[places] = torch.autograd.grad(total, values)[0]
        found = found if scale is None else found * scale
        self.used[places] = found[places].to(self.used)
        return found

    def latest(self, scale: Tensor) -> Tensor:
        """Return the coefficients of the last step."""
        return self.used


class _Factory:
    """Creates one of the weightings; torchjd is imported when its signature is needed or when it is called."""

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
        """The signature of the class as a file can give it, with `tasks` and `seed`; open if torchjd is missing."""
        parameters = [
            inspect.Parameter("tasks", _KEYWORD, annotation=Sequence[str]),
            inspect.Parameter("seed", _KEYWORD, annotation=int, default=0),
        ]
        try:
            arguments = parameters_of(self.kind())[0]
        except ConfigError:
            return inspect.Signature([*parameters, inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)])
        for name, (hint, default) in arguments.items():
            if (said := _in_files(hint)) is not None and name != "n_tasks":
                default = inspect.Parameter.empty if default is PydanticUndefined else default
                parameters.append(inspect.Parameter(name, _KEYWORD, annotation=said, default=default))
        return inspect.Signature(parameters)


def _in_files(hint: Any) -> Any:
    """Return the type of an argument in a file: a mapping for a vector; None if no file can hold it."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kept = [one for one in members if one in (int, float, bool, str) or typing.get_origin(one) is typing.Literal]
    if not kept and Tensor in members:
        kept = [Vector]
    if not kept:
        return None
    return functools.reduce(operator.or_, [*kept, None] if type(None) in members else kept)


def _buffer(path: str) -> str:
    """Return the name of the buffer for a part of a method's state.

    >>> _buffer("gramian_weighting._phi_t")
    'phi_t'
    """
    return path.rpartition(".")[2].strip("_")


def _at(places: Sequence[int], dimensions: int) -> Any:
    """Return an index of the elements of these tasks along this many dimensions."""
    return (..., list(places), ([[place] for place in places], list(places)))[dimensions]


for _name, _path in CLASSES.items():
    register("weighting", _name)(_Factory(_path))
