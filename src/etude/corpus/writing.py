"""Joins the encoded parts into token files, counts their tokens and puts the files in their place."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.files import write_bytes
from etude.corpus.index import SPLITS, Index, Part
from etude.corpus.pool import Unfinished
from etude.corpus.report import FACTS, CorpusReport, SplitCounts, entropy, unigram_loss
from etude.corpus.tokenizer import Vocabulary, checksum
from etude.data.tokens import TokenWriter


def write_splits(
    work: Path,
    out: Path,
    index: Index,
    parts: list[Part],
    vocabulary: Vocabulary,
    options: dict[str, Any],
    fingerprint: str,
    tell: Callable[[int, int], None],
) -> CorpusReport:
    """Write the token files and the tokenizer into `out`; a corpus that was there is no longer one from the start."""
    tokenizer = checksum(work / "tokenizer.json")
    meta = {
        "vocab_size": vocabulary.vocab_size,
        "special_ids": vocabulary.special_ids(),
        "tokenizer_sha256": tokenizer,
        "fingerprint": fingerprint,
    }
    splits: dict[str, SplitCounts] = {}
    counts: dict[str, Any] = {}
    done = 0
    tell(done, len(parts))
    for split, (start, stop) in index.ranges.items():
        counts[split] = np.zeros(vocabulary.vocab_size, np.int64)
        with TokenWriter(work / f"{split}.bin", dtype=vocabulary.dtype, meta={**meta, "split": split}) as writer:
            for part in parts:
                if part.split == split:
                    ids, lengths = _read_part(work / f"{split}-{part.number}.npz")
                    writer.add_many(ids, lengths)
                    counts[split] += np.bincount(ids, minlength=vocabulary.vocab_size)
                    done += 1
                    tell(done, len(parts))
        num_bytes = int(index.rows["num_bytes"][start:stop].sum())
        splits[split] = SplitCounts(stop - start, int(counts[split].sum()), num_bytes)
    (out / FACTS).unlink(missing_ok=True)
    for split in SPLITS:
        if split in splits:
            (work / f"{split}.bin").replace(out / f"{split}.bin")
        else:
            (out / f"{split}.bin").unlink(missing_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (work / name).exists():
            write_bytes(out / name, (work / name).read_bytes())
        else:
            (out / name).unlink(missing_ok=True)
    return CorpusReport(
        folder=out,
        splits=splits,
        vocab_size=vocabulary.vocab_size,
        dtype=vocabulary.dtype,
        special_ids=vocabulary.special_ids(),
        unigram_entropy=entropy(counts["train"]),
        validation_unigram_loss=unigram_loss(counts["train"], counts["validation"])
        if "validation" in splits
        else None,
        tokenizer_sha256=tokenizer,
        fingerprint=fingerprint,
        options=options,
    )


def _read_part(path: Path) -> tuple[Any, Any]:
    try:
        with np.load(path) as part:
            return part["ids"], part["lengths"]
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        path.unlink(missing_ok=True)
        raise Unfinished(f"{path} is damaged ({error}); run the command again, which makes it again") from error
