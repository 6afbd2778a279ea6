"""One corpus in the making: steps whose results are kept, so that a killed run goes on where it was."""

import hashlib
import json
import logging
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.core.files import beside, replacing, write_bytes
from etude.corpus.documents import Locations, read_texts, scan
from etude.corpus.index import SPLITS, Index, Part, read_scans
from etude.corpus.options import SPECIAL_TOKENS, CorpusOptions
from etude.corpus.place import INPUTS, check_complete, compare_options, read_inputs, write_json
from etude.corpus.pool import Unfinished, Workers
from etude.corpus.report import FACTS, CorpusReport, SplitCounts, entropy, read_report, unigram_loss
from etude.corpus.sources import Found, Source, absolute
from etude.corpus.tokenizer import Encoder, Vocabulary, checksum, read_vocabulary, tokenizer_file, train_tokenizer
from etude.data.tokens import TokenWriter

logger = logging.getLogger("etude")

Progress = Callable[[str, int, int], None]
"""Called with every bit of progress: the step, how much of it is done, and how much there is (0: not known)."""

WORK, TRASH = ".partial-", ".trash-"
VERSION = 2
_SCAN_BYTES, _SCAN_FILES, _RANGE_BYTES = 8 << 20, 256, 32 << 20


@dataclass
class Job:
    """One corpus in the making."""

    inputs: list[str]
    out: Path
    options: CorpusOptions
    facts: dict[str, Any]
    found: Found
    workers: int
    progress: Progress

    @cached_property
    def stamp(self) -> str:
        """A hash of all that decides the output as this machine sees it, without reading the files."""
        files = [[str(Path(source.path).absolute()), source.size, source.modified_ns] for source in self.found.files]
        return hashlib.sha256(json.dumps([VERSION, version("tokenizers"), self.facts, files]).encode()).hexdigest()

    @property
    def work(self) -> Path:
        """The folder of what was done so far."""
        return self.out / f"{WORK}{self.stamp[:16]}"

    def reuse(self) -> CorpusReport | None:
        """Return the corpus that is there if it is this one. Raises DataError if other files are in the way."""
        if not (self.out / FACTS).exists():
            names = [f"{split}.bin" for split in SPLITS] + ["tokenizer.json"]
            there = [name for name in names if (self.out / name).exists()]
            if there and not any(self.out.glob(f"{WORK}*")):
                raise DataError(f"{self.out} already has {', '.join(there)}; give another --out, or --overwrite")
            return None
        report = read_report(self.out)
        compare_options(report, self.facts)
        known = read_inputs(self.out)
        if known.get("stamp") != self.stamp:
            return None
        check_complete(report)
        self._clean()
        return replace(report, skipped=known["skipped"], num_duplicates=known["num_duplicates"])

    def make(self, overwrite: bool) -> CorpusReport:
        """Do what is left to do."""
        try:
            with Workers(self.workers) as pool:
                return self._make(pool, overwrite)
        except DataError as error:
            if not isinstance(error, Unfinished) and not isinstance(error.__cause__, OSError):
                self._clean()  # retrying would fail the same way
            raise

    def _make(self, pool: Workers, overwrite: bool) -> CorpusReport:
        if not self.work.exists() and any(self.out.glob(f"{WORK}*")):
            logger.warning("inputs or options are not those of the run that was stopped; starting over")
            self._clean()
        self.work.mkdir(exist_ok=True)
        index, skipped = self._scan(pool)
        fingerprint = index.fingerprint(self.facts)
        if (self.out / FACTS).exists() and not overwrite:
            report = read_report(self.out)
            if report.fingerprint != fingerprint:
                raise DataError(
                    f"{self.out} holds a corpus of other documents; "
                    f"add --overwrite to replace it, or give another --out"
                )
            check_complete(report)
        else:
            index.check(self.options)
            self._tokenizer(index.training_sample(self.options.tokenizer_bytes))
            report = self._write(index, self._encode(pool, index), fingerprint)
        found: dict[str, Any] = {"skipped": skipped, "num_duplicates": index.num_duplicates}
        write_json(self.out / INPUTS, {"stamp": self.stamp, "inputs": absolute(self.inputs), **found})
        write_json(self.out / FACTS, report.facts())  # the last: it says that all is there
        self._clean()
        return replace(report, **found)

    def _scan(self, pool: Workers) -> tuple[Index, dict[str, int]]:
        """Find all documents, and sort them."""
        groups = list(_groups(self.found))
        tasks = [
            (sources, self.options, number, self.work, self.work / f"scan-{number}.npz")
            for number, (sources, _) in enumerate(groups)
        ]
        self._run(pool, "reading", scan, tasks, [num_bytes for _, num_bytes in groups])
        rows, passed_over = read_scans(task[-1] for task in tasks)
        skipped = {**self.found.skipped, **passed_over}
        if not len(rows):
            why = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            raise DataError(f"no text in any of {len(self.found.files):,} files ({why or 'all empty'})")
        return Index(rows, self.options), skipped

    def _tokenizer(self, sample: Locations) -> None:
        """Train a tokenizer on some documents, or copy the one that is given."""
        result = self.work / "tokenizer.json"
        if self.options.tokenizer is not None:
            given = tokenizer_file(self.options.tokenizer)
            write_bytes(result, given.read_bytes())
            if (config := given.with_name("tokenizer_config.json")).is_file():
                shutil.copyfile(config, self.work / config.name)
            return
        asked = self.options.vocab_size
        with Workers(1, threads=self.workers) as alone:
            self._run(alone, "training the tokenizer", train, [(self.work, sample, asked, result)], [0])
        if (size := read_vocabulary(result).vocab_size) < asked:
            raise DataError(
                f"the training split has text for a vocabulary of {size:,} only; "
                f"use --vocab-size {size} or less, or more text"
            )

    def _encode(self, pool: Workers, index: Index) -> dict[Path, Part]:
        parts = {self.work / f"{part.split}-{part.number}.npz": part for part in index.parts()}
        vocabulary = self._vocabulary()
        tasks = [(self.work, part.rows, vocabulary, result) for result, part in parts.items()]
        self._run(pool, "encoding", encode, tasks, [part.num_bytes for part in parts.values()])
        return parts

    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.work / "tokenizer.json", self.options.end_token)

    def _run(
        self, pool: Workers, step: str, function: Callable[..., None], tasks: list[Any], sizes: list[int]
    ) -> None:
        """Do the tasks whose result, their last argument, is not there yet."""
        left = [number for number, task in enumerate(tasks) if not task[-1].exists()]
        total = sum(sizes)
        done = total - sum(sizes[number] for number in left)
        self.progress(step, done, total)
        for finished in pool.run(function, [tasks[number] for number in left]):
            done += sizes[left[finished]]
            self.progress(step, done, total)

    def _write(self, index: Index, parts: dict[Path, Part], fingerprint: str) -> CorpusReport:
        """Write the token files and the tokenizer into `out`; a corpus that was there is none from the start."""
        vocabulary, tokenizer = self._vocabulary(), checksum(self.work / "tokenizer.json")
        shared: dict[str, Any] = {"vocab_size": vocabulary.vocab_size, "special_ids": vocabulary.special_ids()}
        shared |= {"tokenizer_sha256": tokenizer, "fingerprint": fingerprint}
        splits: dict[str, SplitCounts] = {}
        counts = {split: np.zeros(vocabulary.vocab_size, np.int64) for split in index.splits}
        done = 0
        self.progress("writing", done, len(parts))
        for split, rows in index.splits.items():
            meta = {**shared, "split": split}
            with TokenWriter(self.work / f"{split}.bin", dtype=vocabulary.dtype, meta=meta) as writer:
                for path in [path for path, part in parts.items() if part.split == split]:
                    ids, lengths = _read_part(path)
                    writer.add_many(ids, lengths)
                    counts[split] += np.bincount(ids, minlength=vocabulary.vocab_size)
                    done += 1
                    self.progress("writing", done, len(parts))
            splits[split] = SplitCounts(len(rows), writer.num_tokens, int(rows["size"].sum()))
        self._put_in_place()
        return CorpusReport(
            folder=self.out,
            splits=splits,
            dtype=vocabulary.dtype,
            unigram_entropy=entropy(counts["train"]),
            validation_unigram_loss=unigram_loss(counts["train"], counts["validation"])
            if "validation" in splits
            else None,
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
        """Remove all that was kept to go on with; renamed first, so that nobody goes on with half of it."""
        for path in self.out.glob(f"{WORK}*"):
            path.rename(beside(path, TRASH))
        for path in self.out.glob(f"{TRASH}*"):
            shutil.rmtree(path, ignore_errors=True)


def _groups(found: Found) -> Iterator[tuple[list[Source], int]]:
    """Group the files into tasks with their sizes: many small ones together, a large JSONL file in stretches."""
    group: list[Source] = []
    num_bytes = 0
    for source in found.files:
        if source.kind == "json" and not source.packed and source.size > _RANGE_BYTES:
            for start in range(0, source.size, _RANGE_BYTES):
                stop = min(start + _RANGE_BYTES, source.size)
                yield [replace(source, start=start, stop=stop)], stop - start
            continue
        if group and (num_bytes + source.size > _SCAN_BYTES or len(group) >= _SCAN_FILES):
            yield group, num_bytes
            group, num_bytes = [], 0
        group.append(source)
        num_bytes += source.size
    if group:
        yield group, num_bytes


def train(folder: Path, sample: Locations, vocab_size: int, result: Path) -> None:
    """Train a byte-level BPE tokenizer on documents of the index, in a worker."""
    groups = (read_texts(folder, sample[start : start + 64]) for start in range(0, len(sample), 64))
    tokenizer = train_tokenizer(groups, vocab_size, SPECIAL_TOKENS)
    write_bytes(result, tokenizer.to_str(pretty=True).encode() + b"\n")


_ENCODERS: dict[Path, Encoder] = {}


def encode(folder: Path, rows: Locations, vocabulary: Vocabulary, result: Path) -> None:
    """Encode documents into one part of a split, in a worker: ids one after the other, and their lengths."""
    if folder not in _ENCODERS:
        _ENCODERS[folder] = Encoder(folder)
    ids = _ENCODERS[folder].encode(read_texts(folder, rows))
    end = np.array([vocabulary.end], np.uint32)
    joined = np.concatenate([part for one in ids for part in (one, end)]).astype(vocabulary.dtype)
    with replacing(result) as file:
        np.savez(file, ids=joined, lengths=np.array([len(one) + 1 for one in ids], np.int64))


def _read_part(path: Path) -> tuple[Any, Any]:
    try:
        with np.load(path) as part:
            return part["ids"], part["lengths"]
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        path.unlink(missing_ok=True)
        raise Unfinished(f"{path} is damaged ({error}); run the command again, which makes it again") from error
