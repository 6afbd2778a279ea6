"""Loading a tokenizer.json of the tokenizers library."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from etude.core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def require_tokenizers() -> None:
    """Raise DataError if the tokenizers library is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("tokenizing needs the tokenizers library; install it with: pip install 'etude[text]'")


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json of a file or folder path."""
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        where = f"{path} has no tokenizer.json" if path.is_dir() else f"tokenizer {path} does not exist"
        raise DataError(f"{where}; pass a tokenizer.json, or a folder with one")
    return file


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load a tokenizer.json, or the one in a folder; truncation and padding are disabled. Raises DataError."""
    require_tokenizers()
    from tokenizers import Tokenizer

    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises only Exception
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{file} is not a tokenizer.json of the tokenizers library ({reason})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
