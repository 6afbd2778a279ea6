"""Named parts of a run (data, forward, backward …), for whoever measures them; almost free if nobody does.

| part | what happens |
|---|---|
| `data` | the host waits for the batches of a step |
| `transfer` | the step waits for their copy to the device |
| `forward`, `backward`, `optimizer` | the parts of an eager step |
| `captured` | a whole step that is replayed as a CUDA graph |
| `logging`, `validation`, `saving` | what happens between steps |

Parts may be inside each other: the time of the inner one is not that of the outer one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

Watch = Callable[[str], AbstractContextManager[object]]
"""Returns the context of a part of this name."""


class _Nothing:
    """`nullcontext()` without calls of Python functions: a short step enters several of them, for 2 % of its time."""

    __enter__: Any = "".format  # takes any arguments, and returns something false
    __exit__: Any = __enter__


NOTHING: AbstractContextManager[Any] = _Nothing()
"""A context that does nothing."""

_watch: Watch | None = None
_thread = 0
_eager = False


def span(name: str) -> AbstractContextManager[object]:
    """Return the context of a part: that of the watcher in the thread which set it, else one that does nothing."""
    if _watch is None or get_ident() != _thread:
        return NOTHING
    return _watch(name)


def watch(watcher: Watch | None, *, eager: bool = False) -> None:
    """Let `watcher` see the parts from now on; None ends it. With `eager` steps are not replayed as CUDA graphs.

    >>> from contextlib import contextmanager
    >>> @contextmanager
    ... def say(name):
    ...     print("begin", name)
    ...     yield
    ...     print("end", name)
    >>> watch(say)
    >>> with span("forward"): pass
    begin forward
    end forward
    >>> watch(None)
    """
    global _watch, _thread, _eager
    _watch, _thread, _eager = watcher, get_ident(), eager and watcher is not None


def is_watched() -> bool:
    """Return whether somebody measures the parts."""
    return _watch is not None


def needs_eager_steps() -> bool:
    """Return whether the watcher wants to see the parts of every step."""
    return _eager
