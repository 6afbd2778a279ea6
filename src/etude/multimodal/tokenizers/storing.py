"""Tokenizers as files: one safetensors file each, with facts and a checksum in its metadata."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.core.errors import DataError
from etude.core.files import write_bytes

SUFFIX = ".safetensors"
VERSION = 1
_FACTS = "tokenizer"


def save_tensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a file that is there as a whole or not at all; the same tokenizer gives the same bytes."""
    path = Path(path)
    dense = {name: tensor.cpu().contiguous() for name, tensor in sorted(tensors.items())}
    header = {"kind": kind, "version": VERSION, **facts, "crc32": _checksum(dense)}
    raw = safetensors.torch.save(dense, {_FACTS: json.dumps(header)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, raw)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


def read_tensors(path: str | Path, kinds: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and facts of a file of one of these kinds, each with the names of the tensors it has.

    Raises DataError in one line for a file that is missing, damaged, or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no tokenizer {path}; fit one and save it there")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(_FACTS)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tokenizer: {_one_line(error)}; make or copy it again") from error
    facts = _facts(path, header, kinds)
    names = kinds[facts["kind"]]
    if set(tensors) != set(names):
        raise DataError(f"{path} has tensors {', '.join(sorted(tensors))}; a tokenizer has {', '.join(names)}")
    if _checksum(tensors) != facts.get("crc32"):
        raise DataError(f"{path} is damaged: its numbers do not have the checksum written with them; make it again")
    return tensors, facts


def _facts(path: Path, header: str | None, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    try:
        facts = json.loads(header) if header is not None else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not {"kind", "version"} <= facts.keys():
        raise DataError(f"{path} is no tokenizer: nothing in it says of which kind; save one with its method save")
    if facts["kind"] not in kinds:
        raise DataError(f"{path} holds a tokenizer of kind {facts['kind']!r}, expected {' or '.join(kinds)}")
    if facts["version"] != VERSION:
        raise DataError(f"{path} has version {facts['version']!r}; this program reads version {VERSION}: update it")
    return facts


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    return crc


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
