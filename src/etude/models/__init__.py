"""Models that ship with the library."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.models.features import Features, feature_dim
    from etude.models.huggingface import huggingface_causal_lm, huggingface_classifier
    from etude.models.lenet5 import LeNet5
    from etude.models.mlp import MLP
    from etude.models.text_classifier import TextClassifier
    from etude.models.transformer import CausalTransformerLM

__all__ = [
    "MLP",
    "CausalTransformerLM",
    "Features",
    "LeNet5",
    "TextClassifier",
    "feature_dim",
    "huggingface_causal_lm",
    "huggingface_classifier",
]

__getattr__ = load_late(__name__, __file__)
