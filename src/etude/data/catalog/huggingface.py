"""Hugging Face datasets for config files: texts with classes, or tables, from a saved folder or by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from etude.config.registry import register
from etude.core.errors import ConfigError, DataError
from etude.core.spelling import did_you_mean, listed, shorten
from etude.data.catalog.features import FeatureOptions, Missing, Part, Task, make_splits
from etude.data.catalog.holdout import Share, hold_out, mix_keys, shares
from etude.data.catalog.screening import MAX_CATEGORIES
from etude.data.catalog.table import Table
from etude.data.catalog.table_files import ARROW_ROWS, TableFormat, arrow_table
from etude.data.catalog.tabular import prepare_table
from etude.data.catalog.texts import LabeledText, label_name, prepare_texts, text_splits
from etude.data.splits import DataSplits, OtherData

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "valid", "dev"), "test": ("test",)}
"""Usual names of the splits."""
SURVEYED = 2000
"""Number of samples that decide whether a column has texts or categories."""


def prepare_huggingface(
    path: Path, facts: Mapping[str, Any], arguments: Mapping[str, Any], labelled: bool
) -> OtherData:
    """Return the samples of a file: texts of a JSONL file if the training had texts, else rows of a table."""
    prepare = prepare_table if arguments["text"] is None else prepare_texts
    return prepare(path, facts, arguments, labelled)


@register("data", "huggingface", prepare=prepare_huggingface, check_installed=lambda _: _import_datasets())
def load_huggingface(
    path: str,
    target: str = "label",
    text: str | None = None,
    tokenizer: str = "bytes",
    max_length: Annotated[int, Ge(1)] = 256,
    columns: list[str] | None = None,
    exclude: list[str] | None = None,
    categorical: list[str] | None = None,
    task: Task | None = None,
    missing: Missing = "error",
    unseen: Literal["error", "zeros"] = "error",
    standardize: bool = True,
    standardize_target: bool = False,
    subset: str | None = None,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
) -> DataSplits:
    """A dataset of the `datasets` library: texts if `text` names their column, else a table.

    path: a folder made by `save_to_disk`, or the name of a dataset, which is downloaded unless it is in the cache.
    target: the column to predict.
    text: the column of texts to classify; `tokenizer` and `max_length` are those of the data set `jsonl`.
    columns, exclude, categorical, task, missing, unseen, standardize, standardize_target: of a table, as of `csv`.
    subset: the name of a subset, if the dataset has several.
    validation, test: the name of a split, or the share of training samples held out where there is no such split.
    """
    splits = _open(path, subset)
    names = _split_names(path, splits, validation, test)
    of_validation, of_test = shares(validation, test)
    held = 0.0 if "validation" in names else of_validation, 0.0 if "test" in names else of_test
    if text is not None:
        of_tables = {"columns": columns, "exclude": exclude, "categorical": categorical, "task": task}
        if given := [name for name, value in of_tables.items() if value is not None]:
            raise ConfigError(f"{' and '.join(given)} is for tables, but text: {text} selects texts; remove one")
        texts = {part: list(_texts(path, splits[name], text, target)) for part, name in names.items()}
        return text_splits(texts.pop("train"), texts, held, seed, tokenizer, max_length)
    if columns is not None and exclude:
        raise ConfigError("set columns or exclude, not both")
    named = frozenset([*(columns or ()), *(categorical or ())])
    options = FeatureOptions(target, task, missing, unseen, standardize, standardize_target, named)
    form = options.table_format(categorical, exclude)
    wanted = None if columns is None else [*columns, target]
    tables = {part: _table(path, splits[name], form, wanted, target) for part, name in names.items()}
    rows = hold_out(mix_keys(tables["train"].keys ^ np.uint64(seed)), *held)
    parts = {part: Part(tables["train"], found) for part, found in rows.items()}
    parts |= {part: Part(table, slice(None)) for part, table in tables.items() if part != "train"}
    return make_splits(parts, options)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("datasets of Hugging Face need the datasets library: pip install 'etude[data]'") from error
    return datasets


def _open(path: str, subset: str | None) -> Mapping[str, Any]:
    """Return the splits of a dataset by name. Raises DataError in one line if it cannot be loaded."""
    datasets = _import_datasets()
    folder = Path(path).expanduser()
    is_saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(folder)) if is_saved else datasets.load_dataset(path, subset)
    except Exception as error:  # the library raises errors of the network, the hub, file systems and formats
        reason = shorten(" ".join(str(error).split()), 200)
        raise DataError(
            f"{path} cannot be loaded ({type(error).__name__}: {reason}); without a network, save it on another "
            "machine with save_to_disk and use that folder"
        ) from error
    return found if isinstance(found, datasets.DatasetDict) else {"train": found}


def column_kinds(path: str) -> dict[str, bool]:
    """Return the columns of a saved dataset's training split, and whether each is text, rather than categories."""
    samples = _open(path, None)["train"]
    first = samples.select(range(min(len(samples), SURVEYED)))
    most = min(MAX_CATEGORIES, len(first) // 2)
    return {
        name: getattr(kind, "dtype", "") in ("string", "large_string") and len(set(first[name])) > most
        for name, kind in samples.features.items()
    }


def training_table(path: str, target: str) -> Table:
    """Return the training split of a saved dataset as a table."""
    return _table(path, _open(path, None)["train"], TableFormat(), None, target)


def _split_names(path: str, splits: Mapping[str, Any], validation: float | str, test: float | str) -> dict[str, str]:
    """Return the dataset split of each part that has one."""
    found: dict[str, str] = {}
    for part, given in (("train", "train"), ("validation", validation), ("test", test)):
        if isinstance(given, str) and given not in splits:
            raise DataError(
                f"{path} has no split {given!r}{did_you_mean(given, splits)} (there are: {listed(splits)})"
            )
        name = given if isinstance(given, str) else next((one for one in SPLIT_NAMES[part] if one in splits), None)
        found |= {} if name is None else {part: name}
    for part, name in found.items():
        if not len(splits[name]):
            raise DataError(f"{path}: the split {name!r} has no samples ({part})")
    return found


def _texts(path: str, samples: Any, text: str, target: str) -> Iterator[LabeledText]:
    TableFormat().wanted(Path(path), samples.column_names, [text, target])
    names = getattr(samples.features[target], "names", None)
    for row, (one, label) in enumerate(zip(samples[text], samples[target], strict=True)):
        where = f"{path}, row {row + 1}"
        if not isinstance(one, str) or label is None:
            raise DataError(f"{where}: {text!r} or {target!r} has no value")
        yield LabeledText(one, label_name(names[label] if names else label, where), where)


def _table(path: str, samples: Any, form: TableFormat, wanted: list[str] | None, target: str) -> Table:
    names = form.wanted(Path(path), samples.column_names, wanted)
    form.wanted(Path(path), names, [target])
    arrow = samples.select_columns(names).with_format("arrow")[:]
    if classes := getattr(samples.features[target], "names", None):
        arrow = _with_classes(arrow, target, classes)
    return arrow_table(form, Path(path), arrow.schema, names, arrow.to_batches(ARROW_ROWS), len(samples))


def _with_classes(arrow: Any, target: str, classes: list[str]) -> Any:
    """Return a table whose target has the names of its classes; -1 means missing."""
    import pyarrow as pa

    place = arrow.schema.get_field_index(target)
    labels = [
        classes[label] if label is not None and label >= 0 else None for label in arrow.column(place).to_pylist()
    ]
    return arrow.set_column(place, target, pa.array(labels, pa.string()))
