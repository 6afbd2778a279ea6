"""The data of the variable stars: whole, the same again, and right."""

import json
import signal

import numpy as np
import pytest
import torch
from star_catalogue import EXPERIMENT, NAMES, OPTIONS, contents, lines_of, write_catalogue
from stars import COLUMNS, LENGTH, Options, build, catalogue, columns_of, prepare, read_schema
from stars.evaluate import open_split
from stars.layout import SCALARS
from stars.options import split_of

from etude.core import DataError
from etude.data import check_tokens, open_tokens
from forked_python import run_python


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


def test_other_options_are_refused_without_overwrite(made, tmp_path, monkeypatch):
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
    words = [EXPERIMENT, root, folder, catalogue.FILES[catalogue.FILE], when, json.dumps(OPTIONS.facts())]
    done = run_python("-c", KILLED, *words)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(DataError, match="is not there"):
        read_schema(folder)
    assert prepare(folder, OPTIONS, root=str(root), download=False) == schema
    assert contents(folder) == contents(out)


@pytest.mark.parametrize("wrong", [{"bins": 1}, {"validation": 0.0}, {"validation": 0.5, "test": 0.5}])
def test_options_that_leave_nothing_are_refused(wrong):
    with pytest.raises(DataError, match="must be"):
        Options(**wrong)
