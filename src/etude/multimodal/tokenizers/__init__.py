"""Numbers and vectors as tokens, and back: a tokenizer of each kind, and reading whichever a file holds."""

from etude.multimodal.tokenizers.base import Tokenizer
from etude.multimodal.tokenizers.scalar import ScalarTokenizer
from etude.multimodal.tokenizers.vector import VectorTokenizer

__all__ = ["ScalarTokenizer", "Tokenizer", "VectorTokenizer", "load_tokenizer"]

load_tokenizer = Tokenizer.load
