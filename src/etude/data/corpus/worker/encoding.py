"""Training a byte-level BPE tokenizer on documents, and encoding them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import replacing
from .texts import Texts

GROUP_CHARS = 1 << 18
LONG_CHARS = 1 << 20
_SEAM = re.compile(r"(?<=[A-Za-z0-9])\n")


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on documents of the index."""
    from tokenizers import (  # type: ignore[import-untyped]
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    texts = Texts(task["folder"])
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(task["pattern"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=task["vocab_size"],
        min_frequency=2,
        special_tokens=task["special_tokens"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def documents() -> Iterator[list[str]]:
        for start in range(task["start"], task["stop"], 64):
            yield texts.read(start, min(start + 64, task["stop"]))

    tokenizer.train_from_iterator(documents(), trainer)
    with replacing(task["result"]) as file:
        file.write(tokenizer.to_str(pretty=True).encode() + b"\n")
    return {"vocab_size": tokenizer.get_vocab_size()}


class Encoder:
    """Encodes texts as they are: special tokens that are spelled in a text are text, nothing is added or cut off."""

    def __init__(self, path: str, *, cut_long: bool) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.cut_long = cut_long

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text."""
        found = []
        for group in _groups(texts):
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=False)
            found += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return found

    def encode_long(self, text: str) -> NDArray[np.uint32]:
        """Encode a very long text in pieces, which takes far less memory and gives the same ids.

        The tokenizer trained here never joins a letter or digit to a line end after it, so a cut there changes nothing.
        """
        pieces, start = [], 0
        while self.cut_long and len(text) - start > LONG_CHARS:
            seam = _SEAM.search(text, start + LONG_CHARS)
            if seam is None:
                break
            pieces.append(text[start : seam.start()])
            start = seam.start()
        return np.concatenate(self.encode([*pieces, text[start:]]))


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
        _KEPT[folder] = Texts(folder), Encoder(str(Path(folder) / "tokenizer.json"), cut_long=task["cut_long"])
    texts, encoder = _KEPT[folder]
    found = texts.read(task["start"], task["stop"])
    if any(len(text) > LONG_CHARS for text in found):
        ids = [encoder.encode_long(text) for text in found]
    else:
        ids = encoder.encode(found)
    end = np.array([task["end"]], np.uint32)
    lengths = np.array([len(one) + 1 for one in ids], np.int64)
    joined = np.concatenate([part for one in ids for part in (one, end)]).astype(task["dtype"])
    with replacing(task["result"]) as file:
        np.savez(file, ids=joined, lengths=lengths)
    return {}
