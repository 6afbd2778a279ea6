"""Problems told in words, and files that are written as a whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class Problem(Exception):
    """A mistake of the user, told in one line."""


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Write a file that is there as a whole or not at all."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
