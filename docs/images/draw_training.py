"""Draw training.svg, what `make train` shows in its sixth epoch.

In a checkout: `python -m docs.images.draw_training`.
"""

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.work import terminal
from etude.callbacks import terminal as display
from etude.callbacks.progress_lines import View
from etude.cli.main import main

COMMAND = ["etude", "train", "lenet5/lecun1998", "training.num_threads=1"]
EPOCH, STEP = 5, 300
WIDTH = 92
TARGET = Path(__file__).with_name("training.svg")
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Of rich's pictures; they come from the network."""


class Camera(display.LiveTerminal):
    """The display, which keeps one of its frames and then ends the run."""

    def draw(self, view: View) -> None:
        """Draw, and keep the frame if it is the one."""
        super().draw(view)
        if not view.outcome and view.epoch == EPOCH and view.step_in_epoch >= STEP:
            console = Console(file=io.StringIO(), record=True, width=WIDTH, height=40, force_terminal=True)
            console.print(display.frame(view, WIDTH, 40), end="")
            picture = console.export_svg(title=" ".join(COMMAND[:3]), unique_id="training")
            TARGET.write_text(FONTS.sub("", picture), encoding="utf-8")
            raise KeyboardInterrupt


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, terminal(width=WIDTH, height=40):
        display.LiveTerminal = Camera  # type: ignore[misc]
        sys.argv = [*COMMAND, "--run-dir", f"{folder}/run"]
        main()
