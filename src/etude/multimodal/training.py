"""What a `Trainer` knows of modalities: the meaningful loss made from them, and how checkpoints remember them."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from etude.core import CheckpointError, ConfigError, Task
from etude.core.spelling import did_you_mean
from etude.losses import SupervisedTask, as_strategy
from etude.multimodal.loss import MeaningfulLoss
from etude.multimodal.loss.combined_loss import CODEBOOK_NAMES, join_codebooks
from etude.multimodal.vocab import VocabSpec
from etude.trainer.arguments import as_loss, check_task
from etude.trainer.config import MeaningfulLossConfig

Values = Tensor | np.ndarray[Any, Any]


class Modalities(TypedDict, total=False):
    """Arguments of `Trainer` for models over tokens of several modalities."""

    vocab: VocabSpec | None
    """Which token ids belong to which modality; chooses the loss `MeaningfulLoss`."""
    codebooks: Mapping[str, Values] | None
    """The value of every token of a modality, by its name: (V, D), or (V,) for scalars."""
    image_codebook: Values | None
    """The codebook of the modality `image`."""
    spectrum_codebook: Values | None
    """The codebook of the modality `spectrum`."""
    scalar_centers: Values | None
    """The codebook of the modality `scalar`: the centres of its bins."""
    edges: Mapping[str, Values] | None
    """The edges of the bins of a scalar modality, by its name, for `hl_gauss`: (V + 1,)."""
    use_ce: bool
    """Whether cross entropy is part of the loss; overrides `config.meaningful_loss.use_ce`."""


def make_task(
    loss: Any,
    task: Task | None,
    settings: MeaningfulLossConfig | None,
    modalities: Modalities,
    of: type,
    loaders: Sequence[Any] = (),
) -> Task:
    """Return the task of a trainer: the one given, that of a loss, or the meaningful loss of a vocabulary.

    Raises ConfigError if what is given contradicts, TypeError for arguments that the class `of` does not have.
    """
    _refuse_unknown(modalities, of)
    check_task(task)
    if loss is not None and task is not None:
        raise ConfigError("loss= and task= both say what is learned; keep one of them")
    if any(isinstance(one, VocabSpec) for one in loaders):
        raise ConfigError(
            "a vocabulary is given by name: write vocab=vocab; by position come model, train_loader and val_loader"
        )
    vocab = modalities.get("vocab")
    if vocab is None:
        _refuse_without_vocabulary(settings, modalities, chosen=loss is not None or task is not None)
        return task if task is not None else SupervisedTask(as_strategy(as_loss(loss)))
    if loss is not None or task is not None:
        given = "loss" if loss is not None else "task"
        raise ConfigError(
            f"vocab= chooses the meaningful loss, and {given}= another one; keep one of them "
            f"(loss=MeaningfulLoss(vocab, codebooks, …) takes every option)"
        )
    if not isinstance(vocab, VocabSpec):
        raise ConfigError(f"vocab must be a VocabSpec, as build_vocab_spec makes, found {type(vocab).__name__}")
    options = loss_options(settings or MeaningfulLossConfig())
    options["use_ce"] = modalities.get("use_ce", options["use_ce"])
    codebooks = join_codebooks(modalities.get("codebooks"), modalities)
    return SupervisedTask(MeaningfulLoss(vocab, codebooks, edges=modalities.get("edges"), **options))


def loss_options(settings: MeaningfulLossConfig) -> dict[str, Any]:
    """Return the settings as arguments of `MeaningfulLoss`."""
    return {
        "weights": settings.all_weights,
        "weight": settings.weight,
        "kind": settings.kind,
        "huber_delta": settings.huber_delta,
        "hl_sigma": settings.hl_sigma,
        "sample_k": settings.sample_k_per_modality,
        "use_ce": settings.use_ce,
        "enabled": settings.enabled,
    }


def _refuse_unknown(modalities: Modalities, of: type) -> None:
    for name in modalities:
        if name not in Modalities.__annotations__:
            known = [*Modalities.__annotations__, *inspect.signature(of).parameters]
            raise TypeError(f"{of.__name__}() has no argument '{name}'{did_you_mean(name, known)}")


def _refuse_without_vocabulary(
    settings: MeaningfulLossConfig | None, modalities: Modalities, *, chosen: bool
) -> None:
    values = [name for name in ("codebooks", *CODEBOOK_NAMES, "edges") if modalities.get(name) is not None]
    if values:
        raise ConfigError(
            f"{values[0]}= says what tokens stand for, but not which ones; give vocab= too "
            f"(build_vocab_spec makes one)"
        )
    if not modalities.get("use_ce", True):
        raise ConfigError("use_ce=False leaves the reconstruction of values, which needs vocab= and codebooks=")
    if settings is not None and settings.enabled:
        raise ConfigError(
            "config.meaningful_loss and loss= or task= contradict: keep one, or set meaningful_loss.enabled to false"
            if chosen
            else "config.meaningful_loss needs the vocabulary and the codebooks: give the Trainer vocab= and codebooks="
        )


# ------------------------------------------------------------------------------------------------ checkpoints


def vocabulary_of(task: Task) -> dict[str, Any]:
    """Return what a checkpoint keeps of the vocabulary of a task; nothing if its loss has none."""
    strategy = task.strategy if isinstance(task, SupervisedTask) else None
    if not isinstance(strategy, MeaningfulLoss):
        return {}
    parts = strategy.reconstructions
    facts = describe_vocabulary(strategy.vocab, {name: one.values for name, one in parts.items()})
    facts["config"]["loss_config"] = {
        "enabled": bool(parts),
        "use_ce": strategy.use_ce,
        "sample_k": strategy.sample_k,
        "weights": dict(strategy.weights),
        "kind": {name: one.name for name, one in parts.items()},
    }
    return facts


def describe_vocabulary(vocab: VocabSpec, codebooks: Mapping[str, Tensor]) -> dict[str, Any]:
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
        "config": {"vocab_size": vocab.vocab_size, **bases},
    }


def check_vocabulary(saved: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise CheckpointError if a checkpoint's vocabulary or codebooks are others than those of a run.

    `saved` and `now` are the facts of a checkpoint then and now, with what `describe_vocabulary` returned among them.
    Where one of them knows of no vocabulary, or of no codebook for a modality, there is nothing to compare; nor where
    users keep something else under these names.
    """
    before, after = (_vocabulary_in(facts) for facts in (saved, now))
    if before is None or after is None:
        return
    difference = before.difference(after, "the checkpoint", "this run") or _codebook_difference(
        _prints_in(saved.get("codebooks")), _prints_in(now.get("codebooks"))
    )
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


def _codebook_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in before:
        if name not in now:
            return f"the codebook of '{name}' is only in the checkpoint"
        if before[name] != now[name]:
            old, new = (tuple(one[name]["shape"]) for one in (before, now))
            return f"the codebook of '{name}' has " + (
                f"shape {old} in the checkpoint, {new} in this run" if old != new else "other values"
            )
    return None


def _print_of(values: Tensor) -> dict[str, Any]:
    """Return shape and checksum of a codebook; they do not depend on its device and number format."""
    plain = values.detach().to("cpu", torch.float32).contiguous()
    plain = plain[:, 0] if plain.dim() == 2 and plain.shape[1] == 1 else plain
    return {"shape": list(plain.shape), "sha256": hashlib.sha256(plain.numpy().tobytes()).hexdigest()}
