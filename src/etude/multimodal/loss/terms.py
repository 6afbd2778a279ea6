"""Expected-value losses of all modalities as terms, and the checks of what they are made of."""

import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.model import HeadOutput
from etude.core.spelling import suggest
from etude.core.task import LossTerm, Terms
from etude.multimodal.loss.blocks import logits_sums, squared_error_sums
from etude.multimodal.loss.fused import LossPart, expected_value_sums
from etude.multimodal.loss.kinds import make_reconstruction
from etude.multimodal.loss.positions import Positions, choose_positions
from etude.multimodal.loss.reconstruction import HL_SIGMA, HUBER_DELTA, Reconstruction
from etude.multimodal.vocab import Modality, VocabSpec

logger = logging.getLogger("etude")

SHORT_NAMES = {"image": "img", "scalar": "sca", "spectrum": "spec"}
NAMES_TAKEN = {"ce": "the cross entropy", "total": "the weighted sum"}
"""Whose the names are that no modality's loss can have."""


def short_name(modality: str) -> str:
    """Return the name of a modality in names of metrics: img, sca and spec, or the name itself."""
    return SHORT_NAMES.get(modality, modality)


def make_reconstructions(
    vocab: VocabSpec,
    codebooks: Mapping[str, Any],
    kind: str | Mapping[str, str] = "mse",
    *,
    edges: Mapping[str, Any] | None = None,
    huber_delta: float = HUBER_DELTA,
    hl_sigma: float = HL_SIGMA,
) -> dict[str, Reconstruction]:
    """Return the loss of every modality that has a codebook, in the order of the vocabulary.

    Raises ConfigError for modalities that the vocabulary does not have, and DataError for codebooks of the wrong size
    or with values that are not finite. Waits for the device.
    """
    if not isinstance(kind, (str, Mapping)):
        raise ConfigError(f"kind is {kind!r}; give the name of a kind of loss, or names by modality")
    kinds = dict(kind) if isinstance(kind, Mapping) else {}
    for what, names in (("a codebook", codebooks), ("a kind of loss", kinds), ("edges", edges or {})):
        check_modalities(names, vocab, what)
    found: dict[str, Reconstruction] = {}
    for name, modality in vocab.modalities.items():
        if name not in codebooks:
            continue
        if (taken := NAMES_TAKEN.get(short_name(name))) or (short_name(name) in map(short_name, found)):
            raise ConfigError(
                f"the modality {name!r} would report loss_{short_name(name)}, which is {taken or 'another modality'}'s "
                f"already; rename the modality"
            )
        try:
            values = _tensor(codebooks[name])
            chosen = kind if isinstance(kind, str) else kinds.get(name, "mse")
            own = None if not edges or name not in edges else _tensor(edges[name])
            if values.dim() and len(values) != modality.size:
                raise DataError(f"there are {len(values)} values for its {modality.size} tokens")
            with torch.inference_mode(False):  # a later step may need what is made here for gradients
                found[name] = make_reconstruction(
                    chosen, values, edges=own, huber_delta=huber_delta, hl_sigma=hl_sigma
                )
        except DataError as error:
            raise DataError(f"the codebook of the modality {name!r} does not fit: {error}") from error
    return found


def _tensor(values: Any) -> Tensor:
    try:
        found = torch.as_tensor(values)
        return found if found.is_floating_point() or found.is_complex() else found.float()
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"a tensor or an array of numbers is needed, found a {type(values).__name__}") from error


def check_modalities(names: Mapping[str, Any] | Sequence[str], vocab: VocabSpec, what: str) -> None:
    """Raise ConfigError for a name that is no modality of the vocabulary."""
    for name in names:
        if name not in vocab.modalities:
            raise ConfigError(
                f"{what} is given for the modality {name!r}, which the vocabulary does not have"
                f"{suggest(str(name), vocab.modalities)}"
            )


def check_codebooks(
    reconstructions: Mapping[str, Reconstruction], weights: Mapping[str, float], kind: str | Mapping[str, str]
) -> None:
    """Raise ConfigError if a modality has a weight or a kind of loss, and no codebook; warn if none has one."""
    kinds = kind if isinstance(kind, Mapping) else {}
    for what, names in (("weight", [name for name in weights if weights[name]]), ("kind", kinds)):
        for name in names:
            if name not in reconstructions:
                raise ConfigError(
                    f"the modality {name!r} has a {what} and no codebook, so there is no value to compare; give its "
                    f"codebook, or leave the {what} out"
                )
    if not reconstructions:
        logger.warning("no modality has a codebook: the meaningful loss is cross entropy alone")


