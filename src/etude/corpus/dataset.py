"""The data set `text_corpus`: text or code, tokenized on first use."""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from etude.config.registry import register
from etude.core.files import cache_folder
from etude.corpus.prepare import ensure_corpus
from etude.data.catalog.tokens import Length, Share, Way, load_tokens, prepare_tokens
from etude.data.splits import DataSplits
from etude.data.text.tokenizer import require_tokenizers

logger = logging.getLogger("etude")


@register("data", "text_corpus", prepare=prepare_tokens, check_installed=lambda _: require_tokenizers())
def load_text_corpus(
    inputs: list[str] | None = None,
    out: str | None = None,
    vocab_size: Annotated[int, Ge(300)] = 4096,
    tokenizer: str | None = None,
    validation: Share = 0.05,
    test: Share = 0.05,
    cut_chars: Annotated[int, Ge(16)] | None = None,
    read: Way = "blocks",
    length: Length = 256,
    packing: Literal["split", "fit"] = "split",
    mask_rate: Share = 0.0,
    bucket_batches: Annotated[int, Ge(0)] = 100,
) -> DataSplits:
    """Text or code, tokenized on first use.

    inputs: files, folders or globs; the Python standard library of this machine if none are given.
    out: folder for the token files; the cache by default.
    vocab_size: of the tokenizer trained on the training split.
    tokenizer: a Hugging Face tokenizer.json to use instead.
    validation, test: share of the documents, chosen by their content.
    cut_chars: split longer documents at line ends into documents of at most this size.

    The other arguments are those of the data set `tokens`.
    """
    chosen = inputs or ["stdlib"]
    options: dict[str, Any] = {"validation": validation, "test": test, "cut_chars": cut_chars}
    options |= {"vocab_size": vocab_size} if tokenizer is None else {"tokenizer": tokenizer}
    folder = Path(out).expanduser() if out is not None else _corpus_folder(chosen, options)
    if not folder.exists():
        logger.warning("tokenizing %s into %s, once", ", ".join(chosen), folder)
    ensure_corpus(chosen, folder, **options)
    return load_tokens(
        str(folder),
        read=read,
        length=length,
        packing=packing,
        mask_rate=mask_rate,
        bucket_batches=bucket_batches,
    )


def _corpus_folder(inputs: list[str], options: Mapping[str, Any]) -> Path:
    """A cache folder for these inputs and options: other ones get another folder."""
    places = [one if one == "stdlib" else str(Path(one).expanduser().resolve()) for one in inputs]
    facts = json.dumps([places, sorted(options.items()), sys.version_info[:2] if "stdlib" in inputs else None])
    digest = hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()
    return cache_folder("corpus") / f"{Path(inputs[0]).stem or 'text'}-{digest}"
