"""Parameters that are never trained: checkpoints hold their fingerprints, and a run saves them once, or not at all."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from etude.checkpoint.format import read_tensors, safetensors_pieces
from etude.checkpoint.saved_tensor import saved_tensors, whole
from etude.core.errors import CheckpointError, ConfigError
from etude.core.files import replacing
from etude.core.model import clean_name, unwrap
from etude.core.run_layout import FROZEN
from etude.distributed.shards import is_sharded, model_param

MARK = "sha256:"
"""Beginning of a fingerprint, which a checkpoint has in place of a tensor."""


def fingerprint(tensor: Tensor) -> str:
    """Return a checksum of the values, shape and dtype of a tensor. For a DTensor all ranks call this together.

    >>> fingerprint(torch.zeros(2))[:13], fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2, 1))
    ('sha256:21ff1b', False)
    """
    values = tensor.full_tensor() if is_sharded(tensor) else whole(tensor)
    dense = values.detach().cpu().contiguous().reshape(-1)
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(dense.view(torch.uint8).numpy().data)
    return MARK + found.hexdigest()


def frozen_names(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the names of the parameters that are not trained, and their sizes in bytes."""
    trained = {id(model_param(param)) for group in optimizer.param_groups for param in group["params"]}
    return {
        clean_name(name): param.nbytes
        for name, param in unwrap(model).named_parameters(remove_duplicate=False)
        if not param.requires_grad and id(param) not in trained and not is_lazy(param)
    }


class FrozenParams:
    """Replaces parameters that are not trained by fingerprints, and saves them once beside the checkpoints."""

    def __init__(self, names: Collection[str], root: Path, *, keep: bool) -> None:
        """Without `keep` the parameters themselves are not saved."""
        self.names, self.root, self.keep = list(names), root, keep
        self._recorded: dict[str, str] | None = None
        self._seen: dict[str, tuple[int, int, str]] = {}

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: Optimizer, root: Path, trainable_only: bool | None
    ) -> "FrozenParams | None":
        """Return what `trainable_only` asks for; by default parameters are saved once if most are frozen.

        Those that are divided among ranks are in every checkpoint.
        """
        names = frozen_names(model, optimizer)
        if not names or trainable_only is False:
            return None
        if any(is_sharded(param) for param in model.parameters()):
            if trainable_only:
                raise ConfigError(
                    "training.trainable_only is true, but parameters that are divided among processes are always "
                    "saved; remove it"
                )
            return None
        size = sum(param.nbytes for param in model.parameters() if not is_lazy(param))
        if trainable_only is None and 2 * sum(names.values()) <= size:
            return None
        return cls(names, root, keep=trainable_only is None)

    def replaced(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the model with fingerprints of what has not changed since they were recorded."""
        found = {name: self._fingerprint(name, model_state[name]) for name in self.names if name in model_state}
        if self._recorded is None:
            self._recorded = self._save(model_state, found) if self.keep else found
        same = {name: mark for name, mark in found.items() if self._recorded.get(name) == mark}
        return {**model_state, **same}

    def _save(self, model_state: Mapping[str, Any], found: dict[str, str]) -> dict[str, str]:
        """Write the file, unless the checkpoints here already have one; return the fingerprints of what it holds."""
        path = self.root / FROZEN
        if path.exists() and any(self.root.glob("step-*")):
            with safe_open(path, "pt") as file:
                recorded: dict[str, str] = json.loads(file.metadata().get("fingerprints", "{}"))
            return recorded
        self.root.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            tensors = {name: model_state[name] for name in found}
            for piece in safetensors_pieces(tensors, {"fingerprints": json.dumps(found)}):
                file.write(piece)
        return found

    def _fingerprint(self, name: str, tensor: Tensor) -> str:
        address, version, mark = self._seen.get(name, (0, -1, ""))
        if (address, version) != (tensor.data_ptr(), tensor._version):
            mark = fingerprint(tensor)
            self._seen[name] = tensor.data_ptr(), tensor._version, mark
        return mark


def with_frozen(model_state: dict[str, Any], root: Path, *, lazy: bool = False) -> dict[str, Any]:
    """Return the state of a model with the parameters that were saved once, if they are still there and the same.

    With `lazy` they are read again when they are needed.
    """
    marks = {name: value for name, value in model_state.items() if _is_mark(value)}
    if not marks or not (root / FROZEN).is_file():
        return model_state
    tensors = saved_tensors([root / FROZEN]) if lazy else read_tensors(root / FROZEN)
    return model_state | {
        name: tensors[name] for name, mark in marks.items() if name in tensors and fingerprint(tensors[name]) == mark
    }


def with_own(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with the model's own tensors where it has fingerprints.

    Raises CheckpointError if they have other values.
    """
    found = dict(saved)
    for name, mark in saved.items():
        if _is_mark(mark) and isinstance(own.get(name), Tensor):
            if fingerprint(own[name]) != mark:
                raise CheckpointError(
                    f"{name} is frozen, so the checkpoint has only its fingerprint, which is not that of this model; "
                    "start from the same base model"
                )
            found[name] = own[name]
    return found


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(MARK)
