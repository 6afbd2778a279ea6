"""Making a model without memory for its weights: they are drawn later, one at a time, as the constructor would have.

Inside `deferred_weights` the weights of new modules are on the meta device. What initialises them is recorded, with the
state of the random generator. `draw` repeats it in the same order, so every weight gets the very numbers that it would
have had, but only one whole tensor is in memory at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from etude.core.batch import map_tensors
from etude.core.errors import ConfigError
from etude.core.random import aside

_aten = torch.ops.aten
_truncated = nn.init._no_grad_trunc_normal_
"""It draws until all numbers fit, which the meta device cannot do: it is recorded as one operator."""
_SETS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default}
"""Operators, besides those that draw, after which no earlier value is left."""
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_FACTORIES = {torch.empty, torch.empty_like, torch.Tensor.new_empty}


class _Step(NamedTuple):
    """One operator that changed a weight, or a part of it, in place."""

    operator: Callable[..., Any]
    key: int
    """Of the memory."""
    view: tuple[torch.Size, tuple[int, ...], int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, values: Tensor) -> None:
        """Repeat it on the memory of the weight."""
        self.operator(values.as_strided(*self.view), *self.arguments, **self.options)


def _repeated(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], object]:
    """Return a function that runs an operator again for its random numbers alone."""
    if not operator._schema.is_mutable:
        return lambda: operator(*arguments, **options)
    layouts = map_tensors([*arguments, options], lambda one: one.to("meta"))

    def repeat() -> None:
        *blank, named = map_tensors(layouts, lambda one: torch.zeros_like(one, device="cpu"))
        operator(*blank, **named)

    return repeat


def _draws(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return operator is _truncated or torch.Tag.nondeterministic_seeded in operator.tags


class Recording:
    """The weights that were made inside `deferred_weights`, and what initialises them."""

    def __init__(self) -> None:
        self.random_state = torch.get_rng_state()
        self._steps: list[_Step] = []
        self._others: dict[int, list[Callable[[], object]]] = {}
        """What draws random numbers for tensors that have memory, by the number of steps before it."""
        self._drawn = 0
        """Steps whose random numbers the generator has passed."""
        self._sizes: dict[int, tuple[int, torch.dtype]] = {}
        self._kept: list[Tensor] = []  # so that no key is used twice
        self._versions: dict[Tensor, int] = {}

    def add(
        self, operator: Callable[..., Any], weight: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Record an operator."""
        key = key_of(weight)
        self._sizes[key] = weight.untyped_storage().nbytes() // weight.element_size(), weight.dtype
        self._kept.append(weight)
        view = weight.shape, weight.stride(), int(weight.storage_offset())
        self._steps.append(_Step(operator, key, view, rest, options))

    def draw_now(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the result of an operator that draws numbers for a tensor with memory, such as a buffer.

        The generator first passes the numbers of the weights so far: they are drawn, one weight at a time, for nothing.
        """
        for step in self._steps[self._drawn :]:
            if _draws(step.operator):
                step.run(self._memory(step.key))
        self._drawn = len(self._steps)
        before = torch.get_rng_state()
        result = operator(*arguments, **options)
        if not before.equal(torch.get_rng_state()):  # else it drew from another generator
            self._others.setdefault(self._drawn, []).append(_repeated(operator, arguments, options))
        return result

    def _memory(self, key: int) -> Tensor:
        size, dtype = self._sizes[key]
        return torch.zeros(size, dtype=dtype)

    def end(self, params: Iterable[Tensor]) -> None:
        """Remember when the recording ended: later changes of these weights are not in it."""
        self._versions = {param: param._version for param in params if param.is_meta}

    def is_complete(self, param: Tensor) -> bool:
        """Whether a weight is known, and nothing has changed it since the recording ended."""
        return key_of(param) in self._sizes and self._versions.get(param) == param._version

    def draw(self, random_state: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield every weight that was initialised, by the key of its memory: a vector with all of its elements.

        Random numbers begin at `random_state`, by default that of the recording.
        """
        last = {step.key: place for place, step in enumerate(self._steps)}
        begins = self._beginnings()
        values: dict[int, Tensor] = {}
        with aside(0):
            torch.set_rng_state(self.random_state if random_state is None else random_state)
            for place, step in enumerate(self._steps):
                for draw in self._others.get(place, ()):
                    draw()
                if place < begins[step.key] and not _draws(step.operator):
                    continue
                flat = values.get(step.key)
                if flat is None:
                    flat = self._memory(step.key)
                step.run(flat)
                if place >= begins[step.key]:  # else it was drawn only to move the generator on
                    values[step.key] = flat
                if place == last[step.key]:
                    yield step.key, values.pop(step.key)

    def _beginnings(self) -> dict[int, int]:
        """Return for every weight the last operator that sets all of it."""
        found: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            is_set = step.operator in _SETS or _draws(step.operator)
            if is_set and step.view[0].numel() == self._sizes[step.key][0]:
                found[step.key] = place
        return {step.key: found.get(step.key, 0) for step in self._steps}


_RECORDINGS: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Within this block, new modules get weights without memory; a `Trainer` draws them when it has divided the model.

    >>> with deferred_weights():
    ...     layer = nn.Linear(3, 2)
    >>> layer.weight.is_meta
    True
    """
    recording = Recording()
    made: list[nn.Module] = []

    def remember(module: nn.Module, *_: Any) -> None:
        made.append(module)

    def truncated(weight: Tensor, *args: Any, **options: Any) -> Tensor:
        if weight.device.type != "meta":
            return _truncated(weight, *args, **options)
        recording.add(_truncated, weight, args, options)
        return weight

    handles = [
        nn.modules.module.register_module_parameter_registration_hook(remember),
        nn.modules.module.register_module_buffer_registration_hook(remember),
    ]
    nn.init._no_grad_trunc_normal_ = truncated  # type: ignore[assignment]
    try:
        with _OnMeta(), _Recorder(recording):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = _truncated
        for handle in handles:
            handle.remove()
    recording.end(tensor for module in made for tensor in weights_of(module, recurse=False).values())
    for module in made:
        _RECORDINGS[module] = recording


def recording_of(model: nn.Module) -> Recording | None:
    """Return what initialises the weights of a model, if it was made inside `deferred_weights`; else None.

    Raises ConfigError for weights on the meta device that were made otherwise.
    """
    if not any(tensor.is_meta for tensor in weights_of(model).values()):
        return None
    for module in model.modules():
        if module in _RECORDINGS:
            return _RECORDINGS[module]
    raise ConfigError(
        "the model is on the meta device, so its weights are unknown; make it in etude.deferred_weights(), without "
        "copies of its modules"
    )


def weights_of(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names: a buffer too may be made without values, and then filled."""
    found = module.named_parameters, module.named_buffers
    return {name: one for every in found for name, one in every(recurse=recurse, remove_duplicate=False)}


def key_of(tensor: Tensor) -> int:
    """Return a number that tells the memory of tensors apart, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


class _OnMeta(TorchFunctionMode):
    """Lets modules allocate their weights on the meta device; other tensors, such as buffers, are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:  # some of torch's initialisers do nothing there, without a word
            return False
        if func in _FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Records what changes a meta tensor in place."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _has_meta((*args, *kwargs.values())):
            return self._recording.draw_now(func, args, kwargs) if _draws(func) else func(*args, **kwargs)
        result = func(*args, **kwargs)
        schema = func._schema
        if not schema.is_mutable:
            return result
        written = [place for place, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
        if written != [0] or not isinstance(args[0], Tensor) or _has_meta((*args[1:], *kwargs.values())):
            raise ConfigError(
                f"a weight is computed by {func}, which cannot be deferred; make the model without deferred_weights "
                "(parallel.meta_device: false)"
            )
        self._recording.add(func, args[0], args[1:], kwargs)
        return result


def _has_meta(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_has_meta, values))
    return isinstance(values, Tensor) and values.device.type == "meta"
