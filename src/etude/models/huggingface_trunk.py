"""Hugging Face models without their heads: hidden states, and what the architecture does with them.

Differences between architectures are found by running the model once on four tokens.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.core.batch import Batch
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import MAIN_KEYS, OTHER_NAMES, Forward, ModelCall
from etude.models.sampling import evaluating

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative differences that count as rounding; `HALF_TOLERANCE` for half precision."""
HALF_TOLERANCE = 3e-2


@runtime_checkable
class HuggingFaceModel(Protocol):
    """The common interface of transformers models."""

    base_model: nn.Module
    """The model without its head; the model itself if it has none."""
    config: Any

    def get_output_embeddings(self) -> Any:
        """Return the output layer, or None."""


class HuggingFaceTrunk:
    """Runs a transformers model without its head: the features are the base model's last hidden states."""

    def __init__(self, model: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{type(model).__name__} is an encoder-decoder and cannot be shared by heads; use its encoder"
            )
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._call = ModelCall(base_of(model))
        names = Forward.of(base_of(model)).names
        # A key-value cache costs memory, and a recomputed block would add its keys and values twice.
        self._always = {"use_cache": False} if "use_cache" in names else {}
        self._known = names | {key for name, key in OTHER_NAMES if name in names} | {*MAIN_KEYS, "document_ids"}
        reads_tokens = isinstance(model.get_input_embeddings(), nn.Embedding)
        self.has_output, self.sees_ahead = reads_tokens, True
        if reads_tokens and next(model.parameters()).device.type != "meta":
            self._find_out(model)

    def __call__(self, model: Any, batch: Batch) -> Any:
        """Return the hidden states (B, L, D) of a batch.

        Only keys of a mapping that the model names are passed: other keys, such as labels, would reach layers that
        ignore them or fail.
        """
        if isinstance(batch, Mapping):
            if batch.get("causal") is False and not self.sees_ahead:
                raise TrainingError(
                    f"{type(model).__name__} is causal and does not support causal: false; use an encoder, or "
                    "causal_transformer_lm"
                )
            batch = {key: value for key, value in batch.items() if key in self._known}
        return self._call(partial(base_of(model), **self._always), batch).last_hidden_state

    def _find_out(self, model: Any) -> None:
        """Run four tokens to find whether only the output layer follows the features, and if attention is causal."""
        device = next(model.parameters()).device
        ids = torch.arange(4, device=device)[None] % model.get_input_embeddings().num_embeddings
        other = ids.clone()
        other[0, -1] = 0
        devices = [device] if device.type == "cuda" else []
        with evaluating(model), torch.random.fork_rng(devices):
            hidden = self(model, _batch(ids))
            self.has_output = self._is_linear(model, ids, hidden)
            self.sees_ahead = not _same(hidden[:, 0], self(model, _batch(other))[:, 0])

    def _is_linear(self, model: Any, ids: Tensor, hidden: Tensor) -> bool:
        """Whether the logits are exactly the output layer applied to the features."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear) or layer.in_features != hidden.shape[-1]:
            return False
        expected = F.linear(hidden.to(layer.weight.dtype), layer.weight, layer.bias)
        if self.softcap is not None:
            expected = torch.tanh(expected / self.softcap) * self.softcap
        logits = model(**_batch(ids)).logits
        return logits.shape == expected.shape and _same(logits.to(expected.dtype), expected)


def base_of(model: Any) -> nn.Module:
    """Return the model without its head and without adapter wrappers."""
    while model.base_model is not model:
        model = model.base_model
    return model  # type: ignore[no-any-return]


def _batch(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _same(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCES.get(expected.dtype, HALF_TOLERANCE)
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max()))
