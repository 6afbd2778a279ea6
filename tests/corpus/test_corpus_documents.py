"""Documents: what is text, where it begins and ends, which are the same; and encoding that loses nothing."""

import gzip
import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import texts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from etude.core.errors import DataError
from etude.corpus.index import Index
from etude.corpus.options import SPECIAL_TOKENS, CorpusOptions
from etude.corpus.worker import encoding
from etude.corpus.worker.documents import (
    Skip,
    cut_at_lines,
    digests,
    json_documents,
    text_documents,
)
from etude.corpus.worker.encoding import Encoder
from etude.corpus.worker.process import answer
from etude.corpus.worker.texts import Texts


def digest(text: str, salt: str = "") -> tuple[int, int]:
    return digests(text, text.encode(), salt)[:2]


def test_copies_that_look_the_same_have_one_digest():
    text = "def f():\n    return 'é'\n"
    copies = [text.replace("\n", "\r\n"), text.strip(), "\n\n" + text, text.replace(":\n", ":  \n")]
    for copy in (*copies, "def f():\r    return 'e\u0301'"):
        assert digest(copy) == digest(text), copy
    for other in (text + "x", text.replace("    ", "  "), text.replace("\n", ""), text.upper()):
        assert digest(other) != digest(text), other
    assert digest(text, "other") != digest(text)
    assert digests("a\n", b"a\n", "")[2] != digests("a", b"a", "")[2]


@settings(deadline=None)
@given(st.text(), st.integers(1, 40))
def test_cutting_loses_nothing_and_keeps_to_the_limit(text, limit):
    pieces = list(cut_at_lines(io.StringIO(text, newline="\n"), limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)
    for piece, after in pairwise(pieces):
        line = (piece.rpartition("\n")[2] + after).partition("\n")[0]
        assert piece.endswith("\n") or len(line) + 1 > limit, "a line that would have fitted was cut"


def test_whole_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\u2028é\n".encode())
    assert list(text_documents(str(path), False, None)) == [(3, "one\r\ntwo\u2028é\n")]


@pytest.mark.parametrize("packed", [False, True])
def test_pieces_of_a_file_lie_where_it_says(tmp_path, packed):
    text = "".join(f"línea {number}\n" for number in range(50))
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = list(text_documents(str(path), packed, 30))
    assert len(found) > 10
    assert [text.encode()[offset : offset + len(piece.encode())].decode() for offset, piece in found] == [
        piece for _, piece in found
    ]


@pytest.mark.parametrize(
    ("raw", "reason"), [(b"ab\0cd", "binary"), (b"caf\xe9", "not UTF-8"), (b"\xff\xfea\0", "binary")]
)
def test_what_is_not_text_is_passed_over(tmp_path, raw, reason):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    with pytest.raises(Skip, match=reason):
        list(text_documents(str(path), False, None))


def test_file_that_turns_out_not_to_be_text_leaves_no_pieces(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine line\n" * 4000 + b"\xff")
    good = tmp_path / "b.txt"
    good.write_bytes(b"good")
    sources = [[0, str(path), "text", False, 0, 0], [1, str(good), "text", False, 0, 0]]
    options = {"salt": "", "text_key": "text", "min_chars": 1, "max_chars": None, "cut_chars": 20}
    task = {"do": "scan", "number": 0, "sources": sources, "options": options}
    assert answer(task | {"spool": str(tmp_path / "s"), "result": str(tmp_path / "r.npz")}) == {"done": {}}
    with np.load(tmp_path / "r.npz") as result:
        assert result["rows"]["source"].tolist() == [1]
        assert result["skipped"].sum() == 1


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=12), st.data())
def test_stretches_of_a_jsonl_file_give_every_line_once(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in lines))
    size = path.stat().st_size
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=5))})
    found = [
        (offset, size, text)
        for start, stop in pairwise(cuts)
        for offset, size, text in json_documents(str(path), False, start, stop, "text")
    ]
    assert [text for _, _, text in found] == lines
    raw = path.read_bytes()
    assert [json.loads(raw[offset : offset + size])["text"] for offset, size, _ in found] == lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"body": "x"}', r"a\.jsonl:3: no key 'text' \(keys: body\); name it with --text-key"),
        (b"{", r"a\.jsonl:3: not a line of JSON"),
        (b"[1]", r"a\.jsonl:3: expected an object with key 'text', got a list"),
        (b'{"text": 5}', r"a\.jsonl:3: 'text' must be a string, got a number"),
        (b'{"text": "\xff"}', r"a\.jsonl:3: not a line of JSON"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_line_is_named(tmp_path, line, words, packed):
    path = tmp_path / "a.jsonl"
    raw = b'{"text": "a"}\n\n' + line + b"\n"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(DataError, match=words):
        list(json_documents(str(path), packed, 0, 1 << 40, "text"))


def test_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    task = {"do": "scan", "number": 0, "sources": [], "options": {}}
    reply = answer(task | {"spool": str(tmp_path / "s"), "result": str(tmp_path / "r.npz")})
    assert (
        "r.npz cannot be written (No space left on device); fix this and run the command again" in reply["unfinished"]
    )
    assert list(tmp_path.iterdir()) == []


def test_own_mistakes_keep_their_traceback():
    assert "KeyError" in answer({"do": "nothing"})["crash"]


# ------------------------------------------------------------------------------------------------ encoding


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a tokenizer trained by a worker."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "all.txt").write_text("\n\n".join(texts(80)), encoding="utf-8")
    options = {"salt": "", "text_key": "text", "min_chars": 1, "max_chars": None, "cut_chars": None}
    (folder / "plan.json").write_text(
        json.dumps({"sources": [[str(folder / "all.txt"), "text"]], "options": options})
    )
    source = [0, str(folder / "all.txt"), "text", False, 0, 0]
    task = {"do": "scan", "number": 0, "sources": [source], "options": options, "spool": str(folder / "spool-0")}
    assert answer(task | {"result": str(folder / "scan-0.npz")}) == {"done": {}}
    with np.load(folder / "scan-0.npz") as scan:
        np.save(folder / "index.npy", Index(scan["rows"], CorpusOptions(validation=0, test=0)).rows)
    task = {"do": "train", "folder": str(folder), "start": 0, "stop": 1, "vocab_size": 340}
    task |= {"special_tokens": list(SPECIAL_TOKENS), "result": str(folder / "tokenizer.json")}
    assert answer(task) == {"done": {"vocab_size": 340}}
    return folder / "tokenizer.json"


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@example(text="a<|endoftext|>b<|mask|>")
@example(text=" \t\r\n\n   x\x00\x85\u2028\ufeff é\U0001f600 12345")
def test_decoding_gives_back_the_text(tokenizer, text):
    (ids,) = Encoder(str(tokenizer)).encode([text])
    assert Tokenizer.from_file(str(tokenizer)).decode(ids.tolist(), skip_special_tokens=False) == text
    assert ids.size == 0 or ids.min() >= len(SPECIAL_TOKENS), "a text cannot spell a special token"


def test_special_tokens_come_first(tokenizer):
    known = Tokenizer.from_file(str(tokenizer))
    assert [known.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
PARTS = st.sampled_from(
    [
        *("word", " ", "\n", "\n    ", "\r\n", "7", "é", "_x", "("),
        *("\t", "\n\n", "\x1c", "\x85", "東京", "²", "<|mask|>"),
    ]
)


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(ASCII, st.text(st.characters(codec="utf-8"), max_size=60), st.lists(PARTS).map("".join)))
@example(text="".join(map(chr, range(300))) + "\na\n".join(map(chr, range(300))))
def test_ids_are_those_of_the_library(tokenizer, text):
    """Words looked up, lines apart and long texts in pieces change nothing."""
    encoder = Encoder(str(tokenizer))
    assert encoder.words is not None
    (expected,) = encoder.by_library([text])
    with pytest.MonkeyPatch.context() as patch:
        for limit in (encoding.PIECE_CHARS, 5):
            patch.setattr(encoding, "PIECE_CHARS", limit)
            assert encoder.encode([text])[0].tolist() == expected.tolist()


def test_ids_of_real_code_are_those_of_the_library(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "MAX_WORDS", 100)
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (json, io, gzip, np, pytest, encoding)]
    encoder = Encoder(str(tokenizer))
    for ids, expected in zip(encoder.encode(sources), encoder.by_library(sources), strict=True):
        assert ids.tolist() == expected.tolist()
    assert len(encoder.words) <= 100


