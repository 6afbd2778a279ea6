"""Training a byte-level BPE tokenizer on documents."""

from collections.abc import Iterator, Sequence
from typing import Any

from etude.core.files import write_bytes
from etude.corpus.worker.texts import Texts

PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the one sign or space before it: " of", "_name", ".join"
        r"\p{N}",  # digits one by one
        r" ?[^\s\p{L}\p{N}]+",  # signs
        r"[\r\n]+[ \t]*(?=\S)",  # line ends with the indentation of the next line: the shape of code
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How text is cut into words before byte pairs are joined. A line end is never joined to a letter or sign before it."""


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on documents of the index."""
    texts = Texts(task["folder"])

    def documents() -> Iterator[list[str]]:
        for start in range(task["start"], task["stop"], 64):
            yield texts.read(start, min(start + 64, task["stop"]))

    tokenizer = train_tokenizer(documents(), task["vocab_size"], task["special_tokens"])
    write_bytes(task["result"], tokenizer.to_str(pretty=True).encode() + b"\n")
    return {"vocab_size": tokenizer.get_vocab_size()}


def train_tokenizer(documents: Iterator[list[str]], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """Train a byte-level BPE tokenizer on groups of documents; the special tokens have the first ids."""
    from tokenizers import (  # type: ignore[import-untyped]
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
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
