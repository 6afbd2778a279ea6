"""A config for existing data: inspect a file or folder, and choose a suitable data set, model and loss."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from etude.config import dump_yaml, lookup
from etude.core import ConfigError, DataError
from etude.core.spelling import did_you_mean, listed, shorten
from etude.data import DataSplits
from etude.data.catalog.delimited import NumberForm
from etude.data.catalog.features import in_order
from etude.data.catalog.screening import MAX_CATEGORIES
from etude.data.catalog.table import Table
from etude.data.catalog.table_files import TableFormat

TARGETS = ("target", "label", "class", "y", "output", "outcome", "species", "category")
TEXTS = ("text", "sentence", "content", "review", "body", "comment", "question", "title")
"""Usual names of the target column and of the text column."""
MAX_CLASSES = 20
"""Integers with up to this many distinct values are treated as classes."""
SURVEYED_LINES = 2000
TABLE_MODEL = {"name": "mlp", "hidden": [128, 64], "dropout": 0.1}
TEXT_MODEL = {"name": "text_classifier", "d_model": 128, "n_layers": 2, "n_heads": 4}
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")


@dataclass(slots=True)
class Finding:
    """Sections of a config, and messages about what was found."""

    data: dict[str, Any]
    model: dict[str, Any]
    words: list[str] = field(default_factory=list)
    splits: DataSplits | None = None
    fallback: dict[str, Any] = field(default_factory=dict)
    """Settings with which the data loads if it does not load without them."""


def look_at(path: Path, target: str | None = None) -> Finding:
    """Return working sections for a file or folder. Raises DataError if it is not data."""
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path")
    finding = _survey(path)(path, target)
    try:
        finding.splits = _load(finding.data)
    except DataError as error:
        if not finding.fallback:
            raise
        finding.data |= finding.fallback
        finding.splits = _load(finding.data)
        finding.words.append(f"  with {', '.join(finding.fallback)}, because {str(error).partition(';')[0]}")
    rows = finding.splits.facts["rows"]
    finding.words.insert(0, f"{path}: " + ", ".join(f"{count:,} for {part}" for part, count in rows.items()))
    for name, reason in finding.splits.facts.get("left_out", {}).items():
        finding.data.setdefault("exclude", []).append(name)
        finding.words = [line for line in finding.words if not line.startswith(f"  {name}: ")]
        finding.words.append(f"  not used: {name}: {reason}")
    classes = finding.splits.facts.get("classes")
    if classes:
        finding.words.append(f"  {len(classes)} classes: {shorten(', '.join(classes), 100)}")
    return finding


def _survey(path: Path) -> Callable[[Path, str | None], Finding]:
    """Return the function that inspects data of this kind."""
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _dataset
        return _arrays if any(path.glob("*.npy")) else _images
    kinds = {
        **dict.fromkeys((".csv", ".tsv", ".tab", ".txt"), _table),
        **dict.fromkeys((".npz", ".safetensors"), _arrays),
        **dict.fromkeys((".jsonl", ".ndjson"), _lines),
        ".parquet": _parquet,
    }
    if path.suffix.lower() not in kinds:
        raise DataError(f"{path}: unknown kind of file; use one of {listed(kinds)}, or a folder")
    return kinds[path.suffix.lower()]


def _load(data: dict[str, Any]) -> DataSplits:
    arguments = {key: value for key, value in data.items() if key != "name"}
    splits: DataSplits = lookup("data", data["name"]).factory(**arguments)
    return splits


def config_text(name: str, finding: Finding) -> str:
    """Return the YAML of an experiment."""
    assert finding.splits is not None
    rows = finding.splits.facts["rows"]["train"]
    batch_size = 32 if rows < 5000 else 128 if rows < 100_000 else 512
    epochs = max(3, min(50, 500_000 // rows))
    steps = epochs * -(-rows // batch_size)
    sections = {
        "model": finding.model,
        "data": finding.data,
        "loss": "mse" if finding.splits.num_classes is None else "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "scheduler": {"name": "warmup_cosine", "warmup_steps": max(1, min(200, steps // 10))},
        "training": {"epochs": epochs, "batch_size": batch_size, "log_interval": max(1, min(100, steps // 20))},
    }
    head = [f"# Train with: etude train {name}/baseline", f"# All keys: etude config show {name}/baseline", "#"]
    found = [f"# {line}" for line in finding.words]
    body = "\n".join(dump_yaml({key: value}) for key, value in sections.items())
    return "\n".join([*head, *found, "", body])


# ------------------------------------------------------------------------------------------------ tables


@dataclass(slots=True)
class Column:
    """The content of a column."""

    name: str
    numbers: bool = True
    values: dict[str, None] = field(default_factory=dict)
    """Distinct strings, up to slightly more than the maximum number of categories."""
    missing: bool = False

    @property
    def is_classes(self) -> bool:
        """Whether it may be a class: text, or few distinct integers."""
        few = len(self.values) <= MAX_CLASSES
        return not self.numbers or (few and all(re.fullmatch(r"-?\d+", value) for value in self.values))

    def words(self) -> str:
        """Return a one-line description."""
        several = len(self.values) > MAX_CATEGORIES
        few = ", ".join(list(self.values)[:3] if several else in_order([one for one in self.values if one])[:4])
        kind = "numbers" if self.numbers else f"{'many' if several else len(self.values)} texts"
        return f"{kind}, such as {shorten(few, 60)}" + (", some missing" if self.missing else "")


def _table(path: Path, target: str | None) -> Finding:
    delimiter = _delimiter(path)
    columns = _columns(TableFormat(delimiter=delimiter).read(path, None))
    usual = "\t" if path.suffix in (".tsv", ".tab") else ","
    options: dict[str, Any] = {} if delimiter == usual else {"delimiter": delimiter}
    if delimiter != "," and any(_is_decimal_comma(column) for column in columns):
        options["decimal"] = ","
        columns = _columns(TableFormat(delimiter=delimiter, form=NumberForm(decimal=",")).read(path, None))
    return _of_columns("csv", path, columns, target, options)


def _delimiter(path: Path) -> str:
    """Return the most frequent of the usual delimiters in the first line."""
    with path.open("rb") as file:
        line = file.readline(2**16).decode("utf-8", errors="replace")
    return max(",;\t|", key=lambda one: (line.count(one), one == ","))


def _is_decimal_comma(column: Column) -> bool:
    values = [value for value in column.values if value]
    return not column.numbers and bool(values) and all(_DECIMAL_COMMA.fullmatch(value) for value in values)


def _of_columns(
    name: str, path: Path, columns: Sequence[Column], target: str | None, options: dict[str, Any]
) -> Finding:
    chosen = _target(path, [column.name for column in columns], target)
    goal = next(column for column in columns if column.name == chosen)
    others = [column for column in columns if column is not goal]
    left_out = [
        column.name
        for column in others
        if re.fullmatch(r"column_\d+", column.name)
        or len([value for value in column.values if value]) < 2
        or (not column.numbers and len(column.values) > MAX_CATEGORIES)
    ]
    data: dict[str, Any] = {"name": name, "path": str(path), "target": chosen}
    data |= {"exclude": left_out} if left_out else {}
    data |= {"task": "classification"} if goal.is_classes and goal.numbers else {}
    data |= {} if goal.is_classes else {"standardize_target": True}
    kept = [column for column in others if column.name not in left_out]
    if any(column.missing or "" in column.values for column in kept):
        data["missing"] = "indicator"
    words = [f"  {column.name}: {column.words()}" for column in kept]
    words += [f"  not used: {column.name}: {column.words()}" for column in others if column.name in left_out]
    words.append(f"  to predict: {chosen}, {'a class' if goal.is_classes else 'a number'}")
    return Finding({**data, **options}, dict(TABLE_MODEL), words)


def _target(path: Path, names: Sequence[str], target: str | None) -> str:
    """Return the column to predict: the given one, one with a usual name, or the last."""
    if target is not None and target not in names:
        raise ConfigError(
            f"{path} has no column {target!r}{did_you_mean(target, names)} (there are: {listed(names)})"
        )
    small = {name.lower(): name for name in names}
    return target or next((small[name] for name in TARGETS if name in small), names[-1])


def _parquet(path: Path, target: str | None) -> Finding:
    return _of_columns("parquet", path, _columns(TableFormat(parquet=True).read(path, None)), target, {})


def _columns(table: Table) -> list[Column]:
    columns = []
    for name in table.names:
        if text := table.texts.get(name):
            columns.append(Column(name, False, dict.fromkeys(text.values), bool((text.codes < 0).any())))
        else:
            found = table.numbers[:, table.places([name])]
            gaps = np.isnan(found)
            some = sorted({f"{value:g}" for value in found[~gaps][:SURVEYED_LINES]})
            columns.append(Column(name, True, dict.fromkeys(some[: MAX_CATEGORIES + 1]), bool(gaps.any())))
    return columns


# ------------------------------------------------------------------------------------------------ other kinds


def _for_inputs(shape: Sequence[int]) -> dict[str, Any]:
    """Return a model for inputs of a shape."""
    if len(shape) == 3 and min(shape[1:]) >= 12:
        return {"name": "lenet5", "dropout": 0.1}
    return dict(TABLE_MODEL)


def _arrays(path: Path, target: str | None) -> Finding:
    data = {"name": "arrays", "path": str(path), **({"labels": target} if target else {})}
    splits = _load(data)
    assert splits.input_shape is not None
    goal = f"{splits.num_targets} numbers" if splits.num_classes is None else f"{splits.num_classes} classes"
    words = [f"  inputs of shape {splits.input_shape}, labels: {goal}"]
    return Finding(data, _for_inputs(splits.input_shape), words)


def _images(path: Path, target: str | None) -> Finding:
    from etude.data.catalog.images import find_images, first_image

    _no_target(target)
    found = find_images(path, 0.0, 0.0, 0)
    first, size = first_image(found.parts["train"], skip_broken=True)
    side = min(64, *size)
    data: dict[str, Any] = {"name": "image_folder", "path": str(path), "size": side}
    if side >= 12:
        data["augment"] = [{"name": "random_crop", "padding": max(1, side // 16)}]
    words = [f"  images such as {first}, {size[0]} x {size[1]}; they become {side} x {side}"]
    return Finding(data, _for_inputs((3, side, side)), words, fallback={"skip_broken": True})


def _lines(path: Path, target: str | None) -> Finding:
    entries = []
    with path.open("rb") as file:
        for line in islice(file, SURVEYED_LINES):
            try:
                entries.append(json.loads(line.decode("utf-8-sig")))
            except ValueError:
                continue  # loading the file reports the location
    objects = [entry for entry in entries if isinstance(entry, dict)]
    if not objects:
        raise DataError(f"{path} has no JSON objects, one in each line")
    label = _target(path, list(objects[0]), target)
    text = _text_key([entry for entry in objects if label in entry], label, path)
    data = {"name": "jsonl", "path": str(path), "text": text, "label": label}
    return Finding(data, dict(TEXT_MODEL), [f"  texts under {text!r}, classes under {label!r}"])


def _text_key(objects: Iterable[dict[str, Any]], label: str, path: Path) -> str:
    """Return the key with a usual name, else the one with the longest texts."""
    lengths: dict[str, int] = {}
    for entry in objects:
        for key, value in entry.items():
            if isinstance(value, str) and key != label:
                lengths[key] = lengths.get(key, 0) + len(value)
    if not lengths:
        raise DataError(f"{path} has no texts besides {label!r}; set the label with --target")
    return next((name for name in TEXTS if name in lengths), max(lengths, key=lambda key: lengths[key]))


def _dataset(path: Path, target: str | None) -> Finding:
    from etude.data.catalog.huggingface import column_kinds, training_table

    kinds = column_kinds(str(path))
    label = _target(path, list(kinds), target)
    texts = [name for name, is_text in kinds.items() if is_text and name != label]
    if not texts:
        return _of_columns("huggingface", path, _columns(training_table(str(path), label)), label, {})
    text = next((name for name in TEXTS if name in texts), texts[0])
    data = {"name": "huggingface", "path": str(path), "target": label, "text": text}
    return Finding(data, dict(TEXT_MODEL), [f"  texts in {data['text']!r}, classes in {label!r}"])


def _no_target(target: str | None) -> None:
    if target is not None:
        raise ConfigError("--target names a column; the class of an image is the name of its folder")