def test_long_text_is_cut(monkeypatch):
    """So that the test above says something."""
    monkeypatch.setattr(encoding, "PIECE_CHARS", 5)
    assert list(encoding._pieces("words\nmore words\nand more")) == ["words", "\nmore words", "\nand more"]


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(normalizer={"type": "NFC"}),
        lambda config: config["pre_tokenizer"]["pretokenizers"].pop(),
        lambda config: config["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"),
        lambda config: config["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda config: config["model"].update(dropout=0.1),
        lambda config: config["added_tokens"][0].update(special=False),
        lambda config: config.update(pre_tokenizer=None),
    ],
)
def test_tokenizers_that_cut_otherwise_are_left_to_the_library(tokenizer, change):
    config = json.loads(tokenizer.read_text(encoding="utf-8"))
    assert encoding.trained_here(config)
    change(config)
    assert not encoding.trained_here(config)


def test_changed_file_is_noticed(tokenizer, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("plan.json", "index.npy"):
        (folder / name).write_bytes((tokenizer.parent / name).read_bytes())
    plan = json.loads((folder / "plan.json").read_text())
    plan["sources"] = [[str(tmp_path / "changed.txt"), "text"]]
    (folder / "plan.json").write_text(json.dumps(plan))
    original = (tokenizer.parent / "all.txt").read_text(encoding="utf-8")
    (tmp_path / "changed.txt").write_text(original, encoding="utf-8")
    assert Texts(str(folder)).read(0, 1) == [original]
    (tmp_path / "changed.txt").write_text(original.replace("alpha", "alphA", 1), encoding="utf-8")
    with pytest.raises(DataError, match="changed while it was read"):
        Texts(str(folder)).read(0, 1)
    (tmp_path / "changed.txt").unlink()
    with pytest.raises(DataError, match="was removed while"):
        Texts(str(folder)).read(0, 1)
