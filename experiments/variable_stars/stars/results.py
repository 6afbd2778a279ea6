"""Numbers of several runs as Markdown tables: mean and standard deviation over the seeds, for each way of training."""

import statistics
from collections.abc import Mapping, Sequence

from stars.layout import UNITS

Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""By way of training, the numbers of `measure` of each seed."""


def tables(runs: Runs) -> str:
    """Return the tables: cross entropy, errors in physical units, and classes."""
    return "\n".join([*_cross_entropies(runs), "", *_errors(runs), "", *_classes(runs), ""])


def _cross_entropies(runs: Runs) -> list[str]:
    first = next(iter(runs.values()))[0]
    lines = _head("next-token cross entropy, nats", ["marginal", *runs])
    for name in ["ce", *(key for key in first if key.startswith("ce/"))]:
        modality = name.removeprefix("ce").removeprefix("/") or "all tokens"
        reference = f"{first[name.replace('ce', 'marginal', 1)]:.3f}"
        lines.append(_row(modality, [reference, *(_spread(name, own, 3) for own in runs.values())]))
    return lines


def _errors(runs: Runs) -> list[str]:
    first = next(iter(runs.values()))[0]
    lines = _head("root mean square error", ["tokens alone", "mean of training", *runs])
    for modality, unit in UNITS.items():
        for kind, words in (
            ("rmse", "expected value"),
            ("rmse_top", "likeliest token"),
            ("rmse_free", "drawn freely"),
        ):
            name = f"{kind}/{modality}"
            if name not in first:
                continue
            references = [f"{first[f'{one}/{modality}']:.4f}" for one in ("floor", "mean")]
            cells = [*references, *(_spread(name, own, 4) for own in runs.values())]
            lines.append(_row(f"{modality} ({unit}), {words}", cells))
    return lines


def _classes(runs: Runs) -> list[str]:
    first = next(iter(runs.values()))[0]
    lines = _head("class", ["most frequent", *runs])
    for name, reference in (("accuracy", f"{first['marginal/accuracy']:.3f}"), ("balanced_accuracy", "")):
        cells = [reference, *(_spread(name, own, 3) for own in runs.values())]
        lines.append(_row(name.replace("_", " "), cells))
    return lines


def _head(what: str, columns: Sequence[str]) -> list[str]:
    return [_row(what, columns), _row("---", ["---"] * len(columns)).replace(" ", "")]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _spread(name: str, runs: Sequence[Mapping[str, float]], digits: int) -> str:
    values = [run[name] for run in runs]
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
