"""What checkpoints keep of a vocabulary and its codebooks, and whether those of a run are the same."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import CheckpointError, ConfigError
from etude.multimodal.vocab import VocabSpec


def describe_vocabulary(
    vocab: VocabSpec, codebooks: Mapping[str, Tensor], edges: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return a vocabulary as checkpoints keep it: `VocabSpec.from_dict(meta["vocab"])` makes it again.

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

    `saved` and `now` are the facts of the checkpoint and of the run, those of `describe_vocabulary` among them.
    Where one of them knows of no vocabulary there is nothing to compare, nor where users keep something else under
    these names. A codebook that only the checkpoint has is refused; edges of bins are compared where both have them.
    """
    before, after = (_vocabulary_in(facts) for facts in (saved, now))
    if before is None or after is None:
        return
    difference = before.difference(after, "the checkpoint", "this run") or next(_differences(saved, now), None)
    if difference:
        raise CheckpointError(
            f"{place} is of another vocabulary, so that its tokens would mean something else: {difference}; "
            f"use that of the checkpoint"
        )


def _vocabulary_in(facts: Mapping[str, Any]) -> VocabSpec | None:
    try:
        return VocabSpec.from_dict(facts.get("vocab"))  # type: ignore[arg-type]
    except ConfigError:
        return None


def _prints_in(facts: Any) -> dict[str, Any]:
    """Return those of the facts that `_print_of` made."""
    found = facts.items() if isinstance(facts, Mapping) else ()
    return {name: one for name, one in found if isinstance(one, Mapping) and one.keys() == {"shape", "sha256"}}


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, what, verb in (("codebooks", "the codebook", "has"), ("edges", "the bin edges", "have")):
        before, after = _prints_in(saved.get(key)), _prints_in(now.get(key))
        for name in before:
            if name not in after:
                if key == "codebooks":
                    yield f"{what} of '{name}' is only in the checkpoint"
            elif before[name] != after[name]:
                old, new = (tuple(one[name]["shape"]) for one in (before, after))
                yield f"{what} of '{name}' {verb} " + (
                    f"shape {old} in the checkpoint, {new} in this run" if old != new else "other values"
                )


def _print_of(values: Tensor) -> dict[str, Any]:
    """Return shape and checksum of a codebook; they do not depend on its device and number format."""
    plain = values.detach().to("cpu", torch.float32).contiguous()
    plain = plain[:, 0] if plain.dim() == 2 and plain.shape[1] == 1 else plain
    return {"shape": list(plain.shape), "sha256": hashlib.sha256(plain.numpy().tobytes()).hexdigest()}
