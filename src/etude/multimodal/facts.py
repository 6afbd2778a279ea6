"""The data about a vocabulary and its codebooks in checkpoints, and comparing it with that of a run."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import CheckpointError, ConfigError
from etude.multimodal.vocab import VocabSpec


def describe_vocabulary(
    vocab: VocabSpec, codebooks: Mapping[str, Tensor], edges: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return the data about a vocabulary for checkpoints; `VocabSpec.from_dict(meta["vocab"])` restores it.

    >>> from etude.multimodal.vocab import build_vocab_spec
    >>> facts = describe_vocabulary(build_vocab_spec(v_scalar=2), {"scalar": torch.tensor([0.0, 1.0])})
    >>> facts["config"], facts["codebooks"]["scalar"]["shape"]
    ({'vocab_size': 8, 'base_image': None, 'base_scalar': 6, 'base_spectrum': None}, [2])
    """
    bases = {
        f"base_{name}": vocab.modalities[name].base if name in vocab.modalities else None
        for name in ("image", "scalar", "spectrum")
    }
    return {
        "vocab": vocab.to_dict(),
        "codebooks": {name: _print_of(values) for name, values in codebooks.items()},
        "edges": {name: _print_of(torch.as_tensor(values)) for name, values in edges.items()},
        "config": {"vocab_size": vocab.vocab_size, **bases},
    }


def check_vocabulary(saved: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise CheckpointError if a checkpoint's vocabulary or codebooks differ from those of a run.

    `saved` and `now` are the data of the checkpoint and of the run, including that of `describe_vocabulary`. Nothing
    is compared if one of them has no vocabulary, or if users store something else under these names. A codebook that
    only the checkpoint has is refused; bin edges are compared if both have them.
    """
    try:
        before, after = (VocabSpec.from_dict(facts["vocab"]) for facts in (saved, now))
    except (ConfigError, KeyError):
        return
    here, there = "the checkpoint", "this run"
    difference = (
        before.difference(after, here, there)
        or difference_of("codebook", saved.get("codebooks"), now.get("codebooks"), here, there)
        or difference_of("bin edges", saved.get("edges"), now.get("edges"), here, there, optional=True)
    )
    if difference:
        raise CheckpointError(
            f"{place} has another vocabulary, so its tokens would mean something else: {difference}; use the "
            "vocabulary of the checkpoint"
        )


def difference_of(what: str, one: Any, other: Any, here: str, there: str, *, optional: bool = False) -> str | None:
    """Return the first difference in codebooks or edges; those of `one` must be in `other` too."""
    before, after = (
        {name: seal for name, seal in (facts or {}).items() if isinstance(seal, Mapping) and "sha256" in seal}
        for facts in (one, other)
    )
    for name, seal in before.items():
        if name not in after and not optional:
            return f"the {what} of '{name}' is only in {here}"
        if name in after and seal != after[name]:
            old, new = (tuple(one["shape"]) for one in (seal, after[name]))
            how = f"shape {old} in {here}, {new} in {there}" if old != new else "other values"
            return f"the {what} of '{name}' has {how}"
    return None


def _print_of(values: Tensor) -> dict[str, Any]:
    """Return shape and checksum of a codebook, independent of its device and dtype."""
    plain = values.detach().to("cpu", torch.float32).contiguous()
    plain = plain[:, 0] if plain.dim() == 2 and plain.shape[1] == 1 else plain
    return {"shape": list(plain.shape), "sha256": hashlib.sha256(plain.numpy().tobytes()).hexdigest()}
