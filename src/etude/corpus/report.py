"""What came out of preparing a corpus: counts by split, entropies, the facts of dataset.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError

FACTS = "dataset.json"


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """How much there is in one split; tokens include the end of every document."""

    documents: int
    tokens: int
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token."""
        return self.bytes / self.tokens


@dataclass(frozen=True)
class CorpusReport:
    """A prepared corpus."""

    folder: Path
    vocab_size: int
    dtype: str
    special_ids: Mapping[str, int | None]
    """Ids of `end`, `pad` and `mask`; None where the tokenizer has no such token."""
    splits: Mapping[str, SplitCounts]
    unigram_entropy: float
    """Entropy of the tokens of the training split, in nats: the loss of a model that knows only how common they are."""
    validation_unigram_loss: float | None
    """Loss of that model, with one added to each count, on the validation split: what a language model must beat."""
    tokenizer_sha256: str
    options: Mapping[str, Any]
    fingerprint: str
    """A hash of all that decides the content of the files."""
    num_duplicates: int = 0
    """Documents left out as copies of others."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Files and documents passed over, by reason."""
    reused: bool = False
    """Whether the corpus was there already."""

    def facts(self) -> dict[str, Any]:
        """Return the content of dataset.json, which depends on the documents and options only."""
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
        raise DataError(f"{folder} has no {FACTS}; make it with: etude tokenize INPUTS --out {folder}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove it and run etude tokenize again") from error


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of tokens that occur this often.

    >>> round(entropy(np.array([5, 5, 0])), 4)
    0.6931
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_loss(train: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the cross entropy in nats of tokens under the shares of others, with one added to each count.

    >>> round(unigram_loss(np.array([7, 0, 0]), np.array([0, 4, 0])), 4)  # -log(1 / 10)
    2.3026
    """
    logs = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(other / other.sum() * logs).sum())
