"""Models that ship with the library."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.models.features import Features as Features, feature_dim as feature_dim
    from etude.models.huggingface import (
        huggingface_causal_lm as huggingface_causal_lm,
        huggingface_classifier as huggingface_classifier,
    )
    from etude.models.lenet5 import LeNet5 as LeNet5
    from etude.models.mlp import MLP as MLP
    from etude.models.text_classifier import TextClassifier as TextClassifier
    from etude.models.transformer import CausalTransformerLM as CausalTransformerLM


__getattr__ = load_late(__name__, __file__)
