"""Draw the loss of some runs by step, and tell their bits per byte.

    python experiments/tiny_lm/plot_curve.py RUN_DIR … > curve.svg

The picture goes to standard output, a table of the results to standard error.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from etude.corpus import CorpusReport, read_report
from etude.distributed import World
from etude.experiment import build_data, load_config

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 60, 46, 34, 20
COLOURS = ("#2b6cb0", "#2f855a", "#b7791f", "#9b2c2c", "#553c9a")


@dataclass(frozen=True)
class Run:
    """The curves of a run, (step, loss in nats per token), and the corpus it was trained on."""

    name: str
    training: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    corpus: Path

    @property
    def report(self) -> CorpusReport:
        """The facts of the corpus."""
        return read_report(self.corpus)

    def bits_per_byte(self, loss: float) -> float:
        """Return a validation loss in bits per byte of text, which do not depend on the vocabulary."""
        return loss / math.log(2) / self.report.splits["validation"].bytes_per_token


def read(folder: Path) -> Run:
    """Read a run folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = load_config(folder / "config.yaml")
    tokenizer = build_data(config, World()).splits.tokenizer
    assert tokenizer is not None
    return Run(
        config.name,
        [(record["step"], record["loss"]) for record in records if record["split"] == "train"],
        [(record["step"], record["val_loss"]) for record in records if record["split"] == "val"],
        tokenizer.parent,
    )


def table(runs: list[Run]) -> str:
    """Return the results as rows of a Markdown table."""
    rows = []
    for run in runs:
        unigram, (step, loss) = run.report.validation_unigram_loss, run.validation[-1]
        cells = [f"`{run.name}`", f"{step:,}"]
        for value in (unigram, loss):
            cells.append(f"{value:.3f} ({run.bits_per_byte(value):.3f})")
        rows.append(" | ".join([*cells, f"{math.exp(loss):.1f}"]))
    return "\n".join(f"| {row} |" for row in rows)


def draw(runs: list[Run]) -> str:
    """Return the picture as SVG: training loss thin, validation loss thick, unigram loss dashed."""
    steps = max(step for run in runs for step, _ in run.training + run.validation)
    unigram = [run.report.validation_unigram_loss for run in runs]
    low = math.floor(min(loss for run in runs for _, loss in run.training + run.validation))
    high = math.ceil(max([*unigram, *(run.training[0][1] for run in runs)]))

    def x(step: float) -> float:
        return LEFT + step / steps * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    def text(px: float, py: float, words: str, anchor: str = "middle", colour: str = "#444") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    def curve(points: list[tuple[int, float]], style: str) -> str:
        places = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline points="{places}" fill="none" {style}/>'

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, "Loss in nats per token: training (thin), validation (thick)", "start", "#111"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "step"),
    ]
    for tick in range(low, high + 1):
        parts.append(line(LEFT, y(tick), WIDTH - RIGHT, y(tick), 'stroke="#e5e5e5"'))
        parts.append(text(LEFT - 8, y(tick) + 4, str(tick), "end"))
    for part in range(5):
        parts.append(text(x(part * steps / 4), HEIGHT - BOTTOM + 18, f"{part * steps // 4:,}"))
    for place, (run, floor) in enumerate(zip(runs, unigram, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(line(LEFT, y(floor), WIDTH - RIGHT, y(floor), f'stroke="{colour}" stroke-dasharray="5 4"'))
        parts.append(text(WIDTH - RIGHT, y(floor) - 5, f"unigram: {floor:.2f}", "end", colour))
        parts.append(curve(run.training, f'stroke="{colour}" stroke-width="1" opacity="0.6"'))
        parts.append(curve(run.validation, f'stroke="{colour}" stroke-width="2.5"'))
        last = run.validation[-1][1]
        parts.append(text(WIDTH - RIGHT, y(last) - 24, f"{run.name}: {last:.2f}", "end", colour))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    found = [read(Path(argument)) for argument in sys.argv[1:]]
    sys.stdout.write(draw(found))
    print(table(found), file=sys.stderr)
