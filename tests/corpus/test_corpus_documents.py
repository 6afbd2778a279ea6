"""Documents: what is text, where it begins and ends, which are the same; and encoding that loses nothing."""

import gzip
import io
import json
from itertools import pairwise

import pytest
from corpus_texts import texts
from hypothesis import example, given, settings, strategies as st
from tokenizers import Tokenizer

from etude.core.errors import DataError
from etude.corpus.documents import Skip, cut_at_lines, digests, documents, read_texts, scan
from etude.corpus.options import SPECIAL_TOKENS, CorpusOptions
from etude.corpus.sources import SourceFile
from etude.corpus.tokenizer import Encoder, train_tokenizer


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


def documents_of(path, kind="text", **options):
    """The documents of a file, packed if its name says so."""
    return list(documents(SourceFile(str(path), kind, path.suffix == ".gz", 0, 0), CorpusOptions(**options)))


def test_whole_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\u2028é\n".encode())
    assert documents_of(path) == ["one\r\ntwo\u2028é\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_pieces_of_a_file_are_the_whole(tmp_path, name):
    text = "".join(f"línea {number}\n" for number in range(50))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    found = documents_of(path, cut_chars=30)
    assert len(found) > 10
    assert "".join(found) == text


@pytest.mark.parametrize(
    ("raw", "reason"), [(b"ab\0cd", "binary"), (b"caf\xe9", "not UTF-8"), (b"\xff\xfea\0", "binary")]
)
def test_what_is_not_text_is_passed_over(tmp_path, raw, reason):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    with pytest.raises(Skip, match=reason):
        documents_of(path)


def scanned(folder, *paths, **options):
    """Where the documents of some files lie, and how many were passed over."""
    sources = [SourceFile(str(path), "text", False, 0, 0) for path in paths]
    return scan(sources, CorpusOptions(**options), folder / "texts", lambda done: None)


def test_file_that_turns_out_not_to_be_text_leaves_no_pieces(tmp_path):
    path, good = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_bytes(b"fine line\n" * 4000 + b"\xff")
    good.write_bytes(b"good")
    rows, skipped = scanned(tmp_path, path, good, cut_chars=20)
    assert read_texts(tmp_path / "texts", rows) == ["good"]
    assert skipped == {"not UTF-8": 1}
    assert (tmp_path / "texts").read_bytes() == b"good"


def test_a_file_that_changes_later_changes_nothing(tmp_path):
    """Documents are read once: what is encoded is what was hashed."""
    path = tmp_path / "a.txt"
    path.write_text("before")
    rows, _ = scanned(tmp_path, path)
    path.write_text("behind")
    assert read_texts(tmp_path / "texts", rows) == ["before"]
    path.unlink()
    assert read_texts(tmp_path / "texts", rows) == ["before"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=12))
def test_every_line_of_a_jsonl_file_is_a_document(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in lines))
    assert documents_of(path, "json") == lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"body": "x"}', r":3: no key 'text' \(keys: body\); set it with --text-key"),
        (b"{", r":3: not a line of JSON"),
        (b"[1]", r":3: expected an object with key 'text', got \[1\]"),
        (b'{"text": 5}', r":3: 'text' must be a string, got 5"),
        (b'{"text": "\xff"}', r":3: not a line of JSON"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_wrong_line_is_named(tmp_path, line, words, name):
    path = tmp_path / name
    raw = b'{"text": "a"}\n\n' + line + b"\n"
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    with pytest.raises(DataError, match=name + words):
        documents_of(path, "json")


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        scan([], CorpusOptions(), tmp_path / "texts", lambda done: None)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ encoding


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a tokenizer trained here."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(iter([["\n\n".join(texts(80))]]), 340, SPECIAL_TOKENS).to_str())
    return path


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@example(text="a<|endoftext|>b<|mask|>")
@example(text=" \t\r\n\n   x\x00\x85\u2028\ufeff é\U0001f600 12345")
def test_decoding_gives_back_the_text(tokenizer, text):
    (ids,) = Encoder(tokenizer).encode([text])
    assert Tokenizer.from_file(str(tokenizer)).decode(ids.tolist(), skip_special_tokens=False) == text
    assert ids.size == 0 or ids.min() >= len(SPECIAL_TOKENS), "a text cannot spell a special token"


def test_special_tokens_come_first(tokenizer):
    known = Tokenizer.from_file(str(tokenizer))
    assert [known.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
