"""The environment of a run: versions, device, threads, the repository's commit, the command line."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.lazy import package_version

GIT_TIMEOUT_S = 5.0
MOST_DIFF_CHARS = 200_000
"""Characters of a diff that are kept."""
_GIT = ("git", "-c", "core.fsmonitor=false")  # a repository may configure a program there, which would be run


def collect_environment(device: torch.device | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Return the contents of `env.json`. It needs no network, and contains no host or user name.

    `folder` is where the repository is searched; by default the current folder.

    >>> sorted(collect_environment(torch.device("cpu"))["versions"])
    ['etude', 'numpy', 'python', 'torch']
    """
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "etude": package_version(),
        },
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": _describe(device if device is not None else torch.device("cpu")),
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "git": _git(folder if folder is not None else Path.cwd()),
        "command": list(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _describe(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"name": str(device), "type": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "model": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return described


def _git(folder: Path) -> dict[str, Any] | None:
    """Return commit and dirty flag (changes in tracked files); None outside a repository or without git."""
    found = commit(folder)
    if found is None:
        return None
    changes = _ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": found, "dirty": None if changes is None else bool(changes)}


def commit(folder: Path | None = None) -> str | None:
    """Return the commit of the repository; None outside a repository, without git, or if git takes too long."""
    found = _ask_git(folder, "rev-parse", "HEAD")
    return None if found is None else found.strip()


def uncommitted(folder: Path | None = None) -> str:
    """Return the changes of tracked files since the last commit, as a diff that may be cut off.

    Empty outside a repository, without git, or if git takes too long.
    """
    diff = _ask_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
    cut = "" if len(diff) <= MOST_DIFF_CHARS else f"\n… cut off after {MOST_DIFF_CHARS:,} characters\n"
    return diff[:MOST_DIFF_CHARS] + cut


def _ask_git(folder: Path | None, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # do not take the lock of the repository's index
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
