"""Building the data: read, parse, label, tokenize, write; whole or not at all."""

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from code_tasks.encoding import CodeTokenizer, read_json, train
from code_tasks.findings import ruff_version, run_ruff
from code_tasks.labels import ALL_RULES
from code_tasks.options import STREAMS, Options
from code_tasks.reading import Parsed, parse_files, without_leaks
from code_tasks.samples import (
    Sample,
    code_samples,
    explanation_samples,
    function_samples,
    is_test_function,
    known_functions,
    pair_samples,
    test_samples,
)
from code_tasks.sources import SPLITS, STDLIB, SourceFile, read_files
from code_tasks.testing import CodeUnderTest
from code_tasks.writing import LABEL_NAMES, write_split
from etude.core.errors import DataError
from etude.corpus.report import folder_lock, write_json
from etude.data.text.tokenizer import require_tokenizers

SCHEMA, INPUTS, PARTIAL = "schema.json", ".inputs.json", ".partial"
VERSION = 1
Tell = Callable[[str], None]


def prepare(
    inputs: Sequence[str], out: str | Path, options: Options, *, overwrite: bool = False, tell: Tell = lambda _: None
) -> dict[str, Any]:
    """Build the data of Python code into `out` and return its schema; what is there and the same is left as it is.

    Inputs are files, folders or the word `stdlib`. Killed, it leaves no schema and is begun again. Raises DataError,
    also if `out` holds other data and `overwrite` is not set.
    """
    return _prepare(list(inputs) or [STDLIB], Path(out).expanduser(), options, overwrite, tell, wait=False)


def ensure(
    inputs: Sequence[str], out: str | Path, options: Options, *, tell: Tell = lambda _: None
) -> dict[str, Any]:
    """Return the schema of the data in `out`, built first if it is not there; several processes may call this at once.

    Data that is there is not compared with the code it was made of, only with the options and the inputs' names.
    """
    names, folder = list(inputs) or [STDLIB], Path(out).expanduser()
    if not (folder / SCHEMA).exists():
        return _prepare(names, folder, options, overwrite=False, tell=tell, wait=True)
    schema = read_schema(folder)
    _compare(folder, schema, options)
    made_of, wanted = read_json(folder / INPUTS).get("inputs", _absolute(names)), _absolute(names)
    if made_of != wanted:
        raise DataError(f"{folder} was made of {', '.join(made_of)}, not of {', '.join(wanted)}; give another out")
    return schema


def read_schema(folder: str | Path) -> dict[str, Any]:
    """Return what a folder's schema.json says. Raises DataError if there is none, or a file that it names is gone."""
    path = Path(folder) / SCHEMA
    schema = read_json(path)
    if schema.get("version") != VERSION:
        problem = "is of another version or damaged" if path.exists() else "is not there"
        raise DataError(f"{path} {problem}; make the data with prepare.py --out {folder} --overwrite")
    for stream, splits in schema["samples"].items():
        for split in splits:
            if not (path.parent / stream / f"{split}.bin").is_file():
                raise DataError(f"{path.parent / stream} has no {split}.bin; make the data again with --overwrite")
    return schema


