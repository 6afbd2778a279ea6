"""Draw the test error of some runs by epoch: `python experiments/lenet5/plot_curve.py RUN_DIR … > curve.svg`."""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 60, 46, 34, 20
COLOURS = ("#2b6cb0", "#2f855a", "#b7791f", "#9b2c2c", "#553c9a")
PAPER = 0.95


def errors(run: Path) -> list[float]:
    """Return the validation error of every epoch, in percent."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [100 - 100 * record["val_accuracy"] for record in records if record.get("split") == "epoch"]


def label(run: Path) -> str:
    """Return what the legend calls a run: its experiment and its seed."""
    lines = (run / "config.yaml").read_text().splitlines()
    name = next(line.split(": ", 1)[1] for line in lines if line.startswith("name: "))
    seed = next(line.split(": ", 1)[1] for line in lines if line.strip().startswith("seed: "))
    return f"{name}, seed {seed}"


def draw(runs: list[Path]) -> str:
    """Return the picture as SVG, with a logarithmic axis of errors."""
    curves = [errors(run) for run in runs]
    epochs = max(len(curve) for curve in curves)
    low, high = 0.5, max(5.0, max(max(curve) for curve in curves))

    def x(epoch: float) -> float:
        return LEFT + (epoch - 1) / max(epochs - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(error: float) -> float:
        share = math.log(max(error, low) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def text(px: float, py: float, words: str, anchor: str = "middle", colour: str = "#444") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, "MNIST test error in percent, by epoch", "start", "#111"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "epoch"),
    ]
    for tick in (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0):
        if low <= tick <= high:
            parts.append(line(LEFT, y(tick), WIDTH - RIGHT, y(tick), 'stroke="#e5e5e5"'))
            parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for epoch in range(1, epochs + 1):
        parts.append(text(x(epoch), HEIGHT - BOTTOM + 18, str(epoch)))
    parts.append(line(LEFT, y(PAPER), WIDTH - RIGHT, y(PAPER), 'stroke="#888" stroke-dasharray="5 4"'))
    parts.append(text(WIDTH - RIGHT, y(PAPER) - 6, "LeCun et al. 1998: 0.95", "end", "#666"))
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        points = " ".join(f"{x(i + 1):.1f},{y(error):.1f}" for i, error in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        words = f"{label(run)}: {curve[-1]:.2f}"
        parts.append(text(WIDTH - RIGHT, TOP + 16 + 17 * place, words, "end", colour))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(draw([Path(argument) for argument in sys.argv[1:]]))
