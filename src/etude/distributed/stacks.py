"""Where the threads of this process are in their code, in words and as a file."""

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[1]
_WAITS = (
    *(str(_TORCH / name) for name in ("distributed", "nn/parallel", "autograd", "cuda")),
    *(str(_OURS / name) for name in ("distributed", "engine")),
)
"""Code in which a process waits for other processes or for its device: backward passes all-reduce the gradients."""
_SAVING = {(f"Loop.{name}", str(_OURS / "engine/loop.py")) for name in ("_save", "_settle")}
_COMPILING = {str(_TORCH / name) for name in ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")}
"""Code that is on the stack while torch compiles, and not while compiled code runs."""
_STANDARD = (str(Path(os.__file__).parent), str(_TORCH), "<")  # the last: code without a file


@dataclass(frozen=True, slots=True)
class Place:
    """What a thread is doing."""

    waits: bool
    """It waits for other processes or for the device."""
    may_take_long: bool
    """It writes a checkpoint, waits until one is written in the background, or compiles."""
    where: str
    """The innermost function of the user's code, or of this library: `loss (components.py:31)`."""


def place_of(thread: int) -> Place:
    """Return what a thread, given by its id, is doing now."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place(waits=False, may_take_long=False, where="nowhere: its thread has ended")
    calls = [(one.f_code.co_qualname, one.f_code.co_filename) for one in _outwards(frame)]
    may_take_long = not _SAVING.isdisjoint(calls) or not _COMPILING.isdisjoint(path for _, path in calls)
    return Place(calls[0][1].startswith(_WAITS), may_take_long, _where(frame))


def _where(frame: FrameType) -> str:
    found = next((one for one in _outwards(frame) if not _is_library(one.f_code.co_filename)), frame)
    path = Path(found.f_code.co_filename)
    name = path.relative_to(_OURS.parent) if path.is_relative_to(_OURS) else path.name
    return f"{found.f_code.co_qualname.removesuffix('.<locals>.<lambda>')} ({name}:{found.f_lineno})"


def _is_library(path: str) -> bool:
    """Whether code belongs to the standard library or to an installed package other than this one."""
    return not path.startswith(str(_OURS)) and (path.startswith(_STANDARD) or "site-packages" in path)


def _outwards(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and all that called it, from the innermost to the outermost."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def stacks_of_all(first: int) -> str:
    """Return the stacks of all threads, that of the thread `first` before the others, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    own = threading.get_ident()
    order = [one for one in (first, *(ident for ident in frames if ident not in (first, own))) if one in frames]
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frames[ident]))}" for ident in order
    )
