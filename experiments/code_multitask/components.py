"""The data set `code_tasks`: one stream of the experiment's data, built from Python code when it is first used."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt

from etude.config.registry import register
from etude.core.errors import DataError
from etude.data import TokenDocuments, open_tokens
from etude.data.catalog.files import logger
from etude.data.catalog.tokens import Reading, find_split
from etude.data.splits import DataSplits, LoaderData

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from code_tasks import DEFAULT_OUT, Options, ensure

SPLITS = ("train", "validation", "test")


class Spread:
    """At most so many samples of a source, evenly spread over it."""

    def __init__(self, source: Any, at_most: int) -> None:
        self.source = source
        self._places = np.linspace(0, len(source) - 1, min(at_most, len(source))).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def gather(self, indices: Any, *, epoch: int, seed: int) -> Any:
        """Return the samples at `indices`."""
        return self.source.gather(self._places[indices], epoch=epoch, seed=seed)

    def lengths(self, indices: Any) -> Any:
        """Return the lengths of samples."""
        return self.source.lengths(self._places[indices])


@register("data", "code_tasks")
def load_code_tasks(
    stream: Literal["code", "functions", "tests", "explanations", "pairs"],
    inputs: list[str] | None = None,
    out: str = DEFAULT_OUT,
    vocab_size: Annotated[int, Ge(300)] = 4096,
    max_length: Annotated[int, Ge(16)] = 256,
    max_files: Annotated[int, Ge(1)] | None = None,
    length: Annotated[int, Ge(2)] | None = None,
    mask_rate: Annotated[float, Ge(0), Lt(1)] = 0.0,
    bucket_batches: Annotated[int, Ge(0)] = 100,
    max_held_out: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """Python code with labels made by real tools, for the tasks of this experiment.

    stream: `code` in blocks, with the roles of its tokens; `functions` with what ruff finds in them; `tests` and
        `explanations` of functions, to be written; `pairs` of functions with docstrings that may be theirs.
    inputs: files or folders of Python code; the standard library of this machine if none are given.
    out: folder of the data, which is built there if there is none.
    vocab_size: of the tokenizer that is trained on the code.
    max_length: tokens of a sample at most, when the data is built.
    max_files: take so many files of code and as many of tests, for a quick look.
    length: tokens of a block of `code`, `max_length` by default; samples of the other streams are cut if they are
        longer, which takes away the end of what is to be written.
    mask_rate: with `code`, the share of tokens that are hidden for masked language modelling.
    bucket_batches: batches over which samples of similar length are brought together; 0 does not. Not for `code`.
    max_held_out: validate and test on so many samples, evenly spread over all of them.
    """
    if mask_rate and stream != "code":
        raise DataError(f"mask_rate is for the stream code, not for {stream}; leave it out")
    options = Options(vocab_size, max_length, max_files)
    if not (Path(out).expanduser() / "schema.json").exists():
        logger.warning(
            "making the data of %s in %s, once; it takes a minute or two", ", ".join(inputs or ["stdlib"]), out
        )
    schema = ensure(inputs or [], out, options)
    root = Path(out).expanduser() / stream
    if "train" not in schema["samples"][stream]:
        raise DataError(
            f"there is nothing for the stream {stream} in {', '.join(inputs or ['stdlib'])}; leave it out"
        )
    reading = Reading("blocks" if stream == "code" else "documents", length or max_length, mask_rate=mask_rate)
    parts: dict[str, Any] = {}
    for split in SPLITS:
        path = find_split(str(root), split)
        if path is None:
            continue
        file = open_tokens(path)
        if stream == "code":
            parts[split] = reading.split(file, split)
        else:
            documents = TokenDocuments(file, length, pad_id=file.meta["special_ids"]["pad"])
            parts[split] = LoaderData(documents, {"bucket_batches": bucket_batches})
        if max_held_out is not None and split != "train" and parts[split] is not None:
            parts[split] = replace(parts[split], data=Spread(parts[split].data, max_held_out))
    return DataSplits(**parts, vocab_size=schema["vocab_size"], tokenizer=root / "tokenizer.json")
