"""The description of a corpus folder: dataset.json with counts by split and entropies, and its source files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.core.files import FolderLock, LockHeld, write_text

FACTS = "dataset.json"
INPUTS = ".inputs.json"
"""The source files of the corpus on this machine; a second run uses it to detect that nothing is left to do."""


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """Counts of one split; tokens include the end of every document."""

    documents: int
    tokens: int
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token."""
        return self.bytes / self.tokens


@dataclass(frozen=True)
class CorpusReport:
    """A prepared corpus."""

    folder: Path
    vocab_size: int
    dtype: str
    special_ids: Mapping[str, int | None]
    """Ids of `end`, `pad` and `mask`; None if the tokenizer has no such token."""
    splits: Mapping[str, SplitCounts]
    unigram_entropy: float
    """Unigram entropy of the training split in nats: the loss of a model that knows only token frequencies."""
    validation_unigram_loss: float | None
    """Loss of that model on the validation split, with add-one smoothing: a baseline for language models."""
    tokenizer_sha256: str
    options: Mapping[str, Any]
    fingerprint: str
    """A hash of everything that determines the content of the files."""
    num_duplicates: int = 0
    """Documents dropped as duplicates."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Files and documents skipped, by reason."""
    reused: bool = False
    """Whether the corpus existed already."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise DataError if it was made with other options, or one of its files is missing."""
        if other := [key for key in {**self.options, **options} if self.options.get(key) != options.get(key)]:
            was = ", ".join(f"{key} {self.options.get(key, 'unset')!r}" for key in other[:3])
            now = ", ".join(f"{options.get(key, 'unset')!r}" for key in other[:3])
            raise DataError(
                f"{self.folder} holds a corpus made with {was}, not {now}; "
                f"add --overwrite to replace it, or choose another --out"
            )
        for name in ("tokenizer.json", *(f"{split}.bin" for split in self.splits)):
            if not (self.folder / name).is_file():
                raise DataError(f"{self.folder} has a {FACTS} but no {name}; rebuild it with --overwrite")

    def facts(self) -> dict[str, Any]:
        """Return the content of dataset.json, which depends only on the documents and options."""
        facts = {"format": 1} | asdict(self)
        for name in ("folder", "num_duplicates", "skipped", "reused"):
            del facts[name]
        for name, split in self.splits.items():
            facts["splits"][name]["bytes_per_token"] = round(split.bytes_per_token, 4)
        for name in ("unigram_entropy", "validation_unigram_loss"):
            facts[name] = None if facts[name] is None else round(facts[name], 6)
        return facts


def read_report(folder: str | Path) -> CorpusReport:
    """Read the dataset.json of a prepared corpus. Raises DataError if there is none or it is damaged."""
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: facts[field.name] for field in fields(CorpusReport) if field.name in facts}
        known["splits"] = {
            name: SplitCounts(split["documents"], split["tokens"], split["bytes"])
            for name, split in facts["splits"].items()
        }
        return CorpusReport(folder=Path(folder), reused=True, **known)
    except FileNotFoundError:
        raise DataError(f"{folder} has no {FACTS}; create it with: etude tokenize INPUTS --out {folder}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove it and run etude tokenize again") from error


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return what is known about the source files of a corpus; empty if it was copied from elsewhere."""
    try:
        known: dict[str, Any] = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder. If another process holds it, wait or raise DataError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(folder / ".lock", wait=wait, keep=False))
        except LockHeld as held:
            raise DataError(
                f"{folder} is being written by process {held.holder}; wait until it ends, or choose another --out"
            ) from None
        yield


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of tokens with these counts.

    >>> round(entropy(np.array([5, 5, 0])), 4)
    0.6931
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_loss(train: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the cross entropy in nats of tokens under the add-one-smoothed frequencies of others.

    >>> round(unigram_loss(np.array([7, 0, 0]), np.array([0, 4, 0])), 4)  # -log(1 / 10)
    2.3026
    """
    logs = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(other / other.sum() * logs).sum())
