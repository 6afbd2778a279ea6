"""A model's weights as one safetensors file: atomic, and the same bytes for the same weights."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from etude.checkpoint import clean_state_dict, pack
from etude.checkpoint.format import safetensors_pieces
from etude.core import CheckpointError
from etude.core.files import replacing


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
        with replacing(path) as file:
            for piece in safetensors_pieces(tensors, {**tied, **metadata}):
                file.write(piece)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
