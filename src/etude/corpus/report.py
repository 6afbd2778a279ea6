"""What came out of preparing a corpus: counts by split, entropies, the facts of dataset.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    splits: Mapping[str, SplitCounts]
    vocab_size: int
    dtype: str
    special_ids: Mapping[str, int | None]
    """Ids of `end`, `pad` and `mask`; None where the tokenizer has no such token."""
    unigram_entropy: float
    """Entropy of the tokens of the training split, in nats: the loss of a model that knows only how common they are."""
    validation_unigram_loss: float | None
    """Loss of that model, with one added to each count, on the validation split: what a language model must beat."""
    tokenizer_sha256: str
    fingerprint: str
    """A hash of all that decides the content of the files."""
    options: Mapping[str, Any]
    num_duplicates: int = 0
    """Documents left out as copies of others."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Files and documents passed over, by reason."""
    reused: bool = False
    """Whether the corpus was there already."""

    def facts(self) -> dict[str, Any]:
        """Return the content of dataset.json, which depends on the documents and options only."""
        splits = {
            name: {
                "documents": split.documents,
                "tokens": split.tokens,
                "bytes": split.bytes,
                "bytes_per_token": round(split.bytes_per_token, 4),
            }
            for name, split in self.splits.items()
        }
        loss = self.validation_unigram_loss
        return {
            "format": 1,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "special_ids": dict(self.special_ids),
            "splits": splits,
            "unigram_entropy": round(self.unigram_entropy, 6),
            "validation_unigram_loss": None if loss is None else round(loss, 6),
            "tokenizer_sha256": self.tokenizer_sha256,
            "options": dict(self.options),
            "fingerprint": self.fingerprint,
        }


def read_report(folder: str | Path) -> CorpusReport:
    """Read the dataset.json of a prepared corpus. Raises DataError if there is none or it is damaged."""
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        counts = {
            name: SplitCounts(split["documents"], split["tokens"], split["bytes"])
            for name, split in facts["splits"].items()
        }
        return CorpusReport(
            folder=Path(folder),
            splits=counts,
            reused=True,
            **{
                key: facts[key]
                for key in (
                    *("vocab_size", "dtype", "special_ids", "unigram_entropy", "validation_unigram_loss"),
                    *("tokenizer_sha256", "options", "fingerprint"),
                )
            },
        )
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
