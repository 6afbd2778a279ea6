"""Escaped pieces of HTML: names and values of a run may hold anything."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from etude.core.spelling import printable

MOST_CHARS = 300


def text(value: Any, length: int = MOST_CHARS) -> str:
    """Return a value as text of a page or of an attribute.

    >>> text("<b>\\x00&")
    '&lt;b&gt;\ufffd&amp;'
    """
    return html.escape(printable(str(value), length))


def block(value: str, length: int) -> str:
    """Return a longer text with its lines."""
    shown = value if len(value) <= length else f"{value[:length]}\n… {len(value) - length:,} more characters"
    return html.escape("".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in shown))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are HTML already."""
    titles = "".join(f"<th>{one}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def section(title: str, *parts: str) -> str:
    """Return a section, or nothing if all its parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{text(title)}</h2>\n{inside}\n</section>" if inside else ""


def folded(title: str, inside: str) -> str:
    """Return something that opens on a click."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>" if inside else ""