def _prepare(
    inputs: list[str], out: Path, options: Options, overwrite: bool, tell: Tell, *, wait: bool
) -> dict[str, Any]:
    require_tokenizers()
    ruff = ruff_version()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with folder_lock(out, wait=wait):
            if wait and (out / SCHEMA).exists():  # another process has made it in the meantime
                return ensure(inputs, out, options)
            files, skipped = read_files(inputs, out=out, validation=options.validation, test=options.test)
            files = _first(files, options.max_files)
            facts = {"version": VERSION, "options": options.facts(), "versions": _versions(ruff)}
            facts["fingerprint"] = _fingerprint(facts, files)
            if (out / SCHEMA).exists() and not overwrite:
                return _same(out, options, facts)
            tell(_files_summary(files, skipped))
            try:
                return _build(inputs, out, options, files, skipped, facts, tell)
            finally:
                shutil.rmtree(out / PARTIAL, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from error


def _build(
    inputs: list[str],
    out: Path,
    options: Options,
    files: list[SourceFile],
    skipped: Counter[str],
    facts: dict[str, Any],
    tell: Tell,
) -> dict[str, Any]:
    work = out / PARTIAL
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    parsed, leaks = without_leaks(parse_files(files, skipped))
    if not any(not one.file.is_test and one.file.split == "train" for one in parsed):
        raise DataError(f"of {len(files):,} files none is code to train on; give more code, or smaller shares")
    tell(f"parsed {len(parsed):,} files: {sum(len(one.functions) for one in parsed):,} functions")
    found = run_ruff([one.file.text for one in parsed], ALL_RULES)
    findings = {one.file.digest: each for one, each in zip(parsed, found, strict=True)}
    tell(f"ruff {facts['versions']['ruff']}: {sum(len(each or ()) for each in found):,} findings")
    train(
        [one.file.text for one in parsed if one.file.split == "train" and not one.file.is_test],
        options.vocab_size,
        work / "tokenizer.json",
    )
    tokenizer = CodeTokenizer(work / "tokenizer.json")
    tell(f"trained a tokenizer of {options.vocab_size:,} tokens")
    under_test = CodeUnderTest(known_functions(parsed))
    schema: dict[str, Any] = {**facts, "labels": LABEL_NAMES, "skipped": dict(sorted(skipped.items()))}
    schema |= {"files": _count_files(parsed), "functions_left_out_as_seen_in_training": leaks}
    schema |= {"test_functions": sum(is_test_function(one, each) for one in parsed for each in one.functions)}
    schema |= {"vocab_size": options.vocab_size, "samples": {}, "counts": {}}
    make: dict[str, Callable[[list[Parsed]], Iterator[Sample]]] = {
        "code": lambda mine: code_samples(mine, tokenizer),
        "functions": lambda mine: function_samples(mine, tokenizer, findings, options.max_length),
        "tests": lambda mine: test_samples(mine, under_test, tokenizer, options.max_length),
        "explanations": lambda mine: explanation_samples(mine, tokenizer, options.max_length),
        "pairs": lambda mine: pair_samples(mine, tokenizer, options.max_length),
    }
    for stream in STREAMS:
        folder = work / stream
        folder.mkdir()
        shutil.copyfile(work / "tokenizer.json", folder / "tokenizer.json")
        schema["samples"][stream], schema["counts"][stream] = {}, {}
        for split in SPLITS:
            samples = make[stream]([one for one in parsed if one.file.split == split])
            sizes, counts = write_split(folder / f"{split}.bin", stream, split, samples, tokenizer)
            if sizes:
                schema["samples"][stream][split], schema["counts"][stream][split] = sizes, counts
        tell(_stream_sizes(stream, schema["samples"][stream]))
    _put_in_place(work, out, schema, inputs)
    return schema


def _put_in_place(work: Path, out: Path, schema: dict[str, Any], inputs: list[str]) -> None:
    """Move finished streams to their place; the schema goes first and comes last, so that it never speaks of half."""
    (out / SCHEMA).unlink(missing_ok=True)
    for stream in STREAMS:
        shutil.rmtree(out / stream, ignore_errors=True)
        (work / stream).rename(out / stream)
    (work / "tokenizer.json").replace(out / "tokenizer.json")
    write_json(out / INPUTS, {"inputs": _absolute(inputs)})
    write_json(out / SCHEMA, schema)


def _same(out: Path, options: Options, facts: dict[str, Any]) -> dict[str, Any]:
    schema = read_schema(out)
    _compare(out, schema, options)
    if schema["fingerprint"] != facts["fingerprint"]:
        raise DataError(
            f"{out} was made of other code or by other versions of python, ruff or tokenizers; "
            f"add --overwrite to make it again, or give another --out"
        )
    return schema


def _compare(out: Path, schema: dict[str, Any], options: Options) -> None:
    was, now = schema["options"], options.facts()
    other = [name for name in now if was.get(name) != now[name]]
    if other:
        was_set = ", ".join(f"{name} {was.get(name)}, not {now[name]}" for name in other)
        raise DataError(
            f"{out} was made with {was_set}; make it again with prepare.py --overwrite, or give another out"
        )


def _versions(ruff: str) -> dict[str, str]:
    return {"python": platform.python_version(), "ruff": ruff, "tokenizers": version("tokenizers")}


def _fingerprint(facts: dict[str, Any], files: list[SourceFile]) -> str:
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for file in files:
        found.update(file.digest + file.module.encode() + bytes([file.is_test]))
    return found.hexdigest()


def _first(files: list[SourceFile], limit: int | None) -> list[SourceFile]:
    """At most so many files of code and of tests; of every split at least one, if there is one."""
    if limit is None:
        return files
    kept = []
    for is_test in (False, True):
        mine = [file for file in files if file.is_test == is_test]
        by_split = {split: [file for file in mine if file.split == split] for split in SPLITS}
        room = {split: max(1, limit // 10) for split in ("validation", "test")}
        room["train"] = max(1, limit - sum(min(room[split], len(by_split[split])) for split in room))
        kept += [file for split in SPLITS for file in by_split[split][: room[split]]]
    return sorted(kept, key=lambda file: file.digest)


def _absolute(inputs: Sequence[str]) -> list[str]:
    return [
        name if name == STDLIB and not Path(name).exists() else str(Path(name).expanduser().absolute())
        for name in inputs
    ]


def _count_files(parsed: Sequence[Parsed]) -> dict[str, dict[str, int]]:
    return {
        split: {
            "code": sum(one.file.split == split and not one.file.is_test for one in parsed),
            "tests": sum(one.file.split == split and one.file.is_test for one in parsed),
        }
        for split in SPLITS
    }


def _files_summary(files: list[SourceFile], skipped: Counter[str]) -> str:
    tests = sum(file.is_test for file in files)
    left = "".join(f"; {count:,} {reason}" for reason, count in sorted(skipped.items()))
    return f"read {len(files) - tests:,} files of code and {tests:,} of tests{left}"


def _stream_sizes(stream: str, splits: dict[str, dict[str, int]]) -> str:
    listed = ", ".join(
        f"{split} {sizes['samples']:,} ({sizes['tokens']:,} tokens)" for split, sizes in splits.items()
    )
    return f"{stream}: {listed or 'nothing'}"
