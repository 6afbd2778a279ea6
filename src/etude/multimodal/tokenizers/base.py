"""Base of tokenizers: decoding codes, one safetensors file with a checksum, and values of users as tensors."""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.core.errors import DataError
from etude.core.files import write_bytes

SUFFIX = ".safetensors"
VERSION = 1
_FACTS = "tokenizer"
MISSING = -1
"""The code of a missing value."""


class Tokenizer(ABC):
    """Codes 0 … size-1 for values of one kind, and back; -1 is a missing value."""

    kind: ClassVar[str]
    tensors: ClassVar[Mapping[str, str]]
    """Names of the tensors in a file, which are constructor arguments."""
    values: Tensor
    """The values of the codes: (V,) or (V, D), float32."""

    @property
    def size(self) -> int:
        """The number of codes."""
        return len(self.values)

    @abstractmethod
    def encode(self, values: Any) -> Tensor:
        """Return the codes of values, int64; -1 for missing ones."""

    def decode(self, codes: Any) -> Tensor:
        """Return the values of codes, float32; NaN for -1."""
        places = as_codes(codes, self.size)
        found = self.values.to(places.device)[places.clamp(min=0)]
        found[places == MISSING] = torch.nan
        return found

    def facts(self) -> dict[str, Any]:
        """Return further constructor arguments to store in a file."""
        return {}

    def save(self, path: str | Path) -> None:
        """Write one safetensors file atomically; the same tokenizer gives the same bytes."""
        path = Path(path)
        dense = {name: getattr(self, argument).cpu().contiguous() for name, argument in sorted(self.tensors.items())}
        header = {"kind": self.kind, "version": VERSION, **self.facts(), "crc32": _checksum(dense)}
        raw = safetensors.torch.save(dense, {_FACTS: json.dumps(header)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, raw)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return what `save` wrote, bit for bit; DataError if the file is missing, damaged or of another kind."""
        path = Path(path)
        if not path.is_file():
            raise DataError(f"there is no tokenizer {path}; fit one and save it there")
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads((file.metadata() or {}).get(_FACTS, "{}"))
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
            kind, version, checksum = facts.pop("kind", None), facts.pop("version", None), facts.pop("crc32", None)
        except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
            raise DataError(f"{path} is not a tokenizer, or damaged: {error}; create or copy it again") from error
        kinds: dict[str, type[Any]] = {one.kind: one for one in (cls, *cls.__subclasses__()) if "kind" in vars(one)}
        if kind not in kinds or version != VERSION:
            expected = f"{' or '.join(kinds)}, version {VERSION}"
            raise DataError(
                f"{path} is not a readable tokenizer: kind {kind!r}, version {version!r}; expected {expected}"
            )
        names = kinds[kind].tensors
        if set(tensors) != set(names) or _checksum(tensors) != checksum:
            raise DataError(
                f"{path} is damaged: its tensors ({', '.join(sorted(tensors))}) do not match its checksum; create "
                "it again"
            )
        found: Self = kinds[kind](**{names[name]: tensor for name, tensor in tensors.items()}, **facts)
        return found


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    return crc


def as_floats(values: Any, what: str = "values") -> Tensor:
    """Return numbers (a tensor, an array, lists of numbers) as a tensor of float32.

    Values beyond float32 become infinite, None in a list becomes NaN.

    >>> as_floats([[1, 2], [3, None]])
    tensor([[1., 2.],
            [3., nan]])
    """
    if isinstance(values, Tensor):
        if values.is_complex():
            raise DataError(f"{what} must be real numbers, found {values.dtype}")
        return values.detach().to(torch.float32)
    try:
        array = np.asarray(values)
        if array.dtype.kind == "c":
            raise TypeError(array.dtype)
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} must be an array of real numbers: {error}") from error


def as_whole_numbers(values: Any, what: str = "codes") -> Tensor:
    """Return integers as a tensor of int64; raises DataError for others.

    >>> as_whole_numbers([3, 4])
    tensor([3, 4])
    """
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise DataError(f"{what} must be integers, found {array.dtype}")
        return torch.from_numpy(array.astype(np.int64))
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{what} must be integers, found {values.dtype}")
    return values.to(torch.int64)


def as_codes(codes: Any, size: int, what: str = "codes") -> Tensor:
    """Return codes as a tensor of int64; raises DataError unless all are below `size`, or -1 for missing ones.

    >>> as_codes([0, 2, -1], 3)
    tensor([ 0,  2, -1])
    """
    tensor = as_whole_numbers(codes, what)
    if tensor.numel():
        low, high = (int(value) for value in tensor.aminmax())
        if low < MISSING or high >= size:
            bad = low if low < MISSING else high
            raise DataError(f"{what} must be 0 … {size - 1}, or {MISSING} for a missing value; found {bad}")
    return tensor
