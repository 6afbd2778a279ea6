"""Methods of a callback that would never be called, or could not be: refused before the run."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partialmethod
from typing import Any
from weakref import WeakSet

from etude.core import ConfigError
from etude.core.spelling import did_you_mean

_fine: WeakSet[type] = WeakSet()
"""Classes that have been checked."""


def check_methods(kind: type, base: type) -> None:
    """Raise ConfigError if a class of callbacks has a method `on_…` that is no hook, or that cannot be called as one.

    Hooks are the methods `on_…` of `base` and those that a class lists in `more_hooks`. Classes that do not derive from
    `base`, such as those of another library, may have other methods, and so may instances: they may store functions.
    """
    if kind in _fine:
        return
    ours = [one for one in kind.__mro__ if issubclass(one, base)]
    homes = {name: base for name, value in vars(base).items() if not name.startswith("_") and _is_method(value)}
    homes |= {name: one for one in ours for name in _added(one)}
    for one in ours:
        for name, value in vars(one).items():
            if name.startswith("on_") and name not in homes and _is_method(value):
                raise ConfigError(_never_called(one, name, homes, base))
    for name, home in homes.items() if ours else ():
        _check_signature(kind, name, _bound(home, name))
    _fine.add(kind)


def _never_called(kind: type, name: str, hooks: Iterable[str], base: type) -> str:
    owner = next((one for one in _subclasses(base) if name in _added(one)), None)
    if owner is not None:
        return f"{kind.__name__}.{name} is a hook of {owner.__name__} only; derive {kind.__name__} from that"
    near = did_you_mean(name, [hook for hook in hooks if hook.startswith("on_")])
    return (
        f"{kind.__name__}.{name} would never be called, it is no hook of {base.__name__}{near or ';'} rename it; a "
        f"method that you call yourself must not start with on_"
    )


def _check_signature(kind: type, name: str, model: Callable[..., Any]) -> None:
    """Raise ConfigError unless the method of the class takes as many arguments as `model`."""
    own = _bound(kind, name)
    if isinstance(own, property):
        return
    arguments = [
        one.name for one in inspect.signature(model).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    try:
        # Not that of a function inside a decorator, which may add arguments.
        inspect.signature(own, follow_wrapped=False).bind(*arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError) and not inspect.ismethod(own):
            return  # a function of C that does not say what it takes
        raise ConfigError(
            f"{kind.__name__}.{name} is called with ({', '.join(arguments)}), which it cannot take: {error}"
        ) from None
    if name.startswith("on_") and (inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own)):
        raise ConfigError(
            f"{kind.__name__}.{name} would never run: make it a plain function, without async and yield"
        )


def _added(kind: type) -> list[str]:
    """Return the hooks that a class itself adds."""
    return [name for name in vars(kind).get("more_hooks", ()) if name in vars(kind)]


def _is_method(value: object) -> bool:
    return isinstance(value, classmethod | partialmethod) or (callable(value) and not isinstance(value, type))


def _bound(kind: type, name: str) -> Any:
    """Return an attribute of the class; a method without its `self`."""
    value: Any = inspect.getattr_static(kind, name)
    is_bound_later = _is_method(value) and (inspect.isfunction(value) or inspect.ismethoddescriptor(value))
    return value.__get__(object(), kind) if is_bound_later else value


def _subclasses(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield one
        yield from _subclasses(one)
