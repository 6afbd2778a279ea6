"""Token files of samples: written in groups, their labels counted on the way."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from code_tasks.encoding import CodeTokenizer
from code_tasks.labels import QUALITY, SECURITY
from code_tasks.ontology import FULL, IGNORED, SIMPLE
from code_tasks.samples import Sample
from etude.data import TokenWriter

LABEL_NAMES = {"simple": list(SIMPLE), "full": list(FULL), "quality": list(QUALITY), "security": list(SECURITY)}
LABEL_NAMES |= {"clarification": ["another function's docstring", "its own docstring"]}
TOKEN_LABELS = {"code": {"simple": "int8", "full": "int8"}, "tests": {"labels": "int32"}}
TOKEN_LABELS |= {"explanations": {"labels": "int32"}}
SAMPLE_LABELS: dict[str, dict[str, Any]] = {
    "functions": {"quality": ("int8", len(QUALITY)), "security": ("int8", len(SECURITY))},
    "pairs": {"clarification": "int8"},
}


def write_split(
    path: Path, stream: str, split: str, samples: Iterable[Sample], tokenizer: CodeTokenizer
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write a token file and return its size, and how often each label and each kind of sample is in it."""
    counting = _Counting(stream)
    sizes = Counter({"samples": 0, "tokens": 0, "labelled": 0})
    names, whole = TOKEN_LABELS.get(stream, {}), SAMPLE_LABELS.get(stream, {})
    with TokenWriter(
        path,
        dtype=tokenizer.vocabulary.dtype,
        streams=names,
        sample_labels=whole,
        meta={**tokenizer.meta(split), "padding": dict.fromkeys(names, IGNORED)},
    ) as writer:
        for group in _groups(samples):
            streams = {name: np.concatenate([sample.streams[name] for sample in group]) for name in names}
            labels = {name: np.stack([sample.labels[name] for sample in group]) for name in whole}
            lengths = [len(sample.ids) for sample in group]
            writer.add_many(np.concatenate([sample.ids for sample in group]), lengths, streams=streams, labels=labels)
            counting.add(group, streams, labels)
            sizes.update(samples=len(group), tokens=sum(lengths))
            if "labels" in names:
                sizes["labelled"] += int((streams["labels"] >= 0).sum())
    if not sizes["samples"]:
        path.unlink()
    return {name: count for name, count in sizes.items() if count}, counting.result()


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in groups: written together they take a fraction of the time."""
    rest = iter(samples)
    while group := list(islice(rest, 1024)):
        yield group


class _Counting:
    """How often each label is in a split."""

    def __init__(self, stream: str) -> None:
        names = [*TOKEN_LABELS.get(stream, {}), *SAMPLE_LABELS.get(stream, {})]
        self.counts = {name: np.zeros(len(LABEL_NAMES[name]), np.int64) for name in names if name in LABEL_NAMES}
        self.missing: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def add(self, samples: Sequence[Sample], streams: dict[str, Any], labels: dict[str, Any]) -> None:
        """Count samples, whose labels are given joined."""
        for name, counts in self.counts.items():
            values = streams[name] if name in streams else labels[name]
            if values.ndim == 2:  # several labels, each 0 or 1
                counts += (values > 0).sum(axis=0)
                self.missing[name] += int((values < 0).all(axis=1).sum())
            else:
                counts += np.bincount(values[values >= 0], minlength=len(counts))
                self.missing[name] += int((values < 0).sum())
        self.kinds.update(sample.kind for sample in samples)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: dict(zip(LABEL_NAMES[name], counts.tolist(), strict=True)) for name, counts in self.counts.items()
        }
        found["without a label"] = {name: count for name, count in self.missing.items() if count}
        found["kinds"] = {kind: count for kind, count in sorted(self.kinds.items()) if kind}
        return {name: value for name, value in found.items() if value}
