"""What metrics cost: updates against torchmetrics, AUROC of many scores, and a validation with and without metrics.

python -m benchmarks.metrics [--quick] [--no-peers] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.table import NOT_RUN, Row, Table, missing, progress, publish, quartiles, read_options
from etude.data import DataLoader
from etude.metrics import AUROC, MetricSet
from etude.models import LeNet5
from etude.trainer import ValidationLoop

NAMES = ["accuracy", "f1", "confusion_matrix"]
Turns = dict[str, Callable[[], object]]


def medians_us(turns: Turns, rounds: int, calls: int) -> dict[str, float]:
    """Return the median CPU time of one call of each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):  # the first round is not counted
        for name, function in turns.items():
            progress(f"{name}: round {number} of {rounds}")
            start = time.process_time()
            for _ in range(calls):
                function()
            if number:
                times[name].append((time.process_time() - start) / calls * 1e6)
    progress("")
    return {name: quartiles(values)[1] for name, values in times.items()}


def update_rows(samples: int, classes: int, options: argparse.Namespace) -> list[Row]:
    """Return the time of one update of accuracy, F1 and confusion matrix."""
    logits, labels = torch.randn(samples, classes), torch.randint(classes, (samples,))
    ours = MetricSet.of(NAMES)
    turns: Turns = {
        "Etude": lambda: ours.update(logits, labels, training=False),
        "argmax and bincount": lambda: torch.bincount(labels * classes + logits.argmax(1), minlength=classes**2),
    }
    why = missing(["torchmetrics"]) if options.peers else None
    if options.peers and why is None:
        collection = torchmetrics_of(classes)
        turns["torchmetrics"] = lambda: collection.update(logits, labels)
    rounds, calls = (2, 2) if options.quick else (25, 300 if samples * classes < 10**5 else 3)
    found = medians_us(turns, rounds, calls)
    size = f"{samples:,d} × {classes:,d}"
    rows: list[Row] = [{"update": f"{by}, {size}", "µs": us, "×": us / found["Etude"]} for by, us in found.items()]
    return rows + ([{"update": f"torchmetrics, {size}", NOT_RUN: why}] if why else [])


def torchmetrics_of(classes: int) -> Any:
    """Return the same three metrics of torchmetrics."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

    kinds = {"a": MulticlassAccuracy(classes, average="micro"), "f": MulticlassF1Score(classes)}
    return MetricCollection({**kinds, "c": MulticlassConfusionMatrix(classes)})


def area_rows(options: argparse.Namespace) -> list[Row]:
    """Return the time of update and value of AUROC."""
    count = 1000 if options.quick else 10**6
    scores, labels = torch.randn(count), torch.randint(2, (count,))

    def area(given: torch.Tensor, make: Callable[[], Any]) -> Callable[[], object]:
        def run() -> object:
            metric = make()
            metric.update(given, labels)
            return metric.compute()

        return run

    turns = {"Etude, float16": area(scores.half(), AUROC), "Etude, float32": area(scores, AUROC)}
    if options.peers and missing(["torchmetrics"]) is None:
        from torchmetrics.classification import BinaryAUROC

        shares = scores.sigmoid()
        turns["torchmetrics, float32"] = area(shares, BinaryAUROC)
        turns["torchmetrics, 1,000 thresholds"] = area(shares, lambda: BinaryAUROC(thresholds=1000))
    if options.peers and missing(["sklearn"]) is None:
        from sklearn.metrics import roc_auc_score

        turns["scikit-learn, float32"] = lambda: roc_auc_score(labels.numpy(), scores.numpy())
    found = medians_us(turns, 1 if options.quick else 5, 1)
    return [{"AUROC": by, "ms": us / 1e3, "×": us / found["Etude, float16"]} for by, us in found.items()]


def validation_rows(options: argparse.Namespace) -> list[Row]:
    """Return the time of a validation of LeNet-5 with and without metrics."""
    count = 128 if options.quick else 10_000
    loader = DataLoader(torch.randn(count, 1, 28, 28), torch.randint(10, (count,)), 64, shuffle=False)
    model = LeNet5()
    loops = {", ".join(names) or "none": ValidationLoop(metrics=names, progress=False) for names in ([], NAMES)}
    turns: Turns = {name: partial(loop.validate_epoch, model, loader) for name, loop in loops.items()}
    found = medians_us(turns, 1 if options.quick else 25, 1)
    return [{"metrics": name, "ms": us / 1e3, "%": (us / found["none"] - 1) * 100} for name, us in found.items()]


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("What metrics cost.", argv)
    torch.set_num_threads(1)
    how = "Contestants take turns; medians of CPU time, which other programs disturb less."
    updates = Table(
        "One update of accuracy, F1 and confusion matrix: samples × classes, float32, one thread.",
        {"update": "", "µs": ".1f", "×": ".1f"},
        f"{how} argmax and bincount: one confusion matrix, for labels that are all valid.",
    )
    for size in ((64, 10), (64, 20) if options.quick else (4096, 1000)):
        updates.rows.extend(update_rows(*size, options))
    areas = Table("AUROC of 10⁶ binary scores: update and value.", {"AUROC": "", "ms": ".1f", "×": ".1f"}, how)
    areas.rows.extend(area_rows(options))
    columns = {"metrics": "", "ms": ".1f", "%": "+.2f"}
    validation = Table("A validation of LeNet-5: 10,000 images in batches of 64.", columns, how)
    validation.rows.extend(validation_rows(options))
    publish("metrics", [updates, areas, validation], options)


if __name__ == "__main__":
    main()
