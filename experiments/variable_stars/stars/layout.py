"""The sequence of a star: which token stands where, of which modality, and in which unit its errors are reported."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stars.catalogue import Catalogue
from stars.curves import NUM_PATCHES, curves, patches, pictures, terms

Floats = NDArray[np.float64]

PLACES = ("LMC", "SMC", "BLG")
"""Where OGLE looked: the two Magellanic Clouds and the Galactic bulge. It sets the distance, so the brightness."""

SCALARS = {"magnitude": "mag", "colour": "mag", "period": "dex", "amplitude": "dex"}
"""Modalities of single numbers and the units of their errors; periods (days) and amplitudes (mag) are log10."""
UNITS = {**SCALARS, "image": "mag", "spectrum": "of A1"}

COLUMNS = (
    ("BOS", None),
    ("place", "place"),
    ("I", "magnitude"),
    ("V-I", "colour"),
    ("log P1", "period"),
    ("log A1", "amplitude"),
    ("log P2", "period"),
    ("log A2", "amplitude"),
    ("log P3", "period"),
    ("log A3", "amplitude"),
    *((f"image {number}", "image") for number in range(NUM_PATCHES)),
    ("spectrum", "spectrum"),
    ("class", "class"),
)
"""Name and modality of every token. What is simple to measure comes first, what follows from it later: brightness,
colour, periods and amplitudes; the light curve; its Fourier terms, which can be read off the curve; then the class."""
LENGTH = len(COLUMNS)


def columns_of(modality: str) -> list[int]:
    """Return the places of a modality's tokens in a sequence.

    >>> columns_of("period")
    [4, 6, 8]
    """
    return [place for place, (_, name) in enumerate(COLUMNS) if name == modality]


@dataclass(frozen=True)
class Values:
    """What the tokens of N stars stand for; NaN is missing."""

    scalars: dict[str, Floats]
    """By column: I, V-I, log P1 … log A3."""
    spectrum: Floats
    """(N, 4): cosine and sine parts of the second and third harmonic, as shares of the first."""
    curve: Floats
    """(N, PHASES): the light curve from 0 to 1."""

    @property
    def patches(self) -> Floats:
        """The picture of the light curve in patches, (N, NUM_PATCHES, PATCH_SIZE)."""
        return patches(pictures(self.curve))


def values_of(catalogue: Catalogue) -> Values:
    """Return the values of the stars of a catalogue."""
    number = catalogue.numbers
    scalars = {"I": number["I"], "V-I": number["V"] - number["I"]}
    for k in (1, 2, 3):
        scalars[f"log P{k}"] = np.log10(number[f"P_{k}"])
        scalars[f"log A{k}"] = np.log10(number[f"A_{k}"])
    spectrum = terms(number["R21_1"], number["phi21_1"], number["R31_1"], number["phi31_1"])
    # Without the amplitude a curve is of no known size; the two are missing together.
    spectrum[np.isnan(number["A_1"]) | np.isnan(spectrum).any(1)] = np.nan
    return Values(scalars, spectrum, curves(spectrum))


def place_of(star: str) -> str:
    """Return where a star is.

    >>> place_of("OGLE-LMC-CEP-0001")
    'LMC'
    """
    return star.split("-")[1]


def class_of(kind: str, subtype: str) -> str:
    """Return the name of a class.

    >>> class_of("Cep", "F"), class_of("DPV", "-99.99")
    ('Cep F', 'DPV')
    """
    return kind if subtype == "-99.99" else f"{kind} {subtype}"
