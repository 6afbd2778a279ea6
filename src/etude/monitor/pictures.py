"""Read the pictures of a run folder."""

import os
from pathlib import Path

MOST_BYTES = 32 << 20
"""Size of a picture above which it is not read."""
_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
"""First bytes of a file → its type. There is no SVG: it may hold scripts."""


def read_picture(run: Path, given: str, most_bytes: int = MOST_BYTES) -> tuple[bytes, str] | None:
    """Return a recorded picture and its type; None unless it is a file inside the run's folder, and not too large."""
    try:
        # runs are moved and copied: a path that no longer holds is looked up by what follows the folder's name
        path = next((one for one in _candidates(run.resolve(), Path(given)) if one.is_file()), None)
        if path is None or path.stat().st_size > most_bytes:
            return None
        data = path.read_bytes()
    except (OSError, ValueError):
        return None
    kind = next((kind for start, kind in _TYPES.items() if data.startswith(start)), None)
    return None if kind is None else (data, kind)


def _candidates(run: Path, given: Path) -> list[Path]:
    """Return the files inside a run's folder that a recorded path may mean."""
    tails = [Path(*given.parts[start:]) for start in range(given.is_absolute(), len(given.parts))]
    found = [Path(os.path.realpath(run / tail)) for tail in tails]
    return [one for one in found if one.is_relative_to(run)]
