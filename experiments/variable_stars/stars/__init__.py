"""Variable stars as sequences of tokens of several modalities, made of the OGLE-III catalogue."""

from stars.build import prepare, read_schema, read_truth
from stars.layout import COLUMNS, LENGTH, UNITS, columns_of
from stars.options import DEFAULT_OUT, Options

__all__ = [
    "COLUMNS",
    "DEFAULT_OUT",
    "LENGTH",
    "UNITS",
    "Options",
    "columns_of",
    "prepare",
    "read_schema",
    "read_truth",
]
