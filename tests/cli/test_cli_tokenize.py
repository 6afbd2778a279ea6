"""`etude tokenize`, `etude data check` and `etude data show`: what they print, and every mistake in one line."""

import importlib.util
import json
import os

import numpy as np
import pytest

from forked_python import run_python

LINES = [
    f"document number {number}: the quick brown fox, {number % 7} jumps over {number * number % 11} lazy dogs\n" * 3
    for number in range(60)
]
SMALL = ("--vocab-size", 280, "--validation", 0.2, "--test", 0.2)


@pytest.fixture
def texts(tmp_path):
    """A folder of texts, in the folder where commands run."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(LINES):
        (folder / f"{number}.txt").write_text(text)
    return folder


def test_tokenize_check_and_show(etude, texts, tmp_path):
    (texts / "photo.png").write_bytes(b"x")
    made = etude("tokenize", "texts", *SMALL)
    assert made.code == 0, made.err
    lines = made.out.splitlines()
    assert [line.split(" …")[0] for line in lines[:4]] == ["reading", "training the tokenizer", "encoding", "writing"]
    assert "made data/tokenized: a vocabulary of 280, ids as uint16" in lines
    facts = json.loads((tmp_path / "data/tokenized/dataset.json").read_text())
    for split, counts in facts["splits"].items():
        (row,) = [line.split() for line in lines if line.split()[0] == split]
        assert row[1:4] == [f"{counts[key]:,}" for key in ("documents", "tokens", "bytes")]
    assert f"unigram entropy {facts['unigram_entropy']:.3f} nats" in made.out
    assert lines[-1] == "  left out: 1 other kinds of file"

    again = etude("tokenize", "texts", *SMALL)
    assert again.code == 0
    assert "data/tokenized already exists, made from the same documents with the same options" in again.out

    checked = etude("data", "check", "data/tokenized/train.bin", "data/tokenized/test.bin")
    assert checked.code == 0
    assert "data/tokenized/train.bin: intact" in checked.out
    assert f"{facts['splits']['train']['tokens']:,} tokens" in checked.out

    shown = etude("data", "show", "data/tokenized/train.bin", "--sample", -1, "--max-tokens", 100_000)
    assert shown.out.split("\n", 1)[1].removesuffix("\n") in [text + "<|endoftext|>" for text in LINES]
    assert "the first 3 are shown" in etude("data", "show", "data/tokenized/train.bin", "--max-tokens", 3).out


def test_quiet_shows_no_progress(etude, texts):
    assert etude("tokenize", "texts", *SMALL, "-q").out.startswith("made data/tokenized")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "input 'nowhere' does not exist"),
        (["texts", "--include", "*.nothing"], "no text or code was found in texts; 60 other kinds of file"),
        (["texts", "--vocab-size", 9999], "use --vocab-size"),
        (["texts", "--vocab-size", 5], "vocab_size must be at least 259"),
        (["texts", "--validation", 2], "validation 2.0 and test 0.05"),
        (["texts", "--tokenizer", "bad.json"], "bad.json is not a tokenizer.json of the tokenizers library"),
        (["texts", "--min-chars", 100_000], "no text in any of 60 files (60 too short)"),
        (["texts/0.txt"], "of 1 documents none is left"),
        (["bad.jsonl"], "bad.jsonl:2: no key 'text' (keys: body); set it with --text-key"),
        (["broken.txt.gz"], "broken.txt.gz is not a readable gzip file"),
        (["texts", "--out", "bad.json"], "bad.json cannot be written: "),
        (["texts", "--out", "bad.json/x"], "bad.json/x cannot be written: Not a directory"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_mistake_is_one_line(etude, texts, tmp_path, arguments, words):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "not here"}\n')
    (tmp_path / "broken.txt.gz").write_bytes(b"\x1f\x8b\x08broken")
    assert words in etude("tokenize", *arguments, "-q").error


def test_other_corpus_in_the_folder(etude, texts):
    assert etude("tokenize", "texts", *SMALL).code == 0
    assert (
        "made with salt '', not 'x'; add --overwrite" in etude("tokenize", "texts", *SMALL, "--salt", "x", "-q").error
    )
    assert etude("tokenize", "texts", *SMALL, "--salt", "x", "--overwrite").code == 0


def test_library_that_is_not_installed(etude, texts, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else real(name))
    assert "install it with: pip install 'etude[text]'" in etude("tokenize", "texts").error


def test_damaged_file_exits_with_2(etude, texts, tmp_path):
    etude("tokenize", "texts", *SMALL)
    path = tmp_path / "data/tokenized/train.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert "train.bin" in etude("data", "check", path).error
    assert (
        "index from 0 to 8, not 999"
        in etude("data", "show", tmp_path / "data/tokenized/test.bin", "--sample", 999).error
    )


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_says_how_to_go_on(texts, tmp_path):
    """Interrupted when the first task is done, it exits with 130; the same command then finishes."""
    code = (
        "import os, signal, sys\n"
        "from etude.cli import data, main\n"
        "class Progress(data._Progress):\n"
        "    def __call__(self, step, done, total):\n"
        "        if step == 'encoding' and done: os.kill(os.getpid(), signal.SIGINT)\n"
        "data._Progress = Progress\n"
        "main.main()\n"
    )
    command = ["tokenize", "texts", *map(str, SMALL)]
    stopped = run_python("-c", code, *command, cwd=tmp_path)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr == "etude: stopped at once; run the same command again to continue\n"
    assert not (tmp_path / "data/tokenized/dataset.json").exists()


def test_checking_a_file_without_a_header_needs_the_type_of_its_ids(etude, tmp_path):
    np.arange(70_000, dtype=np.uint32).tofile(tmp_path / "ids.bin")
    unknown, given = (
        etude("data", "check", str(tmp_path / "ids.bin"), *more) for more in ((), ("--dtype", "uint32"))
    )
    assert unknown.code == 2
    assert "dtype" in unknown.err
    assert "flat, uint32" in given.out
    assert "69,999" in given.out
