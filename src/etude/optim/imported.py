"""Optimizers by import path: any class of an imported module that derives from `torch.optim.Optimizer`."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT as TorchParams

from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean
from etude.optim.groups import Groups, LayerDecay, check_settings, group_parameters


def find(path: str) -> Callable[..., Optimizer]:
    """Return a function that makes the optimizer at a dotted path; its signature is that of the class.

    Nothing is imported: a config may run only the code that its `imports:` name. Raises ConfigError if there is no
    such class.

    >>> find("torch.optim.Adamax")([{"params": []}], lr=0.5).defaults["lr"]
    0.5
    """
    place, _, name = path.rpartition(".")
    if place not in sys.modules:
        raise ConfigError(f"optimizer '{path}': {place} is not imported; add it to `imports:` (in Python: import it)")
    held = vars(sys.modules[place])
    found = held[name] if name in held else _late(sys.modules[place], name)
    if not _is_optimizer(found):
        known = [key for key, value in held.items() if _is_optimizer(value)]
        problem = "does not exist" if found is None else "is not a class that derives from torch.optim.Optimizer"
        raise ConfigError(f"optimizer '{path}' {problem}{did_you_mean(name, known)}")
    return _factory(found)


def _late(module: Any, name: str) -> Any:
    """Return what a module, which is imported, imports only when it is asked for; None if there is no such name."""
    try:
        return getattr(module, name, None)
    except Exception:  # its own code
        return None


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer)


@functools.cache
def _factory(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of any class, with the parameter groups of etude's optimizers."""
    _, *own = inspect.signature(cls).parameters.values()
    taken = {one.name: one for one in own}

    def make(
        params: Any,
        *,
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
        **given: Any,
    ) -> Optimizer:
        if decay_only_matrices and "weight_decay" not in taken and not others:
            raise ConfigError(f"{cls.__name__} has no weight_decay, so decay_only_matrices has no effect; remove it")
        if groups or layer_decay is not None or decay_only_matrices:
            rate = given.get("lr", taken["lr"].default if "lr" in taken else None)
            if not isinstance(rate, (int, float)):
                raise ConfigError(f"{cls.__name__}: parameter groups need a learning rate; set lr")
            params = group_parameters(
                params,
                groups,
                layer_decay=layer_decay,
                decay_only_matrices=decay_only_matrices,
                lr=rate,
                settings=taken,
                check=functools.partial(check_settings, cls),
            )
        for name in given.keys() - taken.keys():  # a class may take any name
            if near := did_you_mean(name, taken):
                raise ConfigError(f"{cls.__name__} has no argument '{name}'{near}")
        try:
            return cls(list(params), **given)
        except RuntimeError as error:  # torch's for arguments that contradict each other
            raise ConfigError(f"{cls.__name__}: {error}") from error

    function: Any = make
    first, *shared, _ = inspect.signature(make).parameters.values()
    others = [one for one in own if one.kind is one.VAR_KEYWORD]
    plain = [
        one.replace(kind=one.KEYWORD_ONLY) for one in own if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    shared = [one for one in shared if one.name not in taken]
    function.__signature__ = inspect.Signature([first.replace(annotation=TorchParams), *plain, *shared, *others])
    function.__wrapped__, function.__doc__ = cls.__init__, cls.__doc__
    return make
