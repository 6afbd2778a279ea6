"""The doors: `prepare_corpus` makes a corpus of files, `ensure_corpus` makes it only if it is not there."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import DataError
from etude.corpus.making import Job, Progress
from etude.corpus.options import CorpusOptions
from etude.corpus.report import FACTS, CorpusReport, folder_lock, read_inputs, read_report
from etude.corpus.sources import STDLIB, absolute, find_sources
from etude.corpus.tokenizer import checksum, read_vocabulary, require_tokenizers, tokenizer_file


def prepare_corpus(
    inputs: str | Path | Sequence[str | Path] = (),
    out: str | Path = "data/tokenized",
    *,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> CorpusReport:
    """Make train.bin, validation.bin, test.bin, tokenizer.json and dataset.json of text, code or JSONL.

    `inputs` are files, folders, patterns or "stdlib" (also meant by none): the source of Python's standard library.
    The options are those of `CorpusOptions`. The files depend on the content of the documents and on the options
    alone: not on names, their order or the number of cores. Killed and called again, it goes on where it was; a
    corpus that is there already is returned at once. Raises DataError, also if the folder holds another corpus and
    `overwrite` is not set, or if another process writes into it and `wait` is not set.
    """
    require_tokenizers()
    names, folder, chosen = _names(inputs), Path(out), CorpusOptions(**options)
    facts = _facts(chosen)
    found = find_sources(names, include=chosen.include, exclude=chosen.exclude, out=folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=wait):
            job = Job(names, folder, chosen, facts, found, progress)
            return (None if overwrite else job.reuse()) or job.make(overwrite)
    except OSError as error:
        where = f" ({error.filename})" if error.filename and Path(os.fsdecode(error.filename)) != folder else ""
        raise DataError(f"{folder} cannot be written: {error.strerror or error}{where}") from error
    except KeyboardInterrupt as stop:
        stop.add_note("run the same command again to go on")
        raise


def ensure_corpus(
    inputs: str | Path | Sequence[str | Path] = (),
    out: str | Path = "data/tokenized",
    *,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> Path:
    """Return the folder of a corpus, made first if it is not there; several processes may call this at once.

    A corpus that is there is not compared with the files it was made of, which may be gone, only with the options.
    """
    names, folder, chosen = _names(inputs), Path(out), CorpusOptions(**options)
    if not (folder / FACTS).exists():
        prepare_corpus(inputs, out, progress=progress, wait=True, **options)
        return folder
    read_report(folder).check(_facts(chosen))
    made_of, wanted = read_inputs(folder).get("inputs", absolute(names)), absolute(names)
    if made_of != wanted:
        raise DataError(f"{folder} was made of {', '.join(made_of)}, not of {', '.join(wanted)}; give another folder")
    return folder


def _facts(options: CorpusOptions) -> dict[str, Any]:
    """Return what decides the output besides the documents: the options, and the tokenizer if one is given."""
    facts = options.facts()
    if options.tokenizer is not None:
        facts["end_id"] = read_vocabulary(options.tokenizer, options.end_token).end
        facts["tokenizer_sha256"] = checksum(tokenizer_file(options.tokenizer))
    return facts


def _names(inputs: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(one) for one in ([inputs] if isinstance(inputs, str | Path) else inputs)] or [STDLIB]
