"""Draws the progress view on a terminal with rich, without a thread of its own."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment

from etude.callbacks.progress_view import View, frame
from etude.callbacks.progress_words import Line


class LiveTerminal:
    """A region at the bottom of the terminal that is redrawn in place; what is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        self._frame = _Frame()
        self._live = Live(
            self._frame,
            console=self._console,
            auto_refresh=False,
            # A stream that goes to a file stays there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, view: View) -> None:
        """Draw the view in place of the last one."""
        width, height = self._console.size
        self._make_room(width)
        self._frame.lines = frame(view, width, height, ascii_only=self._console.options.ascii_only)
        self._live.refresh()

    def stop(self) -> None:
        """Leave the last picture, and give back the cursor, stdout and stderr."""
        with suppress(OSError, ValueError):  # the terminal may be gone; rich has given back the streams by then
            self._live.stop()

    def _make_room(self, width: int) -> None:
        """If the terminal has become narrower, its lines have wrapped: go up past the parts rich does not know of."""
        lengths = [sum(len(text) for text, _ in line) for line in self._frame.lines]
        wrapped = sum(max(0, length - 1) // width for length in lengths)
        if wrapped:
            moves = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * wrapped
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), *moves))


class _Frame:
    """Lines as rich wants them."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for line in self.lines:
            for text, style in line:
                yield Segment(text, console.get_style(style))
            yield Segment.line()
