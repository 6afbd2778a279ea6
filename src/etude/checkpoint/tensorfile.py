"""Tensors to and from safetensors files; written as a stream, and equal tensors give equal bytes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from etude.core.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The element types a safetensors file can hold, and what it calls them."""


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file piece by piece, the same for equal tensors.

    The library's own writer hides the bytes, so a checksum would cost a second read, and orders metadata by chance.
    Copies (from a device, or to make a tensor contiguous) are made one at a time: a large state is never held twice.
    """
    # Wide elements first keeps every tensor aligned; the name settles the rest, so that order never varies.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            dense = tensors[name].detach().cpu().contiguous()
            flat = dense.as_strided((dense.numel(),), (1,))  # a dimension of size 1 may have any stride
            yield flat.view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory of its own, on the CPU."""
    try:
        # Cloned because the library maps the file: a tensor would change with the file and start at any address,
        # and some matrix kernels round differently at another alignment.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except Exception as error:  # the header may say anything: unknown types, sizes that no memory has
        raise CheckpointError(f"cannot read {path}: {error!s:.200}; use another checkpoint") from error
