"""The meaningful loss as a strategy: next-token cross entropy, and expected values of every modality."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from pydantic_core import core_schema
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.model import ModelCall, unwrap
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, perplexity
from etude.losses.fused_head import FusedHead, NamesItsHead
from etude.losses.language import LanguageModelingLoss, is_encoder_decoder, token_predictions
from etude.losses.strategies import Smoothing
from etude.multimodal.codebooks import load_codebook, load_npz_key
from etude.multimodal.folder import Modalities, check_vocabulary, describe_vocabulary
from etude.multimodal.loss.reconstruction import HL_SIGMA, HUBER_DELTA, KindName
from etude.multimodal.loss.terms import (
    check_modalities,
    check_output,
    count_positions,
    make_reconstructions,
    meaningful_terms,
    short_name,
)
from etude.multimodal.vocab import VocabSpec

logger = logging.getLogger("etude")

MEANINGFUL = "meaningful"
"""The name of the loss in config files."""
ALIASES = {"sample_k_per_modality": "sample_k"}
"""Aliases of settings."""
NO_VOCABULARY = (
    "the meaningful loss needs a vocabulary, and neither the data nor a `vocab:` section has one; "
    "add `vocab: {image: 2048, …}`, the number of tokens of each modality"
)


class _File:
    """Marks values that a config file gives as the path of a file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.str_schema()


Values = Annotated[Any, _File()]
"""A tensor, an array or a list of numbers, or the path of a file (.safetensors, .npz, .npy, .joblib)."""
Weight = Annotated[float, Ge(0)]


