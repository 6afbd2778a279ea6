"""What a rank writes of a checkpoint: prepared from trees of tensors before anything is written."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from platform import python_version
from typing import Any

import torch
from torch import Tensor

from etude.checkpoint.format import pack, safetensors_pieces
from etude.core.errors import CheckpointError
from etude.distributed import World
from etude.distributed.shards import Block, block_of, has_shards, is_owner, is_sharded, local_of
from etude.lazy import package_version

MANIFEST, META, STATE, CONFIG = "manifest.json", "meta.json", "state.json", "run-config.yaml"
"""The small files. Not `config.yaml`: a folder with that file is a run folder."""

PARTS = ("model", "state")
"""Tensors are in `PART.safetensors`, or in one file per rank: `PART-RRRRR-of-NNNNN.safetensors`."""

FORMAT, SHARDED = 1, 2
"""Versions of the layout: written by one rank, or by all of them. Later ones are refused."""

SHARDING = "DCP_SHARDING_INFO"
"""Where torch.distributed.checkpoint looks for the offsets of shards in the metadata of a safetensors file."""

_SHARD = re.compile(r"(model|state)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def tensor_file(part: str, rank: int = 0, size: int = 1) -> str:
    """Return the name of the file that a rank writes; files are counted from 1, as other libraries do.

    >>> tensor_file("model"), tensor_file("model", 0, 2)
    ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    return f"{part}.safetensors" if size == 1 else f"{part}-{rank + 1:05d}-of-{size:05d}.safetensors"


def num_shards(names: Mapping[str, Any]) -> int:
    """Return by how many ranks the files of a checkpoint were written: the largest number that their names have."""
    return max((int(match[3]) for match in map(_SHARD.fullmatch, names) if match), default=1)


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of one rank."""

    tensors: dict[str, dict[str, Tensor]]
    """Tensors by name, by file."""
    metadata: dict[str, dict[str, str]]
    """What the headers of these files hold besides, by file."""
    texts: dict[str, bytes]
    """The small files, only on rank 0."""
    is_sharded: bool
    """Whether all ranks write; otherwise rank 0 writes alone."""

    @classmethod
    def of(
        cls,
        model_state: Mapping[str, Any],
        state: Any,
        meta: Mapping[str, Any],
        config: str = "",
        world: World | None = None,
    ) -> "Contents":
        """Return what this rank writes. All ranks of `world` call this together.

        Raises CheckpointError on all of them if a tree holds an unsupported object.
        """
        world = World() if world is None else world
        is_sharded = has_shards(model_state) or has_shards(state)
        is_sharded = world.size > 1 and bool(world.host_max([int(is_sharded)])[0])

        def collected() -> Contents:
            rank, size = (world.rank, world.size) if is_sharded else (0, 1)
            packed = {"model": pack(dict(model_state), "model"), "state": pack(state, "state")}
            tensors, metadata = dict[str, dict[str, Tensor]](), dict[str, dict[str, str]]()
            for part in PARTS:
                name, found = tensor_file(part, rank, size), packed[part][0]
                if not is_sharded:
                    tensors[name], metadata[name] = {key: _only_local(key, one) for key, one in found.items()}, {}
                else:
                    tensors[name], info = _own(found, world)
                    metadata[name] = {SHARDING: json.dumps(info)}
            version = SHARDED if is_sharded else FORMAT
            structure = {"format": version, **{part: packed[part][1] for part in PARTS}}
            texts = {
                STATE: json.dumps(structure, separators=(",", ":"), allow_nan=False).encode(),
                META: _render_meta({"format": version, **meta}, model_state),
                **({CONFIG: config.encode("utf-8", "backslashreplace")} if config else {}),
            }
            return cls(tensors, metadata, texts if world.is_main else {}, is_sharded)

        found = world.attempt(collected, here=world.is_main or is_sharded)
        return cls({}, {}, {}, is_sharded) if found is None else found

    def copied(self, copy: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> "Contents":
        """Return the same with copies of the tensors, made by a function of all of them."""
        tensors = copy({f"{file}/{name}": one for file, found in self.tensors.items() for name, one in found.items()})
        return replace(
            self,
            tensors={
                file: {name: tensors[f"{file}/{name}"] for name in found} for file, found in self.tensors.items()
            },
        )

    def pieces(self, name: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a file of tensors."""
        return safetensors_pieces(self.tensors[name], self.metadata[name])


def _only_local(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor that one rank holds whole."""
    if is_sharded(tensor) and block_of(tensor) != Block.whole(tuple(tensor.shape)):
        raise CheckpointError(
            f"cannot save {name}: it is a DTensor, with values on other ranks; all ranks must save together, or gather "
            "it into a plain tensor first"
        )
    return local_of(tensor)


def _own(tensors: Mapping[str, Tensor], world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what this rank writes of tensors: its blocks, and on rank 0 all plain tensors; and where these belong."""
    own, info = {}, {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            if not is_owner(tensor):
                continue
            block = block_of(tensor)
        elif world.is_main:
            block = Block.whole(tuple(tensor.shape))
        else:
            continue
        own[name] = local_of(tensor)
        info[name] = {"saved_offsets": list(block.offset), "shape": list(tensor.shape)}
    return own, info


def _render_meta(meta: Mapping[str, Any], model_state: Mapping[str, Any]) -> bytes:
    shapes = {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in model_state.items()
        if isinstance(value, Tensor)
    }
    content = {
        **meta,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "etude": package_version(),
        "torch": torch.__version__,
        "python": python_version(),
        "parameters": shapes,
    }
    return (json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Return `value` as readable standard JSON; objects without a JSON form become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
