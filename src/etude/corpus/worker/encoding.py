"""Encoding documents: by the library or, several times as fast, ASCII text by looking up its words."""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.files import replacing
from etude.corpus.worker.texts import Texts
from etude.corpus.worker.training import PATTERN

GROUP_CHARS = 1 << 18
PIECE_CHARS = 1 << 20
MAX_WORDS = 1 << 18
"""How many words and their ids are remembered."""

_SEAM = re.compile(r"(?<=\w)(?=\n)")
"""Where a text can be cut without changing its ids: PATTERN never joins a line end to a word before it."""

_SPACE = r" \t\n\r\f\v"
_ASCII_WORDS = re.compile(
    PATTERN.replace(r"[^\s\p{L}\p{N}]", f"[^{_SPACE}A-Za-z0-9]")
    .replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    .replace(r"\p{L}", "[A-Za-z]")
    .replace(r"\p{N}", "[0-9]")
    .replace(r"\S", f"[^{_SPACE}]")
    .replace(r"\s", f"[{_SPACE}]")
)
"""PATTERN for ASCII text, as `re` can match it; white space is spelled out, for the libraries differ there."""

_PRINTABLE = {byte for byte in range(128) if 33 <= byte <= 126}
_BYTE_LEVEL = {
    byte: 256 + number for number, byte in enumerate(byte for byte in range(128) if byte not in _PRINTABLE)
}
"""How byte-level tokenizers spell the ASCII characters that are not printable."""


class Encoder:
    """Encodes texts as they are: special tokens that are spelled in a text are text, nothing is added or cut off."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer  # type: ignore[import-untyped]

        raw = Path(path).read_text(encoding="utf-8")
        self.tokenizer = Tokenizer.from_str(raw)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.words = _Words(self.tokenizer.model) if trained_here(json.loads(raw)) else None

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text."""
        if self.words is None:
            return self.by_library(texts)
        return [self._by_words(text, self.words) for text in texts]

    def by_library(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text, by the library alone."""
        found = []
        for group in _groups(texts):
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=False)
            found += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return found

    def _by_words(self, text: str, words: "_Words") -> NDArray[np.uint32]:
        """Look up the words of ASCII text; the library takes the lines that are not."""
        found: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
        for piece in _pieces(text):
            lines = [piece] if piece.isascii() else _SEAM.split(piece)
            for ascii_only, group in groupby(lines, str.isascii):
                if ascii_only:
                    ids = b"".join(map(words.__getitem__, _ASCII_WORDS.findall("".join(group))))
                    found.append(np.frombuffer(ids, np.uint32))
                else:
                    found += self.by_library(list(group))
        return np.concatenate(found)


class _Words(dict[str, bytes]):
    """The ids of ASCII words, by the word; those of a new word are found when it is asked for."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __missing__(self, word: str) -> bytes:
        if len(self) >= MAX_WORDS:
            self.clear()
        ids = [token.id for token in self.model.tokenize(word.translate(_BYTE_LEVEL))]
        self[word] = found = np.array(ids, np.uint32).tobytes()
        return found


def trained_here(config: dict[str, Any]) -> bool:
    """Whether a tokenizer.json cuts text as `train` has it: then its words can be looked up one by one."""
    split, level = {"type": "Split", "pattern": {"Regex": PATTERN}}, {"type": "ByteLevel", "use_regex": False}
    steps = (config.get("pre_tokenizer") or {}).get("pretokenizers") or []
    return (
        config.get("normalizer") is None
        and len(steps) == 2
        and split.items() <= steps[0].items()
        and (steps[0].get("behavior"), steps[0].get("invert")) == ("Isolated", False)
        and (level | {"add_prefix_space": False}).items() <= steps[1].items()
        and config["model"].get("type") == "BPE"
        and not any(
            config["model"].get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        and all(token["special"] for token in config.get("added_tokens", ()))
    )


def _pieces(text: str) -> Iterator[str]:
    """Cut a very long text, whose words would take much memory, where a cut changes nothing."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        seam = _SEAM.search(text, start + PIECE_CHARS)
        if seam is None:
            break
        yield text[start : seam.start()]
        start = seam.start()
    yield text[start:]


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Group texts so that the encodings of one group, which are large, fit in little memory."""
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and chars + len(text) > GROUP_CHARS:
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


_KEPT: dict[str, tuple[Texts, Encoder]] = {}


def encode(task: dict[str, Any]) -> dict[str, Any]:
    """Encode documents of the index into one part of a split: ids one after the other, and their lengths."""
    folder = task["folder"]
    if folder not in _KEPT:
        _KEPT[folder] = Texts(folder), Encoder(str(Path(folder) / "tokenizer.json"))
    texts, encoder = _KEPT[folder]
    ids = encoder.encode(texts.read(task["start"], task["stop"]))
    end = np.array([task["end"]], np.uint32)
    lengths = np.array([len(one) + 1 for one in ids], np.int64)
    joined = np.concatenate([part for one in ids for part in (one, end)]).astype(task["dtype"])
    with replacing(task["result"]) as file:
        np.savez(file, ids=joined, lengths=lengths)
    return {}
