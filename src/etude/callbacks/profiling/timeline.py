"""The time of the parts of steps, without gaps: every moment belongs to the innermost part that is open."""

import time
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

REST = "rest"
"""What is outside of all parts: the loop itself, and callbacks."""

CLOSED = ("captured", "logging", "saving", "validation")
"""Parts whose inner parts are their own: a validation copies batches, too."""


class Timeline:
    """Marks the boundaries of parts: by the clock on the CPU, by events in the stream of a CUDA device.

    Events take their place among the kernels, so no step waits: what the device does not wait for takes no time.

    >>> timeline = Timeline(torch.device("cpu"))
    >>> timeline.begin()
    >>> with timeline.span("forward"), timeline.span("transfer"): pass
    >>> timeline.end()
    >>> sorted(timeline.totals_ms()), timeline.counts["forward"]
    (['forward', 'rest', 'transfer'], 1)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts: dict[str, int] = {}
        """How often each part began."""
        self.cpu_s = 0.0
        """CPU time of the process, all threads together."""
        self._open: list[str] = []
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        """The part that begins, and when."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a first mark."""
        return bool(self._marks)

    def begin(self) -> None:
        """Start outside of all parts."""
        self._open, self._marks, self.counts = [REST], [], {}
        self.cpu_s = -time.process_time()
        self._mark()

    def end(self) -> None:
        """Make the last mark."""
        self._mark()
        self.cpu_s += time.process_time()

    def span(self, name: str) -> "_Span":
        """Return the context of a part."""
        return _Span(self, name)

    def enter(self, name: str) -> None:
        """Begin a part inside the current one."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self._open.append(self._open[-1] if self._open[-1] in CLOSED else name)
        self._mark()

    def leave(self) -> None:
        """Go back to the part outside."""
        self._open.pop()
        self._mark()

    def totals_ms(self) -> dict[str, float]:
        """Return the milliseconds of every part, first of all the rest; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals = {REST: 0.0}
        for (name, start), (_, end) in pairwise(self._marks):
            totals[name] = totals.get(name, 0.0) + _between_ms(start, end)
        return totals

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((self._open[-1], event))
        else:
            self._marks.append((self._open[-1], time.perf_counter()))


def _between_ms(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


class _Span:
    __slots__ = ("_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self._name = timeline, name

    def __enter__(self) -> None:
        self._timeline.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline.leave()
