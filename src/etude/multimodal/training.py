"""Arguments of a `Trainer` for several modalities: the meaningful loss is made from them."""

import inspect
from collections.abc import Mapping
from typing import Any

from etude.core import ConfigError, Task
from etude.core.spelling import did_you_mean
from etude.losses import SupervisedTask
from etude.multimodal.loss import MeaningfulLoss
from etude.multimodal.loss.combined import CODEBOOK_NAMES, join_codebooks
from etude.multimodal.loss.settings import read_settings
from etude.trainer.arguments import plain_task

ARGUMENTS = ("vocab", "codebooks", *CODEBOOK_NAMES, "edges", "use_ce")
"""Further arguments of a `Trainer`: those of `MeaningfulLoss`, and codebooks by names of their own."""


def make_task(
    loss: Any,
    task: Task | None,
    settings: Mapping[str, Any] | None,
    modalities: Mapping[str, Any],
    of: type,
) -> Task:
    """Return the task of a trainer: the one given, that of a loss, or the meaningful loss of a vocabulary.

    Raises ConfigError if what is given contradicts, TypeError for arguments that the class `of` does not have.
    """
    _refuse_unknown(modalities, of)
    vocab = modalities.get("vocab")
    if vocab is None:
        _refuse_without_vocabulary(settings, modalities, chosen=loss is not None or task is not None)
        return plain_task(loss, task)
    if loss is not None or task is not None:
        given = "loss" if loss is not None else "task"
        raise ConfigError(
            f"vocab= chooses the meaningful loss, and {given}= another one; keep one of them "
            f"(loss=MeaningfulLoss(vocab, codebooks, …) takes every option)"
        )
    options = read_settings(settings)
    if "use_ce" in modalities:
        options["use_ce"] = modalities["use_ce"]
    codebooks = join_codebooks(modalities.get("codebooks"), modalities)
    return SupervisedTask(MeaningfulLoss(vocab, codebooks, edges=modalities.get("edges"), **options))


def _refuse_unknown(modalities: Mapping[str, Any], of: type) -> None:
    for name in modalities:
        if name not in ARGUMENTS:
            known = [*ARGUMENTS, *inspect.signature(of).parameters]
            raise TypeError(f"{of.__name__}() has no argument '{name}'{did_you_mean(name, known)}")


def _refuse_without_vocabulary(
    settings: Mapping[str, Any] | None, modalities: Mapping[str, Any], *, chosen: bool
) -> None:
    values = [name for name in ("codebooks", *CODEBOOK_NAMES, "edges") if modalities.get(name) is not None]
    if values:
        raise ConfigError(
            f"{values[0]}= says what tokens stand for, but not which ones; give vocab= too "
            f"(build_vocab_spec makes one)"
        )
    if not modalities.get("use_ce", True):
        raise ConfigError("use_ce=False leaves the reconstruction of values, which needs vocab= and codebooks=")
    if settings is not None and read_settings(settings).get("enabled", True):
        raise ConfigError(
            "config.meaningful_loss and loss= or task= contradict: keep one, or set meaningful_loss.enabled to false"
            if chosen
            else "config.meaningful_loss needs the vocabulary and the codebooks: give the Trainer vocab= and codebooks="
        )
