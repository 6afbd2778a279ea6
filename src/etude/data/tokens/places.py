"""Where a token file lies: a path of this machine, or an address that fsspec knows."""

from pathlib import Path

import numpy as np

from etude.data.tokens.storage import Storage

_LOCAL = ("file://", "local://")


def is_remote(name: str) -> bool:
    """Return whether a name is an address of something that is not on this machine.

    >>> is_remote("s3://bucket/train.bin"), is_remote("data/train.bin"), is_remote("file:///data/train.bin")
    (True, False, False)
    """
    return ("://" in name or "::" in name) and not name.startswith(_LOCAL)


def local_path(name: str) -> Path:
    """Return the path that a name of a local file means."""
    for prefix in _LOCAL:
        name = name.removeprefix(prefix)
    return Path(name)


def exists(name: str) -> bool:
    """Return whether there is such a file."""
    if is_remote(name):
        from etude.data.tokens.remote import remote_exists

        return remote_exists(name)
    try:
        return local_path(name).is_file()
    except (OSError, ValueError):
        return False


def local_copy(name: str) -> Path:
    """Return a path of this machine with the whole file: its own, or that of a copy of a remote one."""
    if not is_remote(name):
        return local_path(name)
    from etude.data.tokens.remote import RemoteCopy

    copy = RemoteCopy(name)
    copy.prepare(np.zeros(1, np.int64), copy.path.stat().st_size)
    return copy.path


def open_storage(name: str, *, memory_map: bool = True) -> Storage:
    """Open a local file, or the local copy of a remote one."""
    if not is_remote(name):
        return Storage(local_path(name), name=name, memory_map=memory_map)
    from etude.data.tokens.remote import RemoteCopy

    copy = RemoteCopy(name)
    return Storage(copy.path, name=name, prepare=copy.prepare)
