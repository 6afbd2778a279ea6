"""A model's weights as one safetensors file: atomic, and the same bytes for the same weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.checkpoint import clean_state_dict, pack
from etude.checkpoint.tensorfile import DTYPES
from etude.core import CheckpointError
from etude.monitor.files import replacing


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a model's state; tied weights are stored once, and the metadata say under which name.

    `safetensors.torch.load_model(model, path)` reads it. Raises CheckpointError if it cannot be written; an earlier
    file stays as it was.
    """
    state = {name: value for name, value in clean_state_dict(model).items() if isinstance(value, Tensor)}
    tensors, structure = pack(state, "model")
    stored_as = {name: next(iter(node.values())) for name, node in structure["dict"].items()}
    tied = {name: first for name, first in stored_as.items() if name != first}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _write(temporary, tensors, {"format": "pt", **tied, **metadata})
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    # The library's writer puts metadata in an order that varies from call to call.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # wide elements stay aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
