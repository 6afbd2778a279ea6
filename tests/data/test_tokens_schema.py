"""A file beside token files that says what ids mean: formats of one's own, and plain text, which knows of none."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from etude.core.errors import DataError
from etude.data import TokenWriter, combine_streams, load_token_mixture, load_tokens
from etude.data.tokens import schema
from etude.data.tokens.schema import SchemaFormat, TokenSchema, find_schema
from forked_python import run_python


@dataclass(frozen=True)
class Letters(TokenSchema):
    """Ids are letters of an alphabet; the last one is padding."""

    alphabet: str

    @property
    def vocab_size(self):
        return len(self.alphabet)

    @property
    def num_types(self):
        return 1

    @property
    def pad_id(self):
        return len(self.alphabet) - 1

    @property
    def special_ids(self):
        return {"PAD": self.pad_id}

    def check(self, file):
        if file.meta.get("alphabet", self.alphabet) != self.alphabet:
            raise DataError(f"{file.path} has another alphabet")

    def difference(self, other, here="the first", there="the second"):
        return None if self == other else f"the alphabet is {self.alphabet} in {here}, {other.alphabet} in {there}"


@pytest.fixture
def letters(monkeypatch):
    """The format `letters.json`, read by a module of the user's own."""

    def read_schema(root):
        return Letters(json.loads(Path(root, "letters.json").read_text()))

    def refuse_without_schema(file):
        if "letters" in file.meta["alphabet"]:
            raise DataError(f"{file.path} lies without its letters.json")

    module = SimpleNamespace(read_schema=read_schema, refuse_without_schema=refuse_without_schema)
    monkeypatch.setitem(sys.modules, "my_letters", module)
    monkeypatch.setattr(schema, "FORMATS", [*schema.FORMATS, SchemaFormat("letters.json", "alphabet", "my_letters")])


def folder(path, letters=None, **meta):
    path.mkdir()
    if letters is not None:
        (path / "letters.json").write_text(json.dumps(letters))
    with TokenWriter(path / "train.bin", meta=meta) as writer:
        writer.add(np.array([0, 1, 2]))
        writer.add(np.array([2, 1]))
    return str(path)


@pytest.mark.usefixtures("letters")
def test_a_format_of_ones_own(tmp_path):
    splits = load_tokens(folder(tmp_path / "a", "abcd_"), read="documents", length=4)
    assert (splits.token_schema, splits.vocab_size, splits.num_types) == (Letters("abcd_"), 5, None)
    batch = next(iter(splits.make_loader("train", 2, shuffle=False)))
    assert sorted(batch["input_ids"].tolist()) == [[0, 1, 2], [2, 1, 4]]
    with pytest.raises(DataError, match="has another alphabet"):
        load_tokens(folder(tmp_path / "b", "abcd_", alphabet="wxyz_"))
    with pytest.raises(DataError, match="without its letters"):
        load_tokens(folder(tmp_path / "c", alphabet={"letters": "abcd_"}))
    assert load_tokens(folder(tmp_path / "d", alphabet={"other": 1}), length=4).token_schema is None


@pytest.mark.usefixtures("letters")
def test_streams_and_mixtures_compare_it(tmp_path):
    roots = {"one": folder(tmp_path / "a", "abcd_"), "two": folder(tmp_path / "b", "abcx_")}
    words = "'one' and 'two'.*abcd_ in 'one', abcx_ in 'two'"
    with pytest.raises(DataError, match=words):
        combine_streams({name: load_tokens(root, length=4) for name, root in roots.items()})
    with pytest.raises(DataError, match=words):
        load_token_mixture(roots, {"one": 1.0, "two": 1.0}, length=4)
    same = {"one": load_tokens(roots["one"], length=4), "again": load_tokens(roots["one"], length=4)}
    assert combine_streams(same).token_schema == Letters("abcd_")


@pytest.mark.usefixtures("letters")
def test_text_of_a_tokenizer_does_not_mean_the_same(tmp_path):
    known = load_tokens(folder(tmp_path / "a", "abcd_"), length=4)
    text = load_tokens(folder(tmp_path / "b", tokenizer_sha256="x"), length=4)
    unknown = load_tokens(folder(tmp_path / "c"), length=4)
    assert combine_streams({"a": known, "c": unknown}).token_schema == Letters("abcd_")
    with pytest.raises(DataError, match=r"'b'.*tokenizer.*'a'"):
        combine_streams({"b": text, "a": known})


def test_a_module_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "FORMATS", [SchemaFormat("letters.json", "alphabet", "no_such_module")])
    assert find_schema(folder(tmp_path / "a")) is None
    with pytest.raises(DataError, match=r"letters\.json.*no_such_module"):
        find_schema(folder(tmp_path / "b", "abcd_"))


def test_plain_text_opens_no_file_of_modalities(tmp_path):
    """Nor does a Trainer that is not given any."""
    program = f"""
import sys, torch
from etude import CausalTransformerLM, Trainer
from etude.data import load_tokens
splits = load_tokens({folder(tmp_path / "a", vocab_size=9)!r}, length=2)
model = CausalTransformerLM(splits.vocab_size, d_model=8, n_layers=1, n_heads=1, max_len=8)
Trainer(model, splits.make_loader("train", 1), config={{"epochs": 1, "device": "cpu"}}, progress=False).train()
print([name for name in sys.modules if name.startswith("etude.multimodal")])
"""
    done = run_python("-c", program)
    assert done.stdout.strip() == "[]", done.stderr
