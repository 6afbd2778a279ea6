"""The list that calls the hooks of callbacks, and the check that a callback's methods are hooks."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor

from etude.core import ConfigError, Control
from etude.core.run_layout import output_problems
from etude.core.spelling import did_you_mean
from etude.engine.callback import HOOKS, Callback, RunInfo, RunParts, implements

logger = logging.getLogger("etude")

_CALLED = (
    *HOOKS,
    "prepare",
    "bind",
    "device_update",
    "numbers",
    "outcome",
    "state_dict",
    "load_state_dict",
    "facts",
    "check_facts",
)
"""All methods that a run calls."""


def check_methods(callback: Callback) -> None:
    """Raise ConfigError if a callback has a method `on_…` that is not a hook, or a hook with a wrong signature.

    The hooks are those of the library's classes. Classes that do not derive from Callback may have other methods.
    """
    ours = [kind for kind in type(callback).__mro__ if issubclass(kind, Callback)]
    known = {name for kind in ours if kind.__module__.startswith("etude.") for name in vars(kind)}
    for kind in ours:
        for name, value in vars(kind).items():
            is_method = isinstance(value, (FunctionType, classmethod, staticmethod))
            if name.startswith("on_") and name not in known and is_method:
                raise ConfigError(
                    f"{kind.__name__}.{name} would never be called: it is not a "
                    f"hook{did_you_mean(name, HOOKS) or ';'} rename it; a method that you call yourself must not "
                    "start with on_"
                )
    for name in _CALLED:
        method = getattr(callback, name)
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise ConfigError(
                f"{type(callback).__name__}.{name} would be called but never run; remove async and yield from it"
            )
        _, *arguments = inspect.signature(getattr(Callback, name)).parameters
        try:
            inspect.signature(method).bind(*arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(callback).__name__}.{name} must accept the arguments ({', '.join(arguments)}): {error}"
            ) from None


class CallbackList:
    """Calls each hook of each callback in the listed order; also usable in a training loop of your own.

    >>> class Count(Callback):
    ...     epochs = 0
    ...     def on_epoch_end(self, epoch, logs): self.epochs += 1
    >>> count = Count()
    >>> CallbackList([count]).on_epoch_end(0, {"loss": 0.5})
    >>> count.epochs
    1
    """

    def __init__(self, callbacks: Iterable[Callback] = (), control: Control | None = None) -> None:
        self.control = control if control is not None else Control()
        self.around: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext()
        """Returns the context in which a hook is called, given its name."""
        self._callbacks: list[Callback] = []
        self._hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in HOOKS}
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Callback) -> None:
        """Add a callback at the end of the order and give it this list's control.

        Raises ConfigError if it has a method `on_…` that is not a hook, or that does not take the arguments of its
        hook.
        """
        if not type(callback).__module__.startswith("etude."):
            check_methods(callback)
        callback.control = self.control
        callback._siblings = self
        self._callbacks.append(callback)
        for name in HOOKS:
            if implements(callback, name):
                self._hooks[name].append(getattr(callback, name))
        ordered = sorted(self._callbacks, key=lambda one: one.listens)  # what others send at the end still arrives
        self._hooks["on_train_end"] = [one.on_train_end for one in ordered if implements(one, "on_train_end")]

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def hooks(self, name: str) -> list[Callable[..., None]]:
        """Return the overridden methods of one hook: empty if no callback implements it."""
        return self._hooks[name]

    def owners(self, name: str) -> set[int]:
        """Return the ids of the callbacks that override a hook."""
        return {id(one) for one in self._callbacks if getattr(one, name) in self._hooks[name]}

    def bind(self, parts: RunParts) -> None:
        """Pass the components of a run to every callback; raise ConfigError if one cannot work in this run."""
        for callback in self._callbacks:
            if parts.model is None and (callback.needs_model or implements(callback, "on_gradients")):
                name = type(callback).__name__
                raise ConfigError(
                    f"{name} needs the model's layers: pass a module, or a method of it, as model_forward"
                )
            callback.bind(parts)

    def take_back(self, parts: RunParts, *, begins: bool) -> None:
        """Bind callbacks that another run has been given meanwhile to this one again, which `begins`.

        Raises ConfigError in the middle of a run: what they remember would be that of the other.
        """
        taken = [one for one in self._callbacks if one._siblings is not self]
        if taken and not begins:
            name = type(taken[0]).__name__
            raise ConfigError(
                f"the callback {name} has been given to another run since this one began, so it remembers the other; "
                f"give each its own: copy.deepcopy of an unused {name}"
            )
        for one in taken:
            one.control, one._siblings = self.control, self
        if taken:
            self.bind(parts)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that calls a hook of every callback: `callbacks.on_epoch_end(epoch, logs)`."""
        if name not in HOOKS:
            raise AttributeError(f"CallbackList has no attribute '{name}'")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> None:
        if hooks := self._hooks[name]:
            with self.around(name):
                for hook in hooks:
                    hook(*args)

    def on_train_begin(self, run: RunInfo) -> None:
        """Call the hook of every callback; before that, raise ConfigError if two would write the same file."""
        outputs = [(type(one).__name__, name) for one in self._callbacks for name in one.writes(vars(one))]
        for writer, problem in output_problems(outputs, run.run_dir):
            raise ConfigError(f"{writer}: {problem}; choose another file name")
        self._call("on_train_begin", run)

    def on_exception(self, error: BaseException) -> None:
        """Call the hook of every callback, even if an earlier one fails, so that all files are closed."""
        for hook in self._hooks["on_exception"]:
            try:
                with self.around("on_exception"):
                    hook(error)
            except Exception:
                logger.exception("on_exception of a callback failed, after %s: %s", type(error).__name__, error)

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Call the hook of every callback; log the message if no callback shows it."""
        self._call("on_notice", message, facts)
        if not any(callback.shows_notices for callback in self._callbacks):
            logger.log(logging.INFO if "event" in facts else logging.WARNING, message)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return the context in which the model is read and written to a file."""
        self._call("on_save_begin")
        try:
            yield
        finally:
            self._call("on_save_end")

    def watchers(self) -> list[Callback]:
        """Return the callbacks that look at gradients."""
        return [one for one in self._callbacks if implements(one, "on_gradients")]

    def device_updates(self) -> list[Callable[[Tensor], None]]:
        """Return the functions that a step calls after its update."""
        found = (callback.device_update() for callback in self._callbacks)
        return [one for one in found if one is not None]

    def numbers(self) -> dict[str, float]:
        """Return the metrics that callbacks add to the record of a log point."""
        if not (givers := [callback for callback in self._callbacks if implements(callback, "numbers")]):
            return {}
        with self.around("numbers"):
            return {name: value for callback in givers for name, value in callback.numbers().items()}

    def facts(self) -> dict[str, Any]:
        """Return the facts of all callbacks."""
        return {name: value for callback in self._callbacks for name, value in callback.facts().items()}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Let every callback compare the stored data of the checkpoint at `place` with its own."""
        for callback in self._callbacks:
            callback.check_facts(saved, place)

    def outcome(self) -> dict[str, Any]:
        """Return the facts that callbacks add to the result of the run."""
        return {name: value for callback in self._callbacks for name, value in callback.outcome().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback, by class name and index among callbacks of that class."""
        with self.around("state_dict"):
            return {key: callback.state_dict() for key, callback in self.by_key().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callbacks that existed when the state was saved; new ones keep their initial state."""
        for key, callback in self.by_key().items():
            if saved := state.get(key):
                callback.load_state_dict(saved)

    def by_key(self) -> dict[str, Callback]:
        """Return the callbacks under the keys of `state_dict`."""
        keyed: dict[str, Callback] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            keyed[f"{name}.{sum(key.startswith(f'{name}.') for key in keyed)}"] = callback
        return keyed
