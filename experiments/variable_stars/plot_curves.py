"""Draw true and reconstructed light curves of a few test stars, a row for each run.

    python experiments/variable_stars/plot_curves.py RUN_DIR … > curves.svg

The stars are not chosen by how well they fit: of each class, the one whose name has the smallest hash.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from stars.curves import joined, read_off
from stars.evaluate import Held, draw_freely, open_split, reconstructed, runner
from stars.options import share
from stars.runs import trained_model

from etude.experiment import load_config

CLASSES = ("RRLyr RRab", "RRLyr RRc", "Cep F", "Cep 1", "DSCT S", "T2Cep BLHer", "T2Cep WVir")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, HEAD = 148, 118, 34, 8, 12, 18, 62
BLACK, TRUE, AHEAD, FREE = "#111111", "#b0b0b0", "#2b6cb0", "#c05621"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What one run makes of the stars: curves (N, phases) in magnitudes below maximum light."""

    name: str
    ahead: Floats
    """Every patch from the true ones before it."""
    free: Floats
    """All patches from the numbers before them alone."""


def choose_stars(held: Held) -> NDArray[np.int64]:
    """Return a row of the split for each class to be drawn that has a star with a light curve."""
    names, rows = held.ids, []
    drawn = ~np.isnan(held.truth["curve"]).any(1)
    for name in CLASSES:
        if name in held.classes:
            mine = np.flatnonzero(drawn & (held.truth["class"] == held.classes.index(name)))
            rows += sorted(mine, key=lambda row: share(names[row], "picture"))[:1]
    return np.array(rows, np.int64)


def picture_of(runs: list[Path]) -> str:
    """Return the picture of some runs, which all saw the same data."""
    stars, rows = None, []
    for run in runs:
        found = trained_model(run)
        held = open_split(found.data, "test")
        stars = held.take(choose_stars(held))
        logits = runner(found.model, held.vocab, next(found.model.parameters()).device)
        ahead, _ = reconstructed(logits(stars.tokens[:, :-1]), "image", stars)
        free = draw_freely(logits, stars)
        scale = stars.amplitudes[:, None]
        name = load_config(run / "config.yaml").name.rpartition("/")[2]
        rows.append(Row(name, read_off(joined(ahead)) * scale, read_off(joined(free)) * scale))
    assert stars is not None
    return draw(stars, rows)


def draw(stars: Held, rows: list[Row]) -> str:
    """Return the picture as SVG: a column for each star, a row for each run."""
    width, height = LEFT + len(stars.tokens) * WIDTH, HEAD + len(rows) * HEIGHT + 8
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="9">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 16, "Light curves of test stars: I magnitudes below maximum light, by phase", "start", BLACK, 12),
    ]
    place = float(LEFT)
    for colour, words in (
        (TRUE, "catalogue"),
        (AHEAD, "expected, each patch from the true ones before it"),
        (FREE, "drawn freely from brightness, colour, period and amplitude"),
    ):
        parts.append(f'<line x1="{place}" y1="27" x2="{place + 18}" y2="27" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(place + 23, 30, words, "start"))
        place += 40 + 4.8 * len(words)
    true = stars.truth["curve"].astype(np.float64) * stars.amplitudes[:, None]
    for column, star in enumerate(stars.ids):
        left = LEFT + column * WIDTH
        kind = stars.classes[int(stars.truth["class"][column])]
        period = 10.0 ** float(stars.truth["log P1"][column])
        parts.append(text(left + LEFT, 46, f"{kind}, {period:.3g} d", "start", BLACK, 10))
        parts.append(text(left + LEFT, 57, star, "start", "#777", 8))
        for line, row in enumerate(rows):
            curves = ((true[column], TRUE), (row.ahead[column], AHEAD), (row.free[column], FREE))
            parts += panel(curves, float(stars.amplitudes[column]), left, HEAD + line * HEIGHT)
    for line, row in enumerate(rows):
        middle = HEAD + line * HEIGHT + HEIGHT / 2
        parts.append(
            f'<text x="14" y="{middle:.1f}" text-anchor="middle" fill="#111" font-size="12" '
            f'transform="rotate(-90 14 {middle:.1f})">{row.name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def panel(curves: tuple[tuple[Floats, str], ...], amplitude: float, left: float, top: float) -> list[str]:
    """Return one small picture; brighter is up, and the first phase is shown again at the end."""
    low, high = -0.15 * amplitude, 1.15 * amplitude
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(phase: float) -> float:
        return left + LEFT + phase * inner_width

    def y(magnitude: float) -> float:
        return top + TOP + (magnitude - low) / (high - low) * inner_height

    parts = [
        f'<rect x="{x(0):.1f}" y="{top + TOP}" width="{inner_width}" height="{inner_height}" fill="#f7f7f7"/>',
        text(x(0) - 4, y(0) + 3, "0", "end"),
        text(x(0) - 4, y(amplitude) + 3, f"{amplitude:.2f}", "end"),
    ]
    parts += [text(x(phase), top + HEIGHT - BOTTOM + 11, f"{phase:g}", "middle") for phase in (0.0, 0.5, 1.0)]
    for number, (curve, colour) in enumerate(curves):
        closed = [*curve, curve[0]]
        points = " ".join(f"{x(i / len(curve)):.1f},{y(value):.1f}" for i, value in enumerate(closed))
        style = 'stroke-width="3"' if number == 0 else 'stroke-width="1.2"'
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {style}/>')
    return parts


def text(x: float, y: float, words: str, anchor: str, colour: str = "#444", size: int = 9) -> str:
    """Return words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(picture_of([Path(argument) for argument in sys.argv[1:]]))
