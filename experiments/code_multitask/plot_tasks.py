"""Draw the losses of all tasks of a run by step, with the phases of its curriculum.

    python experiments/code_multitask/plot_tasks.py RUN_DIR > tasks.svg

One small picture for each task: training (thin) and validation (thick), from the step at which it comes in.
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS, WIDTH, HEIGHT = 4, 236, 158
LEFT, RIGHT, TOP, BOTTOM, HEAD = 40, 12, 26, 24, 46
COLOURS = ("#2b6cb0", "#2f855a", "#b7791f", "#9b2c2c", "#553c9a", "#2c7a7b", "#744210")
BANDS = ("#f7f7f7", "#e9eef6", "#eef6e9", "#faf3e3", "#f6e9ee")

Points = list[tuple[int, float]]


@dataclass
class Curves:
    """Losses by step."""

    training: Points = field(default_factory=list)
    validation: Points = field(default_factory=list)


@dataclass
class Run:
    """The tasks of a run, and the steps at which its phases began."""

    tasks: dict[str, Curves]
    phases: list[tuple[int, str]]
    steps: int


def read(folder: Path) -> Run:
    """Read a run folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    tasks: dict[str, Curves] = {}
    for record in records:
        for name, value in record.items():
            if not name.endswith("/loss") or value is None or record["split"] == "epoch":
                continue
            task = name.removesuffix("/loss")
            if record["split"] == "val":
                tasks.setdefault(task.removeprefix("val_"), Curves()).validation.append((record["step"], value))
            else:
                tasks.setdefault(task, Curves()).training.append((record["step"], value))
    phases = [(event["step"], event["phase"]) for event in events if event["kind"] == "phase"]
    return Run(tasks, phases, max(record["step"] for record in records))


def draw(run: Run) -> str:
    """Return the picture as SVG."""
    rows = math.ceil(len(run.tasks) / COLUMNS)
    width, height = COLUMNS * WIDTH, HEAD + rows * HEIGHT
    size = f'viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(
            LEFT, 18, "Loss by step: training (thin), validation (thick); shades are the phases", "start", "#111", 12
        ),
        *legend(run),
    ]
    for place, (task, curves) in enumerate(run.tasks.items()):
        left, top = place % COLUMNS * WIDTH, HEAD + place // COLUMNS * HEIGHT
        parts += panel(task, curves, run, left, top, COLOURS[place % len(COLOURS)])
    return "\n".join([*parts, "</svg>", ""])


def legend(run: Run) -> list[str]:
    """Return the names of the phases with their shades."""
    parts, place = [], float(LEFT)
    for number, (_, name) in enumerate(run.phases):
        shade = BANDS[number % len(BANDS)]
        parts.append(f'<rect x="{place:.0f}" y="26" width="12" height="12" fill="{shade}" stroke="#999"/>')
        parts.append(text(place + 17, 36, name, "start"))
        place += 34 + 6 * len(name)
    return parts


def panel(task: str, curves: Curves, run: Run, left: float, top: float, colour: str) -> list[str]:
    """Return the picture of one task."""
    values = [value for _, value in curves.training + curves.validation]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1
    low, high = low - margin, high + margin
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return left + LEFT + step / run.steps * inner_width

    def y(loss: float) -> float:
        return top + TOP + (high - loss) / (high - low) * inner_height

    parts = []
    starts = [step for step, _ in run.phases] or [0]
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], run.steps], strict=True)):
        parts.append(
            f'<rect x="{x(begin):.1f}" y="{top + TOP}" width="{x(end) - x(begin):.1f}" height="{inner_height}" '
            f'fill="{BANDS[number % len(BANDS)]}"/>'
        )
    for tick in (low + margin, high - margin):
        parts.append(text(left + LEFT - 5, y(tick) + 3, f"{tick:.2f}", "end"))
    parts.append(text(x(0), top + HEIGHT - BOTTOM + 14, "0", "middle"))
    parts.append(text(x(run.steps), top + HEIGHT - BOTTOM + 14, f"{run.steps:,}", "end"))
    for points, style in (
        (curves.training, 'stroke-width="1" opacity="0.55"'),
        (curves.validation, 'stroke-width="2"'),
    ):
        places = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>')
        if len(points) == 1:
            parts.append(f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="2" fill="{colour}"/>')
    parts.append(text(left + LEFT, top + TOP - 7, task, "start", colour, 12))
    return parts


def text(x: float, y: float, words: str, anchor: str, colour: str = "#444", size: int = 10) -> str:
    """Return words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(draw(read(Path(sys.argv[1]))))
