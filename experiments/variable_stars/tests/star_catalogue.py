"""A small catalogue of variable stars, written as the real one is."""

import bz2
import hashlib
import random
import sys
from pathlib import Path

EXPERIMENT = Path(__file__).parents[1]
if str(EXPERIMENT) not in sys.path:
    sys.path.append(str(EXPERIMENT))

from stars import Options, catalogue  # noqa: E402

HEAD = (
    "# ID Field StarID Type Subtype RA DECL ID_OGLE_II ID_MACHO ID_ASAS ID_GCVS ID_OTHER I V "
    + " ".join(f"P_{k} dP_{k} T0_{k} A_{k} R21_{k} phi21_{k} R31_{k} phi31_{k}" for k in (1, 2, 3))
    + " Remarks"
).split(" ", 1)
NAMES = [HEAD[0] + " ID", *HEAD[1].split()[1:]]
OPTIONS = Options(max_per_class=40, min_per_class=5, bins=8, image_codes=12, spectrum_codes=6)
NUMBERS = {"I": 18.0, "V": 18.6, "P_1": 0.55, "A_1": 0.5, "R21_1": 0.45, "phi21_1": 4.4, "R31_1": 0.3, "phi31_1": 2.6}


def line(star, kind="RRLyr", subtype="RRab", ra=5.0, dec=-69.0, **numbers):
    """Return a line of the catalogue; what is not given is missing."""
    cells = {"# ID": star, "Type": kind, "Subtype": subtype, "RA": ra, "DECL": dec, **numbers}
    return "\t".join(str(cells.get(name, "-99.99")) for name in NAMES)


def lines_of(stars=44):
    """Return a small catalogue: six classes, one of them too small, one without Fourier terms."""
    rng = random.Random(0)
    lines = ["# Objects: few", "\t".join(NAMES)]
    for number in range(stars):
        where = [(rng.uniform(0, 24), rng.uniform(-80, -20)) for _ in range(5)]
        terms_of = {"R21_1": rng.uniform(0.1, 0.5), "phi21_1": rng.uniform(4, 5), "R31_1": rng.uniform(0, 0.3)}
        terms_of["phi31_1"] = rng.uniform(1, 4)
        common = {"I": rng.uniform(14, 19), "A_1": rng.uniform(0.1, 0.9)}
        common["V"] = common["I"] + rng.uniform(0.3, 1)
        one = {**common, **terms_of}
        lines.append(line(f"OGLE-LMC-RRLYR-{number}", "RRLyr", "RRab", *where[0], P_1=rng.uniform(0.4, 0.8), **one))
        lines.append(line(f"OGLE-SMC-CEP-{number}", "Cep", "F", *where[1], P_1=rng.uniform(1, 30), **one))
        swapped = {**one, "R21_1": one["phi21_1"], "phi21_1": one["R21_1"], "R31_1": "-99.99", "phi31_1": "-99.99"}
        lines.append(line(f"OGLE-LMC-DSCT-{number}", "DSCT", "S", *where[2], P_1=rng.uniform(0.05, 0.2), **swapped))
        periods = {f"P_{k}": rng.uniform(20, 900) for k in (1, 2, 3)} | {f"A_{k}": rng.uniform(0, 2) for k in (2, 3)}
        lines.append(line(f"OGLE-BLG-LPV-{number}", "LPV", "Mira", *where[3], **common, **periods))
        dpv = {**common, "V": "-99.99", "P_1": rng.uniform(2, 9), "P_2": rng.uniform(60, 300), "A_2": 0.1}
        lines.append(line(f"OGLE-LMC-DPV-{number}", "DPV", "-99.99", *where[4], **dpv))
    return [*lines, line("OGLE-LMC-RCB-1", "RCB", "confirmed", 1.0, 2.0, I=13.0)]


def write_catalogue(folder, lines, monkeypatch):
    """Write a packed catalogue that the experiment takes for the right one."""
    packed = bz2.compress("\n".join(lines).encode())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / catalogue.FILE).write_bytes(packed)
    monkeypatch.setattr(catalogue, "FILES", {catalogue.FILE: hashlib.sha256(packed).hexdigest()})
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
