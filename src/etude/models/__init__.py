"""Models that ship with the library."""

from etude.models.huggingface import huggingface_causal_lm
from etude.models.lenet5 import LeNet5
from etude.models.mlp import MLP
from etude.models.transformer import CausalTransformerLM

__all__ = ["MLP", "CausalTransformerLM", "LeNet5", "huggingface_causal_lm"]
