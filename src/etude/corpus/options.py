"""CorpusOptions: the validated options that determine the content of a prepared corpus."""

from dataclasses import asdict, dataclass
from typing import Any

from etude.core.errors import DataError

SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|mask|>")
"""Special tokens of a tokenizer trained here: end of document, padding, and mask."""

SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How documents are chosen, split and encoded. The same documents and options give the same bytes."""

    vocab_size: int = 8192
    """Vocabulary size of the trained tokenizer; unused with `tokenizer`."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json, or a folder with one; by default one is trained on the training split."""
    end_token: str | None = None
    """The token that ends a document, if the tokenizer does not define one."""
    validation: float = 0.05
    test: float = 0.05
    """Shares of the documents."""
    salt: str = ""
    """Changing it gives another split and order."""
    text_key: str = "text"
    """Key of the text in JSONL files."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Files of a folder to include, by name or by path below the folder; by default text and source code."""
    min_chars: int = 1
    max_chars: int | None = None
    """Shorter or longer documents are dropped."""
    cut_chars: int | None = None
    """Longer documents are split at line ends into documents of at most this size."""
    keep_duplicates: bool = False
    tokenizer_bytes: int = 100_000_000
    """Maximum amount of text for training the tokenizer: a random sample of the training split."""

    def __post_init__(self) -> None:
        if min(self.validation, self.test) < 0 or self.validation + self.test >= 1:
            raise DataError(
                f"validation {self.validation} and test {self.test} leave nothing to train on; they must be at least "
                "0, and together less than 1"
            )
        if self.tokenizer is None and self.vocab_size < SMALLEST_VOCABULARY:
            raise DataError(
                f"vocab_size must be at least {SMALLEST_VOCABULARY}, for 256 bytes and {len(SPECIAL_TOKENS)} special "
                f"tokens, got {self.vocab_size}"
            )
        if self.vocab_size > 2**20:
            raise DataError(f"vocab_size must be at most {2**20:,}, got {self.vocab_size:,}")
        for name, least in (("min_chars", 0), ("max_chars", 1), ("cut_chars", 16), ("tokenizer_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name} must be at least {least}, got {value}")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise DataError(f"max_chars {self.max_chars} is below min_chars {self.min_chars}: no document is left")

    def facts(self) -> dict[str, Any]:
        """Return the options that determine the content as plain values, without paths of this machine."""
        values = asdict(self) | {"include": list(self.include), "exclude": list(self.exclude)}
        if values.pop("tokenizer") is None:
            del values["end_token"]
        else:
            del values["vocab_size"], values["tokenizer_bytes"]
        return values
