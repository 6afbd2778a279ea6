"""Arguments of a `Trainer` for several modalities, from which the meaningful loss is created."""

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
from etude.trainer.config import TrainerConfig

ARGUMENTS = ("vocab", "codebooks", *CODEBOOK_NAMES, "edges", "use_ce")
"""Further arguments of a `Trainer`: those of `MeaningfulLoss`, and codebooks as separate arguments."""


def make_task(
    loss: Any,
    task: Task | None,
    settings: Mapping[str, Any] | None,
    modalities: Mapping[str, Any],
    of: type,
) -> Task:
    """Return the task of a trainer: the one given, that of a loss, or the meaningful loss of a vocabulary.

    Raises ConfigError for contradictory arguments, TypeError for arguments that the class `of` does not have.
    """
    for name in modalities:
        if name not in ARGUMENTS:
            known = [*ARGUMENTS, *inspect.signature(of).parameters, *TrainerConfig.model_fields]
            raise TypeError(f"{of.__name__}() has no argument '{name}'{did_you_mean(name, known)}")
    options, vocab = read_settings(settings), modalities.get("vocab")
    other = "loss" if loss is not None else "task" if task is not None else None
    if vocab is None:
        given = [
            f"{name}=" for name, value in modalities.items() if value is not None and (name != "use_ce" or not value)
        ]
        if settings is not None and options.get("enabled", True):
            given.append("config.meaningful_loss")
        if given:
            remedy = f", or remove it to keep {other}=" if other else ""
            raise ConfigError(f"{given[0]} belongs to the meaningful loss; pass vocab= and codebooks= too{remedy}")
        return plain_task(loss, task)
    if other is not None:
        raise ConfigError(
            f"vocab= chooses the meaningful loss, and {other}= another one; keep one of them "
            f"(loss=MeaningfulLoss(vocab, codebooks, …) accepts every option)"
        )
    if "use_ce" in modalities:
        options["use_ce"] = modalities["use_ce"]
    codebooks = join_codebooks(modalities.get("codebooks"), modalities)
    return SupervisedTask(MeaningfulLoss(vocab, codebooks, edges=modalities.get("edges"), **options))
