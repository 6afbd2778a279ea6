"""Predictions of a run for another file: class names and probabilities, or numbers, written to a file."""

import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.core import ConfigError
from etude.core.files import replacing
from etude.distributed import before_joining
from etude.experiment.opened import OpenedRun, opened_run
from etude.experiment.outputs import Outputs, as_outputs

logger = logging.getLogger("etude")

SUFFIXES = (".csv", ".jsonl", ".npy", ".npz")
_INDEPENDENT = ("multi_label",)
"""Losses whose classes do not exclude each other."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions for the samples of a file, in its order."""

    values: npt.NDArray[Any]
    """Probabilities (N, classes), or the model's numbers (N, …) in the units of the target."""
    classes: Sequence[str] | None = None
    """The names of the classes, if the values are probabilities."""
    names: Sequence[str] | None = None
    """The name of each sample, such as that of its file."""
    independent: bool = False
    """Whether a sample may have several classes."""

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        return "numbers" if self.classes is None else f"probabilities of {len(self.classes)} classes"

    def labels(self) -> list[str | None] | None:
        """Return the predicted class of each sample; None for numbers and for independent classes.

        A sample whose probabilities are NaN has no class.
        """
        if self.classes is None or self.independent:
            return None
        places = zip(self.values.argmax(1).tolist(), np.isnan(self.values).any(1).tolist(), strict=True)
        return [None if is_nan else self.classes[place] for place, is_nan in places]

    def num_nan(self) -> int:
        """Return how many samples have a NaN among their values."""
        return int(np.isnan(self.values.reshape(len(self.values), -1)).any(1).sum())

    def write(self, path: Path) -> None:
        """Write a .csv, .jsonl, .npy or .npz file, complete or not at all."""
        if path.suffix == ".csv" and self.values.ndim > 2:
            raise ConfigError(
                f"{path}: the model's output has the shape {self.values.shape}, more than a row of numbers for each "
                "sample; write a .npy or .jsonl file"
            )
        try:
            with replacing(path) as file:
                self._write(file, path.suffix)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from error

    def _write(self, file: IO[bytes], suffix: str) -> None:
        if suffix == ".npy":
            np.save(file, self.values)
            return
        if suffix == ".npz":
            np.savez(file, prediction=self.values)
            return
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        if suffix == ".jsonl":
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._records())
        else:
            self._write_csv(text)
        text.detach()

    def _write_csv(self, file: Any) -> None:
        table = self.values[:, None] if self.values.ndim == 1 else self.values
        labels, numbers = self.labels(), table.astype(str).tolist()  # the shortest text of each number
        if self.classes is not None:
            titles = [f"p_{name}" for name in self.classes]
        else:
            titles = ["prediction"] if table.shape[1] == 1 else [f"prediction_{i}" for i in range(table.shape[1])]
        heads = ["file"] * (self.names is not None) + ["prediction"] * (labels is not None)
        columns: list[Sequence[str | None]] = [one for one in (self.names, labels) if one is not None]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*heads, *titles])
        writer.writerows([*(column[row] for column in columns), *values] for row, values in enumerate(numbers))

    def _records(self) -> Iterator[dict[str, Any]]:
        labels = self.labels()
        single = self.classes is None and self.values.ndim == 2 and self.values.shape[1] == 1
        table = (self.values[:, 0] if single else self.values).astype(float)
        if not (finite := np.isfinite(table)).all():  # JSON has no NaN
            table = table.astype(object)
            table[~finite] = None
        for row, values in enumerate(table.tolist()):
            record: dict[str, Any] = {} if self.names is None else {"file": self.names[row]}
            if labels is not None:
                record["prediction"] = labels[row]
            if self.classes is not None:
                yield {**record, "probabilities": dict(zip(self.classes, values, strict=True))}
            else:
                yield {**record, "prediction": values}


def predict_run(
    run_dir: str | Path,
    data: str | Path,
    *,
    out: str | Path | None = None,
    which: str | int = "best",
    overrides: Iterable[str] = (),
) -> Predictions | Outputs:
    """Predict the samples of a file or folder with a checkpoint of a run, and write them to `out` if it is given.

    The file is prepared as in training: the same standardisation, categories and tokenizer; labels are not needed,
    nor is the data of the training. A model that returns one tensor gives `Predictions`; one that returns several,
    or sequences of different lengths, `Outputs`. Raises ConfigError or DataError if the file does not fit.
    """
    with before_joining():
        target = None if out is None else _checked(Path(out), Path(data).expanduser())
    with opened_run(run_dir, which, list(overrides)) as run:
        trainer, other = run.with_file(data, labelled=False)
        output = trainer.predict(other.part)
        found = _found(output, run, other.names)
        if count := found.num_nan():
            logger.warning(
                "%d of the predictions are NaN; look at their values in %s, and at the weights", count, data
            )
        if target is not None:
            run.world.attempt(lambda: found.write(target), here=run.world.is_main)
        return found


def _found(output: Any, run: OpenedRun, names: Sequence[str] | None) -> Predictions | Outputs:
    if not isinstance(output, Tensor):
        return as_outputs(output, names)
    loss = run.config.selection("loss")
    independent = loss is not None and loss.component.name in _INDEPENDENT
    meta = run.checkpoint.meta
    return as_predictions(output, meta["model_sizes"], meta.get("data") or {}, names, independent)


def as_predictions(
    output: Tensor,
    sizes: Mapping[str, Any],
    facts: Mapping[str, Any],
    names: Sequence[str] | None = None,
    independent: bool = False,
) -> Predictions:
    """Turn outputs into probabilities of the classes, or into numbers in the units of the target.

    One output for two classes is the logit of the second.

    >>> as_predictions(torch.tensor([[0.0], [9.0]]), {"num_classes": 2}, {"classes": ["no", "yes"]}).labels()
    ['no', 'yes']
    """
    number = sizes.get("num_classes")
    if number is None and not independent:
        values = output.double() * facts.get("target_std", 1.0) + facts.get("target_mean", 0.0)
        return Predictions((values if "target_std" in facts else output).numpy(), None, names)
    logits = output.double()
    if number == 2 and logits.dim() <= 2 and logits.numel() == len(logits):
        logits = torch.stack([torch.zeros_like(logits.view(-1)), logits.view(-1)], 1)
    if logits.dim() != 2 or (number is not None and logits.shape[1] != number):
        return Predictions(output.numpy(), None, names)
    values = logits.sigmoid() if independent else logits.softmax(1)
    classes = facts.get("classes") or [str(place) for place in range(logits.shape[1])]
    return Predictions(values.float().numpy(), classes, names, independent)


def _checked(path: Path, data: Path) -> Path:
    """Return the path of a new file; raise ConfigError if it cannot be written, or is the data itself."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: predictions are written as {', '.join(SUFFIXES)}; choose such a name")
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = (
            "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.absolute().parent}"
        )
        raise ConfigError(f"{path} {problem}; choose another file")
    if path.exists() and data.exists() and path.samefile(data):
        raise ConfigError(f"{path} is the data, which the predictions would replace; choose another file")
    return path
