"""State that a captured step treats as constant: memory addresses and values kept on the host.

`Watched` is checked at every step, so it covers only what users change between steps. `host_state` finds nearly all
state of a model, a task and their functions: it is compared once, before and after an eager step.
"""

import functools
import random
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.engine.update import Updater, state_tensors
from etude.optim.several import everything_in

PLAIN = (bool, int, float, str, type(None), np.generic)
"""Types of attributes that are compared by value."""
MOST_OBJECTS = 100_000
"""Limit on inspected objects; a model with more keeps data in them, not settings."""
_DATA = (*PLAIN, Tensor, list, dict, set, deque)
_LEAVES = (type, ModuleType, BuiltinFunctionType, CodeType)
_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")
_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRADIENT_HOOKS, _GRADIENT_POST_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_ELSEWHERE = ("training", "_is_full_backward_hook")
"""Attributes that `modes` covers."""
_FIXED = ("torch.nn.modules.linear", "torch.nn.modules.conv", "torch.nn.modules.container")
"""Modules whose numeric attributes are only the sizes of their weights."""
_OPTIMIZER_HOOKS = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Watched:
    """Parameters, buffers, modules and optimizer state of a run, and numeric attributes of modules."""

    PARTS = (
        "parameters are moved or replaced",
        "modules are replaced, or get other attributes,",
        "the state of the optimizer is replaced",
        "buffers are replaced",
        "tensors that modules keep are replaced",
        "numbers that modules keep change",
    )
    """Descriptions of a change in each component of `now`."""

    def __init__(self, model: nn.Module, updater: Updater) -> None:
        self.model, self.updater = model, updater
        self._optimizers = list(everything_in(updater.optimizer))
        self.look()

    def look(self) -> None:
        """Collect all of it again."""
        self._modules = list(self.model.modules())
        self._hooks = list(chain.from_iterable(map(_HOOKS, self._modules)))
        self._vars = [vars(one) for one in self._modules]
        self._children = [one._modules for one in self._modules]
        self._parameters = [one._parameters for one in self._modules if one._parameters]
        self._buffers = [one._buffers for one in self._modules if one._buffers]
        self._params = _once((*self.updater.params, *self.model.parameters()))
        self._buffer_tensors = _once(self.model.buffers())
        self._attributes = [
            (values, name) for values in self._vars for name, value in values.items() if isinstance(value, Tensor)
        ]
        plain = (
            (
                vars(one),
                [name for name, value in vars(one).items() if isinstance(value, PLAIN) and name not in _ELSEWHERE],
            )
            for one in self._modules
            if type(one).__module__ not in _FIXED
        )
        self._numbers = [(itemgetter(*names, names[0]), values) for values, names in plain if names]
        self._dicts = [*self._vars, *self._children, *self._parameters, *self._buffers]
        self._states = list(self.updater.optimizer.state.values())
        self._lengths = [*map(len, self._dicts), *map(len, self._states)]
        self._pointers = [*map(Tensor.data_ptr, self._params), *map(Tensor.data_ptr, self._buffer_tensors)]
        self._objects = list(self._held())  # references keep ids from being reused
        self._values_now = [get(values) for get, values in self._numbers]
        self._before = self.now()

    def _held(self) -> Iterator[Any]:
        """Return the objects that must stay the same."""
        inside = self._values((*self._states, *self._children, *self._parameters, *self._buffers))
        attributes = [values.get(name) for values, name in self._attributes]
        return chain(self.updater.optimizer.state.values(), inside, attributes)

    def is_same(self) -> bool:
        """Whether everything is unchanged since it was last collected."""
        state = self.updater.optimizer.state
        try:
            return (
                len(state) == len(self._states)
                and [*map(len, self._dicts), *map(len, self._states)] == self._lengths
                and all(map(is_, self._held(), self._objects))
                and [*map(Tensor.data_ptr, self._params), *map(Tensor.data_ptr, self._buffer_tensors)]
                == self._pointers
                and [get(values) for get, values in self._numbers] == self._values_now
            )
        except KeyError:  # an attribute was deleted
            return False

    def changes(self) -> str:
        """Describe the first component of `PARTS` that has changed."""
        pairs = zip(self.PARTS, self.now(), self._before, strict=True)
        return next((name for name, one, other in pairs if one != other), "")

    def now(self) -> list[list[Any]]:
        """Return the addresses that a captured step reads or writes, and the values it treats as constant."""
        try:
            numbers = list(chain.from_iterable([get(values) for get, values in self._numbers]))
        except KeyError:  # an attribute was deleted
            numbers = []
        return [
            [*map(Tensor.data_ptr, self._params), *map(id, self._values(self._parameters))],
            [*map(len, self._vars), *map(id, self._values(self._children))],
            [*map(id, self._values(self.updater.optimizer.state.values()))],
            [*map(id, self._values(self._buffers)), *map(Tensor.data_ptr, self._buffer_tensors)],
            [id(values.get(name)) for values, name in self._attributes],
            numbers,
        ]

    def modes(self) -> Hashable:
        """Return which parameters are trained, which modules are in training mode, and which hooks are registered."""
        params = self.updater.params
        hooks = [*filter(None, self._hooks), *chain.from_iterable(map(_OPTIMIZER_HOOKS, self._optimizers))]
        hooks += filter(None, chain(map(_GRADIENT_HOOKS, params), map(_GRADIENT_POST_HOOKS, params)))
        return (
            tuple(map(_REQUIRES_GRAD, params)),
            tuple(map(_TRAINING, self._modules)),
            tuple(chain.from_iterable(hooks)),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a step may change in place."""
        yield from self._params
        yield from self._buffer_tensors
        yield from (value for values, name in self._attributes if isinstance(value := values.get(name), Tensor))
        yield from state_tensors(self.updater.optimizer)

    @staticmethod
    def _values(mappings: Iterable[dict[Any, Any]]) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, mappings))


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return every tensor once, except uninitialised (lazy) ones, which have no memory yet."""
    return [one for one in dict.fromkeys(tensors) if not is_lazy(one)]


def host_state(**roots: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Return all state reachable from these objects by path, for comparison, and the tensors.

    >>> class Loss:
    ...     calls = 0
    ...     def __call__(self, *_): self.calls += 1
    >>> loss = Loss(); loss(); before, _ = host_state(loss=loss); loss(); after, _ = host_state(loss=loss)
    >>> [place for place in after if before[place] != after[place]]
    ['loss.calls']
    """
    found: dict[str, Any] = {}
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # references keep ids from being reused
    waiting = list(roots.items())
    while waiting and len(seen) < MOST_OBJECTS:
        place, value = waiting.pop()
        if isinstance(value, PLAIN):
            found[place] = value
        elif id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                waiting += _inside(place, value)
            found[place] = _mark(value)
    return found, tensors


def _mark(value: Any) -> Any:
    """Return a value that changes if a tensor is replaced, a list grows, or a generator draws."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value.device.type == "cpu" else id(value)
    return (type(value), len(value)) if isinstance(value, (list, dict, set, deque)) else type(value)


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values an object holds, with their paths."""
    if isinstance(value, Mapping):
        for number, (key, one) in enumerate(value.items()):
            yield f"{place}[{key!r}]" if isinstance(key, (str, int)) else f"{place}[{number}]", one
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{place}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, MethodType):
        yield place, value.__self__
        yield from _of_function(place, value.__func__)
    elif isinstance(value, functools.partial):
        yield from ((place, value.func), (f"{place} arguments", value.args), (f"{place} arguments", value.keywords))
    elif isinstance(value, FunctionType):
        yield from _of_function(place, value)
    elif isinstance(value, nn.Module):
        more = {name: one for name, one in vars(value).items() if name != "_modules"}
        yield from ((f"{place}.{name}", one) for name, one in (value._modules | more).items())
        yield from _of_function(place, type(value).forward)
    elif not isinstance(value, _LEAVES) and not _is_of_library(type(value)):
        yield from ((f"{place}.{name}", one) for name, one in getattr(value, "__dict__", {}).items())
        yield from _of_function(place, vars(type(value)).get("__call__"))


def _of_function(place: str, function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: closure variables and globals of its module."""
    if not isinstance(function, FunctionType) or _is_of_library(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{place} {name}", cell.cell_contents
        except ValueError:  # an empty closure cell
            continue
    for name in code.co_names:
        if isinstance(one := function.__globals__.get(name), _DATA):
            yield f"{place} {name}", one


def _is_of_library(kind: Any) -> bool:
    """Whether a class or function is from torch, NumPy or Python: these keep no state that a step could change."""
    module = str(kind.__module__).partition(".")[0]
    return module in ("torch", "numpy") or (module in sys.stdlib_module_names and module != "__main__")
