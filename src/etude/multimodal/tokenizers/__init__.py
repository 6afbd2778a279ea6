"""Numbers and vectors as tokens, and back: a tokenizer of each kind, and reading whichever a file holds."""

from pathlib import Path

from etude.multimodal.tokenizers import scalar, vector
from etude.multimodal.tokenizers.scalar import ScalarTokenizer
from etude.multimodal.tokenizers.storing import read_tensors
from etude.multimodal.tokenizers.vector import VectorTokenizer

__all__ = ["ScalarTokenizer", "Tokenizer", "VectorTokenizer", "load_tokenizer"]

Tokenizer = ScalarTokenizer | VectorTokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer saved there. Raises DataError if the file is missing, damaged or of another kind."""
    _, facts = read_tensors(path, {scalar.KIND: scalar.TENSORS, vector.KIND: vector.TENSORS})
    return ScalarTokenizer.load(path) if facts["kind"] == scalar.KIND else VectorTokenizer.load(path)
