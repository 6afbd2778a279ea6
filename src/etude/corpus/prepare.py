"""`prepare_corpus` builds a corpus from files, `ensure_corpus` builds it only if it does not exist."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.core.errors import DataError
from etude.corpus.making import Job, Progress
from etude.corpus.options import CorpusOptions
from etude.corpus.report import FACTS, CorpusReport, folder_lock, read_inputs, read_report
from etude.corpus.sources import STDLIB, absolute, find_sources
from etude.corpus.tokenizer import checksum, read_vocabulary
from etude.data.text.tokenizer import require_tokenizers, tokenizer_file


def prepare_corpus(
    inputs: str | Path | Sequence[str | Path] = (),
    out: str | Path = "data/tokenized",
    *,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> CorpusReport:
    """Create train.bin, validation.bin, test.bin, tokenizer.json and dataset.json from text, code or JSONL.

    `inputs` are files, folders, patterns or "stdlib" (the default): the source of Python's standard library. The
    options are those of `CorpusOptions`. The files depend only on the content of the documents and the options, not
    on file names, their order or the number of cores. If killed and called again, it continues where it stopped; an
    existing corpus is returned at once. Raises DataError, also if the folder holds another corpus and `overwrite` is
    not set, or if another process writes into it and `wait` is not set.
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
        stop.add_note("run the same command again to continue")
        raise


def ensure_corpus(
    inputs: str | Path | Sequence[str | Path] = (),
    out: str | Path = "data/tokenized",
    *,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> Path:
    """Return the folder of a corpus, building it if needed; several processes may call this at once.

    An existing corpus is compared only with the options, not with its source files, which may be gone.
    """
    names, folder, chosen = _names(inputs), Path(out), CorpusOptions(**options)
    if not (folder / FACTS).exists():
        prepare_corpus(inputs, out, progress=progress, wait=True, **options)
        return folder
    read_report(folder).check(_facts(chosen))
    made_of, wanted = read_inputs(folder).get("inputs", absolute(names)), absolute(names)
    if made_of != wanted:
        raise DataError(
            f"{folder} was made of {', '.join(made_of)}, not of {', '.join(wanted)}; choose another folder"
        )
    return folder


def _facts(options: CorpusOptions) -> dict[str, Any]:
    """Return what determines the output besides the documents: the options, and the tokenizer if given."""
    facts = options.facts()
    if options.tokenizer is not None:
        facts["end_id"] = read_vocabulary(options.tokenizer, options.end_token).end
        facts["tokenizer_sha256"] = checksum(tokenizer_file(options.tokenizer))
    return facts


def _names(inputs: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(one) for one in ([inputs] if isinstance(inputs, str | Path) else inputs)] or [STDLIB]
