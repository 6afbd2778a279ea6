"""Light curves: drawn from Fourier terms, as pictures of ink, and read off pictures again.

OGLE describes a pulsating star by I(t) = A0 + Σ A_k cos(2πk t/P + φ_k) with R_k1 = A_k/A_1 and φ_k1 = φ_k - k φ_1. The
shape is that of cos(x) + R21 cos(2x + φ21) + R31 cos(3x + φ31). A curve here is this shape over one period from
maximum light on, which is phase 0 in OGLE's ephemerides, scaled to 0 (brightest) … 1 (faintest); times the amplitude
of the catalogue, which is that between the extremes, it is in magnitudes.
"""

import numpy as np
from numpy.typing import NDArray

PHASES, ROWS, PATCH = 32, 16, 4
"""A picture has a column for each of 32 phases and 16 rows of magnitude; a patch is 4 columns."""
NUM_PATCHES, PATCH_SIZE = PHASES // PATCH, PATCH * ROWS
MARGIN, REACH = 2, 2.0
"""Rows left free above and below the curve, and how far from it ink reaches, in rows."""
FINE = 1024
"""Points at which a curve is computed to find its extremes; a multiple of PHASES."""

Floats = NDArray[np.float64]


def terms(r21: Floats, phi21: Floats, r31: Floats, phi31: Floats) -> Floats:
    """Return the spectra (N, 4): the harmonics' cosine and sine parts, as shares of the first amplitude."""
    parts = (r21 * np.cos(phi21), r21 * np.sin(phi21), r31 * np.cos(phi31), r31 * np.sin(phi31))
    return np.stack(parts, axis=-1)


def curves(spectra: Floats) -> Floats:
    """Return the curves (N, PHASES) of spectra (N, 4); NaN where a term is.

    >>> curves(np.zeros((1, 4)))[0, [0, 8, 16]].round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    x = 2 * np.pi * np.arange(FINE) / FINE
    # R cos(kx + φ) = R cos φ · cos kx - R sin φ · sin kx
    waves = np.stack([np.cos(2 * x), -np.sin(2 * x), np.cos(3 * x), -np.sin(3 * x)])
    fine = np.cos(x) + spectra @ waves
    low, high = fine.min(1, keepdims=True), fine.max(1, keepdims=True)
    places = (np.where(np.isnan(fine), np.inf, fine).argmin(1)[:, None] + np.arange(0, FINE, FINE // PHASES)) % FINE
    return (np.take_along_axis(fine, places, 1) - low) / (high - low)


def pictures(drawn: Floats) -> Floats:
    """Return pictures (N, PHASES, ROWS): in every column ink of 1 in all around the curve, bright stars on top.

    Ink falls off in a straight line, so that its centre is exactly where the curve is: `read_off` gives it back.
    """
    centre = MARGIN + drawn * (ROWS - 1 - 2 * MARGIN)
    ink = np.clip(1 - np.abs(np.arange(ROWS) - centre[..., None]) / REACH, 0, None)
    ink[np.isnan(drawn)] = np.nan
    return ink / ink.sum(-1, keepdims=True)


def read_off(seen: Floats) -> Floats:
    """Return the curves (N, PHASES) in pictures (N, PHASES, ROWS): the centre of the ink of each column.

    >>> drawn = curves(np.array([[0.3, -0.3, 0.1, 0.2]]))
    >>> bool(np.allclose(read_off(pictures(drawn)), drawn))
    True
    """
    centre = (seen * np.arange(ROWS)).sum(-1) / seen.sum(-1)
    return (centre - MARGIN) / (ROWS - 1 - 2 * MARGIN)


def patches(seen: Floats) -> Floats:
    """Cut pictures (N, PHASES, ROWS) into patches (N, NUM_PATCHES, PATCH_SIZE)."""
    return seen.reshape(len(seen), NUM_PATCHES, PATCH_SIZE)


def joined(cut: Floats) -> Floats:
    """Put patches (N, NUM_PATCHES, PATCH_SIZE) together again to pictures."""
    return cut.reshape(len(cut), PHASES, ROWS)
