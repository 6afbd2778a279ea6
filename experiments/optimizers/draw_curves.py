"""Draw the curves of a race: validation loss by step and by second, one line for each optimizer.

    python experiments/optimizers/draw_curves.py race/results.json curves.svg

A line is the mean over seeds, its band their range.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

COLOURS = {"adamw": "#0072b2", "muon": "#d55e00", "schedule_free_adamw": "#009e73", "sgd": "#7a7a7a"}
WIDTH, HEIGHT, GAP, LEFT, TOP = 330, 210, 70, 60, 56


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG: a row for each problem."""
    problems = list(dict.fromkeys(one["problem"] for one in results))
    width, height = LEFT + 2 * (WIDTH + GAP), TOP + len(problems) * (HEIGHT + GAP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (name, colour) in enumerate(COLOURS.items()):
        parts += [_line([(LEFT + 170 * place, 20), (LEFT + 170 * place + 22, 20)], colour)]
        parts.append(_text(LEFT + 170 * place + 28, 24, name))
    for row, problem in enumerate(problems):
        mine = [one for one in results if one["problem"] == problem]
        for column, axis in enumerate(("steps", "seconds")):
            left, top = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
            parts += _panel(mine, axis, f"{problem}: validation loss by {axis}", left, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(results: Sequence[Mapping[str, Any]], axis: str, title: str, left: float, top: float) -> list[str]:
    finite = [loss for one in results for loss in one["losses"] if math.isfinite(loss)]
    low = min(finite)
    high = max(low * 1.05, statistics.median(one["losses"][0] for one in results))
    end = max(one[axis][-1] for one in results)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(min(max(y, low), high)) - math.log(low)) / (math.log(high) - math.log(low))
        return left + WIDTH * x / end, top + HEIGHT * (1 - share)

    parts = [
        _text(left, top - 8, title),
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#fafafa" stroke="#ddd"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        loss = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        parts.append(_text(left - 6, at(0, loss)[1] + 4, f"{loss:.3g}", "end"))
    for share in (0.0, 0.5, 1.0):
        parts.append(
            _text(
                at(share * end, low)[0],
                top + HEIGHT + 16,
                f"{share * end:,.0f}" if axis == "steps" else f"{share * end:.3g}",
                "middle",
            )
        )
    for name, colour in COLOURS.items():
        seeds = [one for one in results if one["optimizer"] == name]
        if not seeds:
            continue
        xs = [statistics.median(column) for column in zip(*(one[axis] for one in seeds), strict=True)]
        columns = list(zip(*(one["losses"] for one in seeds), strict=True))
        band = [at(x, max(column)) for x, column in zip(xs, columns, strict=True)]
        band += [at(x, min(column)) for x, column in zip(xs, columns, strict=True)][::-1]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in band)
        parts.append(f'<polygon points="{points}" fill="{colour}" opacity="0.2"/>')
        parts.append(_line([at(x, statistics.mean(column)) for x, column in zip(xs, columns, strict=True)], colour))
    return parts


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#333" text-anchor="{anchor}">{text}</text>'


def first_below(result: Mapping[str, Any], loss: float) -> tuple[float, float] | None:
    """Return the step and the second at which a run reaches a loss: the first validation, or by a line between two."""
    points = list(zip(result["steps"], result["seconds"], result["losses"], strict=True))
    if points[0][2] <= loss:
        return points[0][:2]
    for (step, second, before), (next_step, next_second, after) in pairwise(points):
        if after <= loss < before:
            share = (before - loss) / (before - after)
            return step + share * (next_step - step), second + share * (next_second - second)
    return None


def main(source: str, target: str) -> None:
    results = json.loads(Path(source).read_text())["final"]
    Path(target).write_text(draw(results))
    for problem in dict.fromkeys(one["problem"] for one in results):
        mine = [one for one in results if one["problem"] == problem]
        goal = statistics.mean(one["losses"][-1] for one in mine if one["optimizer"] == "adamw")
        for name in COLOURS:
            reached = [first_below(one, goal) for one in mine if one["optimizer"] == name]
            known = [one for one in reached if one is not None]
            steps, seconds = (
                (f"{statistics.mean(column):.4g}" for column in zip(*known, strict=True)) if known else ("–",) * 2
            )
            print(f"| {problem} | {name} | {len(known)} of {len(reached)} | {steps} | {seconds} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
