"""Columns that are not features: row ids, copies of the target, and texts that should be numbers."""

import logging
import re
from collections.abc import Mapping, Sequence

import numpy as np

from etude.core.errors import DataError
from etude.core.spelling import listed, shorten
from etude.data.catalog.table import MIN_ROWS, Numbers, Table

logger = logging.getLogger("etude")
MAX_CATEGORIES = 32
"""Maximum categories of a feature: each becomes a column of the matrix."""
_FIRST = slice(0, 1000)
_LIKE_NUMBERS = re.compile(r"[-+]?\s?[$€£¥]?\s?\d[\d.,'_]*(e[-+]?\d+)?\s?[%$€£¥]?", re.IGNORECASE)


def screen(table: Table, target: str, named: frozenset[str]) -> dict[str, str]:
    """Return the columns to exclude and why; none that the user named."""
    found: dict[str, str] = {}
    for name in table.names:
        if name == target or name in named or table.num_rows < MIN_ROWS:
            continue
        _check_texts(table, name)
        if name in table.row_names:
            found[name] = "another value in every row"
        elif _is_copy(table, name, target, _FIRST) and _is_copy(table, name, target, slice(None)):
            found[name] = f"a copy of {target!r}"
    return found


def _check_texts(table: Table, name: str) -> None:
    """Raise DataError for a column of numbers that was read as text, because some values have another form."""
    values = table.texts[name].values if name in table.texts else []
    if len(values) <= MAX_CATEGORIES:
        return
    some = values[_FIRST]
    if 2 * sum(_LIKE_NUMBERS.fullmatch(value) is not None for value in some) < len(some):
        return
    odd = next((place for place, value in enumerate(values) if not _is_number(value)), 0)
    row = int(np.argmax(table.texts[name].codes == odd))
    raise DataError(
        f"{table.where(row)}: column {name!r} holds {shorten(values[odd])!r}, which is not a number, but numbers "
        f"elsewhere; fix the column, or exclude it with `exclude: [{name}]`"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def report(table: Table, left_out: Mapping[str, str], constant: Sequence[str]) -> None:
    """Log in one line each what is excluded, and which features carry no information."""
    if left_out:
        reasons = ", ".join(f"{name!r} ({reason})" for name, reason in left_out.items())
        logger.warning("%s: excluded: %s; name a column under columns to keep it", table.path, reasons)
    if constant:
        logger.warning("%s: the same value in every training row: %s", table.path, listed(constant))
    if counts := [name for name in table.names if name in table.row_counts and name not in left_out]:
        logger.warning(
            "%s: only counts the rows: %s; exclude it unless it is meaningful",
            table.path,
            listed(counts),
        )


def _is_copy(table: Table, name: str, target: str, rows: slice) -> bool:
    """Return whether a column equals the target, in some rows."""
    if name not in table.texts and target not in table.texts:
        return name in table.copies
    if name in table.texts and target in table.texts:
        column, goal = table.texts[name], table.texts[target]
        places = {value: place for place, value in enumerate(goal.values)}
        same = np.array([*(places.get(value, -2) for value in column.values), -1])[column.codes[rows]]
        return bool((same == goal.codes[rows]).all())
    one, other = (_numbers(table, each, rows) for each in (name, target))
    return one is not None and other is not None and np.allclose(one, other, rtol=1e-6, atol=0.0, equal_nan=True)


def _numbers(table: Table, name: str, rows: slice) -> Numbers | None:
    """Return a column as numbers; None if its texts are not numbers."""
    if name not in table.texts:
        (place,) = table.places([name])
        found: Numbers = table.numbers[rows, place] + table.reference[place]
        return found
    try:
        values = np.array([*map(float, table.texts[name].values), np.nan])
    except ValueError:
        return None
    return values[table.texts[name].codes[rows]]
