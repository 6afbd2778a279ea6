"""Building one corpus: read documents, train a tokenizer, encode chunks, write token files.

Finished work is kept in a separate folder, so that a killed run continues where it stopped.
"""

import hashlib
import json
import logging
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.core.files import beside, replacing, write_bytes
from etude.corpus.documents import Locations, read_texts, scan
from etude.corpus.index import SPLITS, Index
from etude.corpus.options import SPECIAL_TOKENS, CorpusOptions
from etude.corpus.report import (
    FACTS,
    INPUTS,
    CorpusReport,
    SplitCounts,
    entropy,
    read_inputs,
    read_report,
    unigram_loss,
    write_json,
)
from etude.corpus.sources import Found, absolute
from etude.corpus.tokenizer import Encoder, Vocabulary, checksum, read_vocabulary, train_tokenizer
from etude.data.text.tokenizer import tokenizer_file
from etude.data.tokens.writer import TokenWriter

logger = logging.getLogger("etude")

Progress = Callable[[str, int, int], None]
"""Called on progress with the stage, the amount done, and the total (0: unknown)."""

WORK, TRASH = ".partial-", ".trash-"
VERSION = 3


@dataclass
class Job:
    """One corpus being built."""

    inputs: list[str]
    out: Path
    options: CorpusOptions
    facts: dict[str, Any]
    found: Found
    progress: Progress

    @cached_property
    def stamp(self) -> str:
        """A hash of everything that determines the output on this machine, without reading the files."""
        files = [[str(Path(source.path).absolute()), source.size, source.modified_ns] for source in self.found.files]
        return hashlib.sha256(json.dumps([VERSION, version("tokenizers"), self.facts, files]).encode()).hexdigest()

    @property
    def work(self) -> Path:
        """The folder of finished work."""
        return self.out / f"{WORK}{self.stamp[:16]}"

    def reuse(self) -> CorpusReport | None:
        """Return the existing corpus if it is this one. Raises DataError if other files are in the way."""
        if not (self.out / FACTS).exists():
            names = [f"{split}.bin" for split in SPLITS] + ["tokenizer.json"]
            there = [name for name in names if (self.out / name).exists()]
            if there and not any(self.out.glob(f"{WORK}*")):
                raise DataError(
                    f"{self.out} already has {', '.join(there)}; choose another --out, or use --overwrite"
                )
            return None
        report = read_report(self.out)
        report.check(self.facts)
        known = read_inputs(self.out)
        if known.get("stamp") != self.stamp:
            return None
        self._clean()
        return replace(report, skipped=known["skipped"], num_duplicates=known["num_duplicates"])

    def make(self, overwrite: bool) -> CorpusReport:
        """Do the remaining work."""
        if not self.work.exists() and any(self.out.glob(f"{WORK}*")):
            logger.warning("inputs or options differ from those of the interrupted run; starting over")
            self._clean()
        self.work.mkdir(exist_ok=True)
        try:
            return self._make(overwrite)
        except DataError as error:
            if not isinstance(error.__cause__, (OSError, zipfile.BadZipFile)):
                self._clean()  # retrying would fail the same way
            raise

    def _make(self, overwrite: bool) -> CorpusReport:
        rows, skipped = self._scan()
        index = Index(rows, self.options)
        fingerprint = index.fingerprint(self.facts)
        if (self.out / FACTS).exists() and not overwrite:
            report = read_report(self.out)
            if report.fingerprint != fingerprint:
                raise DataError(
                    f"{self.out} holds a corpus of other documents; "
                    f"add --overwrite to replace it, or choose another --out"
                )
        else:
            index.check(self.options)
            self._tokenizer(index.training_sample(self.options.tokenizer_bytes))
            vocabulary = read_vocabulary(self.work, self.options.end_token)
            report = self._write(index, self._encode(index, vocabulary), vocabulary, fingerprint)
        found: dict[str, Any] = {"skipped": skipped, "num_duplicates": index.num_duplicates}
        write_json(self.out / INPUTS, {"stamp": self.stamp, "inputs": absolute(self.inputs), **found})
        write_json(self.out / FACTS, report.facts())  # written last: it marks the corpus as complete
        self._clean()
        return replace(report, **found)

    def _scan(self) -> tuple[Locations, dict[str, int]]:
        """Find all documents; return their locations, and how many were skipped, by reason."""
        result, files = self.work / "documents.npz", self.found.files
        if not result.exists():
            total = sum(source.size for source in files)
            rows, passed_over = scan(
                files, self.options, self._texts, lambda done: self.progress("reading", done, total)
            )
            with replacing(result) as file:
                np.savez(file, rows=rows, skipped=json.dumps(passed_over))
        with np.load(result) as scanned:
            rows, skipped = scanned["rows"], self.found.skipped + Counter(json.loads(str(scanned["skipped"])))
        if not len(rows):
            why = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            raise DataError(f"no text in any of {len(files):,} files ({why or 'all empty'})")
        return rows, dict(skipped)

    @property
    def _texts(self) -> Path:
        return self.work / "texts"

    def _tokenizer(self, sample: Locations) -> None:
        """Train a tokenizer on some documents, or copy the given one."""
        result = self.work / "tokenizer.json"
        if self.options.tokenizer is not None:
            given = tokenizer_file(self.options.tokenizer)
            write_bytes(result, given.read_bytes())
            if (config := given.with_name("tokenizer_config.json")).is_file():
                shutil.copyfile(config, self.work / config.name)
            return
        asked = self.options.vocab_size
        if not result.exists():
            self.progress("training the tokenizer", 0, 0)
            groups = (read_texts(self._texts, sample[start : start + 64]) for start in range(0, len(sample), 64))
            tokenizer = train_tokenizer(groups, asked, SPECIAL_TOKENS)
            write_bytes(result, tokenizer.to_str(pretty=True).encode() + b"\n")
        if (size := read_vocabulary(result).vocab_size) < asked:
            raise DataError(
                f"the training split has text for a vocabulary of {size:,} only; "
                f"use --vocab-size {size} or less, or more text"
            )

    def _encode(self, index: Index, vocabulary: Vocabulary) -> dict[str, list[Path]]:
        """Encode the documents of all splits in chunks; return the files with their ids and lengths."""
        encoder, end = Encoder(self.work), np.array([vocabulary.end], np.uint32)
        done, total = 0, int(index.rows["size"].sum())
        parts: dict[str, list[Path]] = {}
        for split in index.splits:
            parts[split] = []
            for number, rows in enumerate(index.parts(split)):
                result = self.work / f"{split}-{number}.npz"
                if not result.exists():
                    ids = encoder.encode(read_texts(self._texts, rows))
                    joined = np.concatenate([part for one in ids for part in (one, end)]).astype(vocabulary.dtype)
                    with replacing(result) as file:
                        np.savez(file, ids=joined, lengths=np.array([len(one) + 1 for one in ids], np.int64))
                parts[split].append(result)
                done += int(rows["size"].sum())
                self.progress("encoding", done, total)
        return parts

    def _write(
        self, index: Index, parts: dict[str, list[Path]], vocabulary: Vocabulary, fingerprint: str
    ) -> CorpusReport:
        """Write the token files and the tokenizer into `out`; an existing corpus is invalidated first."""
        shared: dict[str, Any] = {"vocab_size": vocabulary.vocab_size, "special_ids": vocabulary.special_ids()}
        shared |= {"tokenizer_sha256": checksum(self.work / "tokenizer.json"), "fingerprint": fingerprint}
        splits: dict[str, SplitCounts] = {}
        counts = {split: np.zeros(vocabulary.vocab_size, np.int64) for split in parts}
        for split, rows in index.splits.items():
            meta = {**shared, "split": split}
            with TokenWriter(self.work / f"{split}.bin", dtype=vocabulary.dtype, meta=meta) as writer:
                for number, path in enumerate(parts[split]):
                    self.progress("writing", number, len(parts[split]))
                    try:
                        with np.load(path) as part:
                            ids, lengths = part["ids"], part["lengths"]
                    except zipfile.BadZipFile as error:
                        path.unlink()
                        raise DataError(f"{path} is damaged; run the command again, which makes it again") from error
                    writer.add_many(ids, lengths)
                    counts[split] += np.bincount(ids, minlength=vocabulary.vocab_size)
            splits[split] = SplitCounts(len(rows), writer.num_tokens, int(rows["size"].sum()))
        self._put_in_place()
        held_out = counts.get("validation")
        return CorpusReport(
            folder=self.out,
            splits=splits,
            dtype=vocabulary.dtype,
            unigram_entropy=entropy(counts["train"]),
            validation_unigram_loss=None if held_out is None else unigram_loss(counts["train"], held_out),
            options=self.facts,
            **shared,
        )

    def _put_in_place(self) -> None:
        (self.out / FACTS).unlink(missing_ok=True)
        for name in (*(f"{split}.bin" for split in SPLITS), "tokenizer.json", "tokenizer_config.json"):
            made = self.work / name
            if not made.exists():
                (self.out / name).unlink(missing_ok=True)
            elif made.suffix == ".bin":
                made.replace(self.out / name)
            else:
                write_bytes(self.out / name, made.read_bytes())

    def _clean(self) -> None:
        """Remove all intermediate files; renamed first, so that no run continues from half of them."""
        for path in self.out.glob(f"{WORK}*"):
            path.rename(beside(path, TRASH))
        for path in self.out.glob(f"{TRASH}*"):
            shutil.rmtree(path, ignore_errors=True)