def warn_of_unused(reconstructions: Mapping[str, Reconstruction], *, huber_delta: float, hl_sigma: float) -> None:
    """Warn of settings for a kind of loss that no modality has."""
    kinds = {one.name for one in reconstructions.values()}
    for setting, value, default, kind in (
        ("huber_delta", huber_delta, HUBER_DELTA, "huber"),
        ("hl_sigma", hl_sigma, HL_SIGMA, "hl_gauss"),
    ):
        if value != default and kind not in kinds:
            logger.warning("%s is %s, but no modality has the kind %s: it changes nothing", setting, value, kind)


def check_output(predictions: HeadOutput | Tensor, vocab: VocabSpec) -> None:
    """Raise TrainingError if there are fewer logits than tokens. On a GPU a label beyond them would end the process."""
    if predictions.shape[-1] < vocab.vocab_size:
        raise TrainingError(
            f"the vocabulary has {vocab.vocab_size} tokens, the model's output only {predictions.shape[-1]}; "
            f"give the model vocab_size {vocab.vocab_size}"
        )


def meaningful_terms(
    predictions: HeadOutput | Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    reconstructions: Mapping[str, Reconstruction],
    weights: Mapping[str, float],
    *,
    sample_k: int | None,
    metrics: bool,
    generator: torch.Generator | None = None,
) -> Terms:
    """Return `loss_<short name>` of every modality with a reconstruction.

    With `metrics` there is also `mse_<short name>`, the squared error of the expected value, of losses of other kinds.

    `predictions` are logits (…, V), or hidden states and an output layer that is then applied in chunks; `targets` (…)
    are token ids. Modalities of weight 0 are left out unless `metrics` asks for them, and have no gradient.
    """
    check_output(predictions, vocab)
    names = [name for name in reconstructions if metrics or weights.get(name, 0.0)]
    if not names:
        return {}
    chosen = {name: choose_positions(targets, vocab.modalities[name], sample_k, generator) for name in names}
    losses: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for learns in (True, False):  # what is only measured needs no gradients
        some = [name for name in names if (weights.get(name, 0.0) != 0) is learns]
        parts = [_part(reconstructions[name], vocab.modalities[name], chosen[name]) for name in some]
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            if isinstance(predictions, HeadOutput):
                found, squared = expected_value_sums(predictions, parts)
            else:
                found = logits_sums(predictions, parts)
                squared = squared_error_sums(predictions, parts) if metrics else found
        losses |= zip(some, found, strict=True)
        squares |= zip(some, squared, strict=True)
    terms: Terms = {}
    for name in names:
        terms[f"loss_{short_name(name)}"] = LossTerm(losses[name], chosen[name].count, weights.get(name, 0.0))
        if metrics and reconstructions[name].name != "mse":
            terms[f"mse_{short_name(name)}"] = LossTerm(squares[name], chosen[name].count, 0.0)
    return terms


def _part(reconstruction: Reconstruction, modality: Modality, chosen: Positions) -> LossPart:
    return LossPart(reconstruction, modality.slice, chosen.rows, chosen.targets, chosen.row_weights)


def check_numbers(weights: Mapping[str, Any], sample_k: int | None) -> None:
    """Raise ConfigError for weights below 0 or not finite, and for a number of positions below 1."""
    for name, weight in weights.items():
        if not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
            raise ConfigError(f"the weight of the modality {name!r} is {weight!r}; weights are numbers of 0 or more")
    if sample_k is not None and (isinstance(sample_k, bool) or not isinstance(sample_k, int) or sample_k < 1):
        raise ConfigError(f"sample_k is {sample_k!r}; give a whole number of at least 1, or null for all positions")


def check_something_to_learn(use_ce: bool, weights: Mapping[str, float]) -> None:
    """Raise TrainingError if neither the cross entropy nor a modality has a part in the loss."""
    if not use_ce and not any(weights.values()):
        raise TrainingError(
            "there is nothing to learn from: use_ce is off, and no modality has a codebook and a weight above 0"
        )
