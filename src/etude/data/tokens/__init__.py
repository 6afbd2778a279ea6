"""Token files: writing, reading, checking, and the files of other tools."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
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

__getattr__ = load_late(__name__, __file__)