@register("loss", MEANINGFUL, aliases=ALIASES, provided=("vocab",))
class MeaningfulLoss(LanguageModelingLoss):
    """Cross entropy with the next token, and the loss of the expected value for each modality with a codebook.

    The terms are `loss_ce` and `loss_<modality>`, with `loss_img`, `loss_sca` and `loss_spec` for image, scalar and
    spectrum; their weighted sum is `loss_total`, and `loss` too. With metrics there are `accuracy`, `perplexity` and
    `rmse_<modality>`, the error of the expected value for any kind of loss.

    A position belongs to the modality of its next token: special tokens such as PAD and MISS belong to none, and PAD
    does not count in the cross entropy either. While gradients are computed, up to `sample_k` positions of each
    modality are sampled in every batch; without gradients all positions are used.
    """

    def __init__(
        self,
        vocab: VocabSpec | Modalities | None = None,
        codebooks: Mapping[str, Values] | None = None,
        *,
        edges: Mapping[str, Any] | None = None,
        enabled: bool = True,
        sample_k: Annotated[int, Ge(1)] | None = 4096,
        weight: Weight = 0.1,
        weights: Mapping[str, Weight] | None = None,
        kind: KindName | Mapping[str, KindName] = "mse",
        huber_delta: Annotated[float, Gt(0)] = HUBER_DELTA,
        hl_sigma: Annotated[float, Gt(0)] = HL_SIGMA,
        use_ce: bool = True,
        shift: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: Smoothing = 0.0,
        fused_head: bool | str | None = None,
    ) -> None:
        """Set a vocabulary and its codebooks. These arguments are all settings of the loss, also in files.

        Args:
            vocab: which tokens belong to which modality; `Modalities`, as returned by `read_modalities`, include
                codebooks and edges.
            codebooks: the values of a modality's tokens, (V,) or (V, D), or the path of a file with them; a
                modality without them has only cross entropy.
            edges: edges of the bins of scalars, for hl_gauss: (V + 1,).
            enabled: False leaves only cross entropy.
            sample_k: positions of each modality that are drawn per batch; None uses all of them.
            weight: the weight of the loss of every modality that is not in `weights`.
            weights: weights by modality.
            kind: mse, huber, wasserstein or hl_gauss, for all modalities or by name (mse for those not named).
            huber_delta: where Huber's loss becomes linear, in the units of the values.
            hl_sigma: width of HL-Gauss's Gaussian, in bins.
            use_ce: train the cross entropy too; otherwise it is only evaluated.
            shift: as for `language_modeling`.
            ignore_index: the label of positions that do not count.
            label_smoothing: of the cross entropy.
            fused_head: run the model without its output layer, which the loss applies in chunks: True, False, or the
                layer's name; None does so for models that report their output layer and return its output unchanged.
        """
        super().__init__(shift, ignore_index, label_smoothing, False if fused_head is None else fused_head)
        data = vocab if isinstance(vocab, Modalities) else None
        vocab = data.vocab if data is not None else vocab
        if not isinstance(vocab, VocabSpec):
            found = f"vocab must be a VocabSpec (see build_vocab_spec), found {type(vocab).__name__}"
            raise ConfigError(NO_VOCABULARY if vocab is None else found)
        self.vocab = vocab
        self.use_ce = use_ce or not enabled
        self.sample_k = sample_k
        check_modalities(weights or {}, vocab, "a weight")
        own = {name: _read_codebook(values) for name, values in (codebooks or {}).items()}
        known = {**({} if data is None else data.codebooks), **own} if enabled else {}
        # The edges of the data belong to its own centres, and are dropped with them.
        of_data = {} if data is None else {name: one for name, one in data.edges.items() if name not in own}
        edges = {**of_data, **(edges or {})}
        self.reconstructions = make_reconstructions(
            vocab, known, kind, edges=edges, huber_delta=huber_delta, hl_sigma=hl_sigma
        )
        self._edges = {name: edges[name] for name in self.reconstructions if name in edges}
        self.weights = {name: (weights or {}).get(name, weight) for name in self.reconstructions}
        self._check_numbers()
        if enabled:
            self._check_kinds(weights or {}, kind, huber_delta, hl_sigma)
        self._chooses_head = fused_head is None
        self._tried: nn.Module | None = None

    def _check_numbers(self) -> None:
        for name, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise ConfigError(f"the weight of the modality {name!r} is {weight!r}; it must be at least 0")
        if self.sample_k is not None and self.sample_k < 1:
            raise ConfigError(f"sample_k is {self.sample_k!r}; it must be an integer of at least 1, or None for all")
        for one in self.vocab.modalities.values():
            if one.base <= self.ignore_index < one.stop:
                raise ConfigError(
                    f"ignore_index {self.ignore_index} is a token of the modality {one.name!r}; choose a label "
                    f"outside every modality, such as {IGNORE_INDEX}"
                )
        if not self.use_ce and not any(self.weights.values()):
            raise TrainingError(
                "nothing would be trained: use_ce is off, and no modality has a codebook and a weight above 0; "
                "change one of these"
            )

    def _check_kinds(
        self, weights: Mapping[str, float], kind: str | Mapping[str, str], huber_delta: float, hl_sigma: float
    ) -> None:
        """Raise ConfigError if a modality has a weight or a kind but no codebook; warn of unused settings."""
        kinds = kind if isinstance(kind, Mapping) else {}
        for what, names in (("weight", [name for name in weights if weights[name]]), ("kind", kinds)):
            if without := [name for name in names if name not in self.reconstructions]:
                raise ConfigError(
                    f"the modality {without[0]!r} has a {what} but no codebook; pass its codebook, or remove the "
                    f"{what}"
                )
        if not self.reconstructions:
            logger.warning("no modality has a codebook: the meaningful loss is only cross entropy")
        used = {one.name for one in self.reconstructions.values()}
        for setting, is_default, name in (
            ("huber_delta", huber_delta == HUBER_DELTA, "huber"),
            ("hl_sigma", hl_sigma == HL_SIGMA, "hl_gauss"),
        ):
            if not is_default and name not in used:
                logger.warning("%s is set, but no modality has the kind %s: it has no effect", setting, name)

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model, without its output layer if possible."""
        if self._chooses_head and self._tried is not unwrap(model):
            self._tried = unwrap(model)
            self._head = self._own_head(call, batch, self._tried)
            self.fused_head = self._head is not None
        return super().run(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of cross entropy and modalities, and with `metrics` those of weight 0."""
        training = torch.is_grad_enabled()
        targets, _ = self._targets(batch, masked=not is_encoder_decoder(output))
        predictions = token_predictions(output, targets)
        check_output(predictions, self.vocab)
        self._check_ids(targets)
        terms: Terms = {}
        if self.use_ce or not training:
            for name, term in self._token_terms(predictions, targets, None, metrics).items():
                weight = term.weight if self.use_ce else 0.0
                terms["loss_ce" if name == "loss" else name] = LossTerm(term.sum, term.count, weight)
        return terms | meaningful_terms(
            predictions,
            targets,
            self.vocab,
            self.reconstructions,
            self.weights,
            sample_k=self.sample_k if training else None,
            metrics=metrics,
        )

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of tokens to predict, in total and per modality."""
        targets, _ = self._targets(batch, masked=True)
        counts: dict[str, Tensor | float] = {}
        if self.use_ce:
            counts["loss_ce"] = targets.ne(self.ignore_index).sum()
        for name, weight in self.weights.items():
            if weight:
                counts[f"loss_{short_name(name)}"] = count_positions(targets, self.vocab.modalities[name])
        return counts

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the weighted sum, the perplexity and the root mean squared errors."""
        weights = {f"loss_{short_name(name)}": weight for name, weight in self.weights.items()}
        weights["loss_ce"] = 1.0 if self.use_ce else 0.0
        # A modality without positions has no mean, and is not part of the loss.
        known = {name: mean for name, mean in means.items() if weights.get(name) and not math.isnan(mean)}
        total = sum(weights[name] * mean for name, mean in known.items()) if known else math.nan
        found = {"loss": total, "loss_total": total}
        if (nats := self.cross_entropy(means)) is not None:
            found["perplexity"] = perplexity(nats)
        for name, reconstruction in self.reconstructions.items():
            squared = means.get(f"{'loss' if reconstruction.name == 'mse' else 'mse'}_{short_name(name)}")
            if squared is not None:
                found[f"rmse_{short_name(name)}"] = max(squared, 0.0) ** 0.5
        return found

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the cross entropy of the tokens without label smoothing, if known."""
        return means.get("nll", None if self.label_smoothing else means.get("loss_ce"))

    def facts(self) -> dict[str, Any]:
        """Return the vocabulary, the checksums of codebooks and bins, and the settings."""
        codebooks = {name: one.values for name, one in self.reconstructions.items()}
        facts = describe_vocabulary(self.vocab, codebooks, self._edges)
        facts["config"]["loss_config"] = {
            "enabled": bool(self.reconstructions),
            "use_ce": self.use_ce,
            "sample_k": self.sample_k,
            "weights": dict(self.weights),
            "kind": {name: one.name for name, one in self.reconstructions.items()},
        }
        return facts

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if a checkpoint has another vocabulary or other codebooks."""
        check_vocabulary(saved, self.facts(), place)

    def _targets(self, batch: Batch, *, masked: bool) -> tuple[Tensor, int | None]:
        labels, _ = super()._targets(batch, masked=masked)
        return labels.masked_fill(labels == self.vocab.pad_id, self.ignore_index), None

    def _check_ids(self, targets: Tensor) -> None:
        """Raise DataError for ids beyond the vocabulary, which a wider output layer would learn (not on a GPU)."""
        if targets.is_cpu and targets.numel() and int(targets.max()) >= self.vocab.vocab_size:
            raise DataError(
                f"there is a token {int(targets.max())}, but the vocabulary has {self.vocab.vocab_size} tokens; use "
                "the vocabulary of the data"
            )

    def _own_head(self, call: ModelCall, batch: Batch, model: nn.Module) -> FusedHead | None:
        """Return the model's output layer, or None if the model needs it itself."""
        if not isinstance(model, NamesItsHead):
            return None
        try:
            head = FusedHead(model)
            head.check(call, batch)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # optional here: a model that cannot run without the layer runs unchanged
            logger.debug("the output layer is not fused into the loss: %s", error)
            return None
        return head


def _read_codebook(values: Any) -> Any:
    """Return the values of a modality's tokens, loaded from a file if they are a path."""
    if not isinstance(values, (str, Path)):
        return values
    return load_npz_key(values) if str(values).endswith(".npz") else load_codebook(values)
