"""Tokenizers: loading a tokenizer.json, and finding its special tokens."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.errors import DataError
from etude.corpus.pool import require_tokenizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

_KNOWN = {
    "end": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the rest needs to know of a tokenizer."""

    vocab_size: int
    """The highest id and one: what an embedding must hold."""
    end: int
    pad: int | None
    mask: int | None
    """Ids of the end of a document, of padding and of the mask, if there are such tokens."""

    def special_ids(self) -> dict[str, int | None]:
        """Return the ids by name."""
        ids = asdict(self)
        del ids["vocab_size"]
        return ids

    @property
    def dtype(self) -> str:
        """The smallest type of token files that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json that a file or folder stands for."""
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        where = f"{path} has no tokenizer.json" if path.is_dir() else f"tokenizer {path} does not exist"
        raise DataError(f"{where}; give a tokenizer.json, or a folder that has one")
    return file


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load a tokenizer.json, or the one in a folder; nothing is truncated or padded. Raises DataError."""
    require_tokenizers()
    from tokenizers import Tokenizer

    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no narrower class
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{file} is not a tokenizer.json of the tokenizers library ({reason})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_vocabulary(path: str | Path, end_token: str | None = None) -> Vocabulary:
    """Find the size of the vocabulary and the special tokens of a tokenizer, by its config or by usual names."""
    tokenizer, file = load_tokenizer(path), tokenizer_file(path)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{file} has no tokens in its vocabulary")
    named = _named_tokens(file.parent)
    ids: dict[str, int | None] = {}
    for role, known in _KNOWN.items():
        own = end_token if role == "end" and end_token is not None else named.get(role)
        candidates = (own,) if own in vocabulary else known
        ids[role] = next((vocabulary[token] for token in candidates if token in vocabulary), None)
    if end_token is not None and end_token not in vocabulary:
        raise DataError(f"{file} has no token {end_token!r}; name one that it has with --end-token")
    if ids["end"] is None:
        raise DataError(f"{file} has no known token for the end of a text; name one that it has with --end-token")
    return Vocabulary(max(vocabulary.values()) + 1, ids["end"], ids["pad"], ids["mask"])


def _named_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json beside the tokenizer names."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    found = {}
    for role, key in (("end", "eos_token"), ("pad", "pad_token"), ("mask", "mask_token")):
        token: Any = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[role] = token
    return found


def check_trained(path: Path, asked: int) -> None:
    """Raise DataError if the corpus was too small for the vocabulary that was asked for."""
    size = read_vocabulary(path).vocab_size
    assert size <= asked
    if size < asked:
        raise DataError(
            f"the training split has text for a vocabulary of {size:,} only; "
            f"use --vocab-size {size} or less, or more text"
        )
