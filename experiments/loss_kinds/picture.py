"""Draw distributions over bins side by side: a row for each problem, a column for each loss."""

from collections.abc import Mapping, Sequence

from torch import Tensor

PANEL, HEIGHT, GAP, LEFT, TOP = 132, 74, 12, 118, 44
TRUTH, ALONE, BESIDE = "#c9c9c9", "#2b6cb0", "#c05621"


def draw(rows: Mapping[str, Mapping[str, Tensor]], kinds: Sequence[str]) -> str:
    """Return the picture as SVG: what is true in grey, a kind alone in blue, beside cross entropy in orange.

    Every row has distributions by the name of a loss ("ce", a kind, "ce + " and a kind), and "truth" if it is known.
    """
    width = LEFT + (1 + len(kinds)) * (PANEL + GAP)
    height = TOP + len(rows) * (HEIGHT + GAP) + 18
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(LEFT, 16, "What is true (grey), learned by a kind alone (blue), beside cross entropy (orange)", "#111"),
    ]
    for place, title in enumerate(["ce", *kinds]):
        parts.append(_text(LEFT + place * (PANEL + GAP), TOP - 6, title, "#444"))
    for line, (name, found) in enumerate(rows.items()):
        top = TOP + line * (HEIGHT + GAP)
        parts.append(_text(8, top + HEIGHT / 2, name, "#111"))
        for place, title in enumerate(["ce", *kinds]):
            beside = "ce" if title == "ce" else f"ce + {title}"
            alone = None if title == "ce" else title
            drawn = [(found.get("truth"), TRUTH), (found.get(alone), ALONE), (found.get(beside), BESIDE)]
            known = [(law, colour) for law, colour in drawn if law is not None]
            parts += _panel(LEFT + place * (PANEL + GAP), top, known)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, top: int, laws: Sequence[tuple[Tensor, str]]) -> list[str]:
    """Return one panel, as high as 1.6 times the highest bin of what is true; whatever is higher is cut off."""
    limit = 1.6 * float(laws[0][0].max()) if laws[0][1] == TRUTH else 1.0
    parts = [f'<rect x="{left}" y="{top}" width="{PANEL}" height="{HEIGHT}" fill="#fafafa" stroke="#e5e5e5"/>']
    for law, colour in laws:
        step = PANEL / len(law)
        outline = [f"M{left} {top + HEIGHT}"]
        for place, probability in enumerate(law.tolist()):
            height = HEIGHT * min(1.0, probability / limit)
            outline.append(f"V{top + HEIGHT - height:.1f}H{left + (place + 1) * step:.1f}")
        outline.append(f"V{top + HEIGHT}")
        style = f'fill="{colour}"' if colour == TRUTH else f'fill="none" stroke="{colour}" stroke-width="1.4"'
        parts.append(f'<path d="{"".join(outline)}" {style}/>')
    return parts


def _text(x: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{words}</text>'
