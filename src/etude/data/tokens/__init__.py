"""Token files: writing, reading, checking, and the files of other tools."""

from etude.data.tokens.check import TokenReport, check_tokens
from etude.data.tokens.dataset import find_split, read_dataset
from etude.data.tokens.file import Sample, TokenFile
from etude.data.tokens.opening import open_tokens
from etude.data.tokens.writer import TokenWriter

__all__ = [
    "Sample",
    "TokenFile",
    "TokenReport",
    "TokenWriter",
    "check_tokens",
    "find_split",
    "open_tokens",
    "read_dataset",
]
