"""Tokenizers for numbers and vectors, and loading either kind from a file."""

from etude.multimodal.tokenizers.base import Tokenizer as Tokenizer
from etude.multimodal.tokenizers.scalar import ScalarTokenizer as ScalarTokenizer
from etude.multimodal.tokenizers.vector import VectorTokenizer as VectorTokenizer

load_tokenizer = Tokenizer.load
