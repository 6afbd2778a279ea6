"""Data of several modalities: tokenizers of numbers and vectors, and folders that hold them with their tokens."""

from etude.data.modal.folder import Modalities, has_vocabulary, read_modalities, write_modalities
from etude.data.modal.loading import Tokenizer, load_tokenizer
from etude.data.modal.scalar import ScalarTokenizer
from etude.data.modal.vector import VectorTokenizer
from etude.data.modal.writing import MultimodalWriter

__all__ = [
    "Modalities",
    "MultimodalWriter",
    "ScalarTokenizer",
    "Tokenizer",
    "VectorTokenizer",
    "has_vocabulary",
    "load_tokenizer",
    "read_modalities",
    "write_modalities",
]
