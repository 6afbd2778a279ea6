"""Saving a state as safetensors plus JSON: exact for trees of dicts, lists, tuples, sets, numbers, strings, tensors."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parameter import is_lazy

from etude.core.errors import CheckpointError
from etude.distributed.shards import is_sharded, local_of

Structure = Any
"""JSON that mirrors a tree. A JSON object has one key, the kind of node that it represents:

dict       {"dict": {key: node}}            string keys
           {"items": [[key, node], …]}      with integer keys
tuple      {"tuple": [node, …]}             a list is a JSON list
set        {"set": [node, …]}               of strings and integers, sorted
tensor     {"tensor": name}                 tensors that share memory have one name
           {"complex": name}                stored as real and imaginary parts
float      {"float": 16 hex digits}         the bits of inf and nan, which JSON lacks
int        {"int": "0x…"}                   beyond 64 bits
"""

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
"""Dtypes that a safetensors file can hold, and their names there."""

_ALLOWED = "allowed are dict, list, tuple, set, None, bool, int, float, str and tensors"
_MAX_DEPTH = 100


def pack(tree: Any, name: str = "state") -> tuple[dict[str, Tensor], Structure]:
    """Split a tree into tensors by name and a JSON-able structure; `unpack` reverses it.

    Nothing is copied: the tensors are those of the tree, detached. A tensor is named by its dotted path. Subclasses
    are restored as their base type (an OrderedDict as a dict, a Parameter as a Tensor, NumPy's float64 as a float).
    Tensors that are divided among ranks (DTensor) stay so; all ranks have the same names. Raises CheckpointError with
    the dotted path, starting with `name`, of any unsupported object.

    >>> tensors, structure = pack({"weights": [torch.ones(2)], "betas": (0.9, 0.99)})
    >>> list(tensors), structure
    (['weights.0'], {'dict': {'weights': [{'tensor': 'weights.0'}], 'betas': {'tuple': [0.9, 0.99]}}})
    >>> unpack(tensors, structure)
    {'weights': [tensor([1., 1.])], 'betas': (0.9, 0.99)}
    """
    packer = _Packer(name)
    structure = packer.node(tree, ())
    return packer.tensors, structure


def unpack(tensors: Mapping[str, Tensor], structure: Structure) -> Any:
    """Rebuild the tree that `pack` split; tensors that shared memory share it again.

    Raises CheckpointError if the structure is invalid or does not fit the tensors.
    """
    try:
        return _unpack(tensors, structure, 0)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"the structure does not fit the tensors ({error!r:.200})") from error


def _unpack(tensors: Mapping[str, Tensor], structure: Structure, depth: int) -> Any:
    if structure is None or isinstance(structure, (bool, int, float, str)):
        return structure
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"the structure is nested more than {_MAX_DEPTH} deep")
    if isinstance(structure, list):
        return [_unpack(tensors, node, depth + 1) for node in structure]
    ((kind, content),) = structure.items()
    match kind:
        case "dict":
            return {key: _unpack(tensors, node, depth + 1) for key, node in content.items()}
        case "items":
            return {_key(node): _unpack(tensors, item, depth + 1) for node, item in content}
        case "tuple":
            return tuple(_unpack(tensors, node, depth + 1) for node in content)
        case "set":
            return {_key(node) for node in content}
    return _leaf(tensors, kind, content)


def _leaf(tensors: Mapping[str, Tensor], kind: Any, content: Any) -> Any:
    match kind:
        case "tensor":
            return tensors[content]
        case "complex":
            return torch.view_as_complex(tensors[content])
        case "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "int":
            return int(content, 16)
    raise CheckpointError(f"the structure has an unknown kind of node '{kind!s:.40}'; update etude to read it")


def _key(node: Structure) -> str | int:
    key = int(node["int"], 16) if isinstance(node, dict) else node
    if type(key) is not str and type(key) is not int:
        raise CheckpointError(f"the structure has the key {key!r:.40}")
    return key


class _Packer:
    """One walk over a tree."""

    def __init__(self, root: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._root = root
        self._name_of: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, path: tuple[str, ...]) -> Structure:
        if len(path) > _MAX_DEPTH:
            raise self._error(
                path[:4], f"is nested more than {_MAX_DEPTH} deep; check that it does not contain itself"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int(value)
            return number if -(2**63) <= number < 2**63 else {"int": hex(number)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) in (list, tuple, torch.Size):
            nodes = [self.node(item, (*path, str(i))) for i, item in enumerate(value)]
            return nodes if type(value) is list else {"tuple": nodes}
        if type(value) is set:
            return {"set": self._set(value, path)}
        kind = type(value)
        raise self._error(path, f"is a {kind.__module__}.{kind.__qualname__}, which is not data; {_ALLOWED}")

    def _dict(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Structure:
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise self._error(path, f"has the key {key!r}; keys must be strings or integers")
        nodes = {key: self.node(item, (*path, str(key))) for key, item in value.items()}
        if all(type(key) is str for key in nodes):
            return {"dict": nodes}
        return {"items": [[self.node(key, path), node] for key, node in nodes.items()]}

    def _set(self, value: set[Any], path: tuple[str, ...]) -> Structure:
        for item in value:
            if type(item) is not str and type(item) is not int:
                raise self._error(path, f"is a set with {item!r:.40}; items of sets must be strings or integers")
        return [self.node(item, path) for item in sorted(value, key=lambda item: (type(item) is str, item))]

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> Structure:
        local = local_of(value)
        if problem := _not_storable(local):
            raise self._error(path, problem)
        tensor = value.detach()
        if is_sharded(value) and (local.is_complex() or local.is_neg()):
            raise self._error(path, "is complex or negated lazily, and divided among ranks; convert it first")
        kind = "tensor"
        # Partially overlapping memory is stored twice; only identical tensors are restored as one.
        identity: tuple[Any, ...] = (tensor.device, local.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        identity += (local.is_conj(), local.is_neg(), type(tensor))
        if not is_sharded(value):
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            kind, tensor = "complex", torch.view_as_real(tensor)
        if local.numel() == 0:
            return {kind: self._add(tensor, path)}
        if identity not in self._name_of:
            self._name_of[identity] = self._add(tensor, path)
        return {kind: self._name_of[identity]}

    def _add(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        plain = ".".join(path).encode("utf-8", "backslashreplace").decode() or "value"
        name, count = plain, 1
        while name in self.tensors or name == "__metadata__":  # "a.b" may be a key beside {"a": {"b": …}}
            count += 1
            name = f"{plain}#{count}"
        self.tensors[name] = tensor
        return name

    def _error(self, path: tuple[str, ...], problem: str) -> CheckpointError:
        return CheckpointError(f"cannot save {'.'.join((self._root, *path))}: it {problem}")


def _not_storable(tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet; run one batch through the model before saving"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, with values on other ranks; gather it into a plain tensor first"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; convert it with .to_dense() first"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values; materialise the model before saving"
    if not tensor.is_complex() and tensor.dtype not in DTYPES:
        return f"has the type {tensor.dtype}, which safetensors cannot hold; convert it first"
    return None


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in chunks, identical for equal tensors.

    With the library's own writer a checksum needs a second read, and the order of metadata varies. Tensors are copied
    (from a device, or to make them contiguous) one at a time, so a large state is never held twice.
    """
    # Wide dtypes first keeps every tensor aligned; then by name, so that the order never varies.
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
    """Read a safetensors file into newly allocated memory on the CPU."""
    try:
        # Cloned because the library maps the file: a tensor would change with the file and could start at any
        # address, and some matrix kernels round differently at another alignment.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except Exception as error:  # the header may hold anything: unknown dtypes, impossible sizes
        raise CheckpointError(f"cannot read {path}: {error!s:.200}; use another checkpoint") from error
