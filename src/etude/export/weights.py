"""Plain weights: one safetensors file that `load_state_dict` accepts."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn, strided

from etude.checkpoint.format import DTYPES, safetensors_pieces
from etude.core import ConfigError, RunFolderError
from etude.core.files import replacing
from etude.core.model import clean_state_dict, is_divided


def save_weights(state: Mapping[str, Any] | nn.Module, path: str | Path) -> Path:
    """Write the state of a model, so that `model.load_state_dict(load_file(path))` restores it.

    Tied weights are written under each of their names, as other libraries expect: a model that ties them accepts that.
    Tensors are copied, or read from a checkpoint, one at a time. Raises ConfigError for state that is not a tensor,
    and RunFolderError if the file cannot be written.
    """
    state = clean_state_dict(state) if isinstance(state, nn.Module) else state
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{name} is a {type(value).__name__}; plain weights are tensors, so it cannot be saved")
        if is_divided(value):
            raise ConfigError(f"{name} is divided over processes; save a checkpoint, and `etude export` it")
        if value.layout is not strided:
            raise ConfigError(f"{name} is a sparse tensor, which safetensors does not hold")
        if value.dtype not in DTYPES:
            raise ConfigError(f"{name} has the type {value.dtype}, which safetensors does not hold")
    with writing_into(Path(path).parent), replacing(path) as file:
        for piece in safetensors_pieces(state):
            file.write(piece)
    return Path(path)


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Create a folder to write into; raise RunFolderError if that, or writing, fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"cannot write into {folder}: {error.strerror or error}; choose another folder, or free some space"
        ) from error
