"""One corpus in the making: steps whose results are kept, so that a killed run goes on where it was."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.core.files import replacing, write_bytes
from etude.corpus.index import SPLITS, Index, Part, read_scans
from etude.corpus.options import SPECIAL_TOKENS, CorpusOptions
from etude.corpus.place import INPUTS, check_complete, compare_options, read_inputs, write_json
from etude.corpus.pool import Task, Unfinished, Workers
from etude.corpus.report import FACTS, CorpusReport, read_report
from etude.corpus.sources import Found, absolute
from etude.corpus.tokenizer import check_trained, read_vocabulary, tokenizer_file
from etude.corpus.writing import write_splits

logger = logging.getLogger("etude")

Progress = Callable[[str, int, int], None]
"""Called with every bit of progress: the step, how much of it is done, and how much there is (0: not known)."""

WORK, TRASH = ".partial-", ".trash-"
VERSION = 1
_SCAN_BYTES, _SCAN_FILES, _RANGE_BYTES = 8 << 20, 256, 32 << 20


class Job:
    """One corpus in the making."""

    def __init__(
        self,
        inputs: list[str],
        out: Path,
        options: CorpusOptions,
        facts: dict[str, Any],
        found: Found,
        workers: int,
        progress: Progress,
    ) -> None:
        self.inputs, self.out, self.options, self.facts, self.found = inputs, out, options, facts, found
        self.workers, self.progress = workers, progress
        self.pool = Workers(workers)
        files = [[str(Path(source.path).absolute()), source.size, source.modified_ns] for source in found.files]
        self.stamp = hashlib.sha256(json.dumps([VERSION, version("tokenizers"), facts, files]).encode()).hexdigest()
        self.work = out / f"{WORK}{self.stamp[:16]}"

    def reuse(self, overwrite: bool) -> CorpusReport | None:
        """Return the corpus that is there if it is this one. Raises DataError if other files are in the way."""
        if overwrite:
            return None
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
            with self.pool:
                return self._make(overwrite)
        except DataError as error:
            if not isinstance(error, Unfinished) and not isinstance(error.__cause__, OSError):
                self._clean()  # the same again would not go better
            raise

    def _make(self, overwrite: bool) -> CorpusReport:
        self._start()
        index, skipped = self._scan()
        fingerprint = index.fingerprint(self.facts)
        known: dict[str, Any] = {"stamp": self.stamp, "inputs": absolute(self.inputs), "skipped": skipped}
        known["num_duplicates"] = index.num_duplicates
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
            self._tokenizer(index)
            vocabulary = read_vocabulary(self.work / "tokenizer.json", self.options.end_token)
            parts = index.parts()
            self._encode(parts, vocabulary.end, vocabulary.dtype)
            report = write_splits(
                self.work, self.out, index, parts, vocabulary, self.facts, fingerprint, self._step("writing")
            )
        write_json(self.out / INPUTS, known)
        write_json(self.out / FACTS, report.facts())  # the last: it says that all is there
        self._clean()
        return replace(report, skipped=skipped, num_duplicates=index.num_duplicates)

    def _start(self) -> None:
        if not self.work.exists() and any(self.out.glob(f"{WORK}*")):
            logger.warning("inputs or options are not those of the run that was stopped; starting over")
            self._clean()
        self.work.mkdir(exist_ok=True)
        sources = [(source.path, source.kind) for source in self.found.files]
        write_json(self.work / "plan.json", {"sources": sources, "options": self._scan_options()})

    def _scan_options(self) -> dict[str, Any]:
        names = ("salt", "text_key", "min_chars", "max_chars", "cut_chars")
        return {name: getattr(self.options, name) for name in names}

    def _scan(self) -> tuple[Index, dict[str, int]]:
        """Find all documents, and sort them."""
        tasks: list[Task] = []
        for number, sources in enumerate(_groups(self.found)):
            spool, result = self.work / f"spool-{number}", self.work / f"scan-{number}.npz"
            tasks.append(
                {"do": "scan", "number": number, "sources": sources, "options": self._scan_options()}
                | {"spool": str(spool), "result": str(result)}
            )
        self._run("reading", tasks, [sum(self._size(*source) for source in task["sources"]) for task in tasks])
        rows, skipped = read_scans([Path(task["result"]) for task in tasks])
        skipped = dict(self.found.skipped) | skipped
        if not len(rows):
            why = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            raise DataError(f"no text in any of {len(self.found.files):,} files ({why or 'all empty'})")
        index = Index(rows, self.options)
        with replacing(self.work / "index.npy") as file:
            np.save(file, index.rows)
        return index, skipped

    def _size(self, number: int, _path: str, _kind: str, packed: bool, start: int, stop: int) -> int:
        return self.found.files[number].size if packed else stop - start

    def _tokenizer(self, index: Index) -> None:
        """Train the tokenizer, or take the one that was given."""
        result = self.work / "tokenizer.json"
        if self.options.tokenizer is not None:
            write_bytes(result, tokenizer_file(self.options.tokenizer).read_bytes())
            config = tokenizer_file(self.options.tokenizer).with_name("tokenizer_config.json")
            if config.is_file():
                shutil.copyfile(config, self.work / config.name)
            return
        start, stop = index.training_sample(self.options.tokenizer_bytes)
        task = {"do": "train", "folder": str(self.work), "start": start, "stop": stop, "result": str(result)}
        task |= {"vocab_size": self.options.vocab_size, "special_tokens": SPECIAL_TOKENS}
        with Workers(1, threads=self.workers) as alone:
            self._run("training the tokenizer", [task], [0], alone)
        check_trained(result, self.options.vocab_size)

    def _encode(self, parts: list[Part], end: int, dtype: str) -> None:
        tasks: list[Task] = [
            {"do": "encode", "folder": str(self.work), "start": part.start, "stop": part.stop, "end": end}
            | {"dtype": dtype, "result": str(self.work / f"{part.split}-{part.number}.npz")}
            for part in parts
        ]
        self._run("encoding", tasks, [part.num_bytes for part in parts])

    def _run(self, step: str, tasks: list[Task], sizes: list[int], pool: Workers | None = None) -> None:
        """Do the tasks whose result is not there yet."""
        tell = self._step(step)
        left = [number for number, task in enumerate(tasks) if not Path(task["result"]).exists()]
        total = sum(sizes)
        done = total - sum(sizes[number] for number in left)
        tell(done, total)
        for finished, _ in (pool or self.pool).run([tasks[number] for number in left]):
            done += sizes[left[finished]]
            tell(done, total)

    def _step(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(name, done, total)

    def _clean(self) -> None:
        """Remove all that was kept to go on with; renamed first, so that nobody goes on with half of it."""
        self._empty_trash()
        for path in self.out.glob(f"{WORK}*"):
            path.rename(path.with_name(TRASH + path.name))
        self._empty_trash()

    def _empty_trash(self) -> None:
        for path in self.out.glob(f"{TRASH}*"):
            shutil.rmtree(path, ignore_errors=True)


def _groups(found: Found) -> Iterator[list[list[Any]]]:
    """Group the files into tasks: many small ones together, a large JSONL file in stretches."""
    group: list[list[Any]] = []
    num_bytes = 0
    for number, source in enumerate(found.files):
        whole = [number, source.path, source.kind, source.packed, 0, source.size]
        if source.kind == "json" and not source.packed and source.size > _RANGE_BYTES:
            for start in range(0, source.size, _RANGE_BYTES):
                yield [[*whole[:4], start, min(start + _RANGE_BYTES, source.size)]]
            continue
        if source.packed:
            whole[5] = 1 << 62  # its size unpacked is not known
        if group and (num_bytes + source.size > _SCAN_BYTES or len(group) >= _SCAN_FILES):
            yield group
            group, num_bytes = [], 0
        group.append(whole)
        num_bytes += source.size
    if group:
        yield group
