"""Tokenizers for numbers and vectors, and loading either kind from a file."""

from etude.multimodal.tokenizers.base import Tokenizer
from etude.multimodal.tokenizers.scalar import ScalarTokenizer
from etude.multimodal.tokenizers.vector import VectorTokenizer

__all__ = ["ScalarTokenizer", "Tokenizer", "VectorTokenizer", "load_tokenizer"]

load_tokenizer = Tokenizer.load
