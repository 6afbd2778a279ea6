"""Tokenizers: training, loading a tokenizer.json, finding special tokens, and encoding texts."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.data.text.tokenizer import load_tokenizer, tokenizer_file

PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with one preceding sign or space: " of", "_name", ".join"
        r"\p{N}",  # single digits
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"[\r\n]+[ \t]*(?=\S)",  # line ends with the indentation of the next line: typical of code
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pre-tokenization: how text is split into words before BPE merges. A line end never merges with preceding text."""

_KNOWN = {
    "end": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}
_CONFIG_KEYS = {"end": "eos_token", "pad": "pad_token", "mask": "mask_token"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of a tokenizer that other code needs."""

    vocab_size: int
    """The highest id plus one: the size of an embedding."""
    end: int
    pad: int | None
    mask: int | None
    """Ids of the end of a document, padding and mask, if these tokens exist."""

    def special_ids(self) -> dict[str, int | None]:
        """Return the ids by name."""
        ids = asdict(self)
        del ids["vocab_size"]
        return ids

    @property
    def dtype(self) -> str:
        """The smallest dtype of token files that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_vocabulary(path: str | Path, end_token: str | None = None) -> Vocabulary:
    """Find the vocabulary size and the special tokens of a tokenizer, from its config or by usual names."""
    tokenizer, file = load_tokenizer(path), tokenizer_file(path)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{file} has no tokens in its vocabulary")
    if end_token is not None and end_token not in vocabulary:
        raise DataError(f"{file} has no token {end_token!r}; name one that it has with --end-token")
    named = _named_tokens(file.parent) | ({} if end_token is None else {"end": end_token})
    ids: dict[str, int | None] = {}
    for role, known in _KNOWN.items():
        candidates = (named[role],) if named.get(role) in vocabulary else known
        ids[role] = next((vocabulary[token] for token in candidates if token in vocabulary), None)
    if ids["end"] is None:
        raise DataError(f"{file} has no known token for the end of a text; name one that it has with --end-token")
    return Vocabulary(max(vocabulary.values()) + 1, ids["end"], ids["pad"], ids["mask"])


def _named_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens named in the tokenizer_config.json beside the tokenizer."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = {role: config.get(key) for role, key in _CONFIG_KEYS.items()} if isinstance(config, dict) else {}
    named = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: token for role, token in named.items() if isinstance(token, str)}


def train_tokenizer(documents: Iterator[list[str]], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """Train a byte-level BPE tokenizer on groups of documents; special tokens have the first ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


class Encoder:
    """Encodes texts literally: special tokens spelled in a text are text, and nothing is added or truncated."""

    def __init__(self, path: str | Path) -> None:
        # Set explicitly, so that the library does not warn when data loader workers are forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.tokenizer = load_tokenizer(path)
        self.tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text; the library uses all cores."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]
