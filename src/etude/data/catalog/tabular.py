"""Tables for config files: `csv` and `parquet`. One column is the target, the others are features."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Len

from etude.config.registry import register
from etude.core.errors import ConfigError, DataError
from etude.data.catalog.delimited import NumberForm
from etude.data.catalog.features import FeatureColumns, FeatureOptions, Missing, Part, Task, labels_of, make_splits
from etude.data.catalog.holdout import Share, hold_out, mix_keys, own_files, shares
from etude.data.catalog.screening import screen
from etude.data.catalog.table import Kind
from etude.data.catalog.table_files import TableFormat, import_parquet
from etude.data.splits import DataSplits, OtherData, TensorData

Character = Annotated[str, Len(1, 1)]
Names = list[str]


def prepare_table(path: Path, facts: Mapping[str, Any], arguments: Mapping[str, Any], labelled: bool) -> OtherData:
    """Return the rows of a delimited text file or a Parquet file as features of the training's columns."""
    target = facts["target"]
    settings = {name: arguments[name] for name in ("missing", "unseen", "standardize", "standardize_target")}
    options = FeatureOptions(target, **settings)
    columns = FeatureColumns(facts["columns"], options)
    kinds: dict[str, Kind] = columns.kinds()
    if labelled:
        kinds[target] = "text" if "classes" in facts else "number"
    form = replace(
        options.table_format([name for name, kind in kinds.items() if kind == "text"], None),
        delimiter=arguments.get("delimiter"),
        encoding=arguments.get("encoding", "utf-8"),
        form=NumberForm(arguments.get("decimal", "."), arguments.get("thousands")),
        parquet=path.suffix == ".parquet",
    )
    table = form.read(path, list(kinds), kinds)
    for name, kind in table.kinds().items():
        if kind != kinds[name]:
            raise DataError(f"{path}: column {name!r} holds {kind}s, in training {kinds[name]}s; fix it")
    part = Part(table, slice(None))
    labels = torch.from_numpy(labels_of(part, facts)) if labelled else None
    return OtherData(TensorData(torch.from_numpy(columns.matrix(part)), labels))


@register("data", "csv", prepare=prepare_table)
def load_csv(
    path: str,
    target: str,
    columns: Names | None = None,
    exclude: Names | None = None,
    categorical: Names | None = None,
    task: Task | None = None,
    missing: Missing = "error",
    unseen: Literal["error", "zeros"] = "error",
    standardize: bool = True,
    standardize_target: bool = False,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
    delimiter: Character | None = None,
    decimal: Literal[".", ","] = ".",
    thousands: Character | None = None,
    encoding: str = "utf-8",
) -> DataSplits:
    """A delimited text file whose first line names its columns.

    path: the file to train on.
    target: the column to predict: texts are classes, numbers are regression targets.
    columns: the feature columns; by default all but the target, its copies and row ids.
    exclude: instead, columns to exclude.
    categorical: numeric columns that are categories. Text columns always are: one feature of 0 and 1 for each of up
        to 32 values.
    task: `classification` for numbers that are classes.
    missing: values that are empty, NA, N/A, NaN, null or none: an `error`; `mean` uses the training part's mean, and
        no category; `indicator` adds a feature that marks missing values.
    unseen: a category of a validation or test file that the training file lacks: an `error`, or `zeros`.
    standardize: numbers to mean 0 and standard deviation 1 over the training part.
    standardize_target: the same for a target of numbers; losses are then in units of its standard deviation.
    validation, test: a file, or the share of rows held out. Which rows depends on their content and `seed` only.
    delimiter: a comma by default, a tab in .tsv files.
    decimal, thousands: how numbers are written.
    encoding: of the text, such as latin-1 or utf-16.
    """
    _check_characters(delimiter, decimal, thousands)
    named = frozenset([*(columns or ()), *(categorical or ())])
    options = FeatureOptions(target, task, missing, unseen, standardize, standardize_target, named)
    form = options.table_format(categorical, exclude)
    form = replace(form, delimiter=delimiter, encoding=encoding, form=NumberForm(decimal, thousands))
    return _load(path, columns, validation, test, seed, form, options)


@register("data", "parquet", prepare=prepare_table, check_installed=lambda _: import_parquet())
def load_parquet(
    path: str,
    target: str,
    columns: Names | None = None,
    exclude: Names | None = None,
    categorical: Names | None = None,
    task: Task | None = None,
    missing: Missing = "error",
    unseen: Literal["error", "zeros"] = "error",
    standardize: bool = True,
    standardize_target: bool = False,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
) -> DataSplits:
    """A Parquet file; the arguments are those of the data set `csv`."""
    named = frozenset([*(columns or ()), *(categorical or ())])
    options = FeatureOptions(target, task, missing, unseen, standardize, standardize_target, named)
    form = replace(options.table_format(categorical, exclude), parquet=True)
    return _load(path, columns, validation, test, seed, form, options)


def _load(
    path: str,
    columns: Names | None,
    validation: float | str,
    test: float | str,
    seed: int,
    form: TableFormat,
    options: FeatureOptions,
) -> DataSplits:
    if columns is not None and form.exclude:
        raise ConfigError("set columns or exclude, not both")
    if columns is not None and options.target in columns:
        raise ConfigError(f"the target {options.target!r} is one of the feature columns; remove it from columns")
    names = None if columns is None else [*columns, options.target]
    main = form.read(Path(path).expanduser(), names)
    form.wanted(main.path, main.names, [options.target])
    kinds = main.kinds()
    if options.task == "regression" and kinds[options.target] == "text":
        raise DataError(
            f"{main.path}: task is regression, but the target {options.target!r} holds text; set task "
            "to classification"
        )
    rows = hold_out(mix_keys(main.keys ^ np.uint64(seed)), *shares(validation, test))
    parts = {part: Part(main, found if len(rows) > 1 else slice(None)) for part, found in rows.items()}
    left_out = screen(main, options.target, options.named)
    used = [name for name in main.names if name not in left_out]
    for part, file in own_files(validation, test).items():
        parts[part] = Part(form.read(file, used, kinds), slice(None))
    return make_splits(parts, options)


def _check_characters(delimiter: str | None, decimal: str, thousands: str | None) -> None:
    given = {"delimiter": delimiter or ",", "decimal": decimal, "thousands": thousands}
    for name, character in given.items():
        if character is not None and (not character.isascii() or character in '"\n\r' or character.isalnum()):
            raise ConfigError(f"{name} is {character!r}; use one ASCII character such as , ; | or a tab")
    if decimal == thousands or decimal == (delimiter or ","):
        other = "thousands" if decimal == thousands else "delimiter"
        raise ConfigError(f"decimal and {other} are both {decimal!r}; change one of them")
