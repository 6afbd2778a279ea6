"""A terminal that remembers what it shows, and frames as text."""

import io
import re

from rich.console import Console

from etude.callbacks.terminal import frame


class Terminal(io.StringIO):
    """A terminal that remembers what it was sent and can say what is on its screen."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for control, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|([^\x1b])", self.getvalue()):
            if control.endswith("A"):
                row -= int(control[2:-1])
                assert row >= 0, "went up beyond its own lines"
            elif control == "\x1b[2K":
                lines[row], column = "", 0
            elif text == "\r":
                column = 0
            elif text == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif text:
                assert column == len(lines[row]), "wrote over something"
                lines[row] += text
                column += 1
        return lines

    @property
    def cursor_is_visible(self) -> bool:
        return self.getvalue().rfind("\x1b[?25l") <= self.getvalue().rfind("\x1b[?25h")


def text_of(drawn, width=200) -> list[str]:
    """Return the lines of a frame or a table without their styles."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(drawn)
    return [line.rstrip() for line in text.get().splitlines()]


def picture(view, width, height) -> list[str]:
    """Return what a terminal of this size shows."""
    return text_of(frame(view, width, height), width)
