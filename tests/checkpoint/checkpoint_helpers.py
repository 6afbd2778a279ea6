"""What the tests of the checkpoint room share: exact comparison of trees, and small checkpoints to damage."""

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.checkpoint import read_checkpoint
from etude.checkpoint.store import write_checkpoint


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values, in logical order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(left: Any, right: Any, path: str = "tree") -> None:
    """Fail unless two trees are equal in type, order and every bit."""
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor), path
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert raw(left) == raw(right), path
        return
    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right], path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}.{i}")
    elif isinstance(left, float):
        assert struct.pack(">d", left) == struct.pack(">d", right), path
    else:
        assert left == right, path


def write_filled(folder: Path, number: int, size: int = 64) -> None:
    """Write a checkpoint in which every tensor and number is `number`."""
    model = {"weight": torch.full((size,), float(number)), "bias": torch.full((3,), float(number))}
    state = {"momentum": {"weight": torch.full((size,), float(number))}, "number": number}
    write_checkpoint(folder, model, state, {"step": number})


def read_filled(folder: Path) -> int:
    """Return the number a checkpoint is filled with; fail if its parts do not agree."""
    checkpoint = read_checkpoint(folder)
    number = checkpoint.state["number"]
    for tensor in (*checkpoint.model_state.values(), checkpoint.state["momentum"]["weight"]):
        assert torch.equal(tensor, torch.full_like(tensor, number))
    return int(number)
