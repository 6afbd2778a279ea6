"""Several modalities in one vocabulary: tokenizers, codebooks, folders of tokens and the meaningful loss."""

from etude.multimodal.codebooks.loading import load_codebook, load_npz_key
from etude.multimodal.folder import Modalities, has_vocabulary, read_modalities, write_modalities
from etude.multimodal.loss import MeaningfulLoss, combined_loss
from etude.multimodal.tokenizers import ScalarTokenizer, Tokenizer, VectorTokenizer, load_tokenizer
from etude.multimodal.vocab import Modality, VocabSpec, build_vocab_spec
from etude.multimodal.writer import MultimodalWriter

__all__ = [
    "MeaningfulLoss",
    "Modalities",
    "Modality",
    "MultimodalWriter",
    "ScalarTokenizer",
    "Tokenizer",
    "VectorTokenizer",
    "VocabSpec",
    "build_vocab_spec",
    "combined_loss",
    "has_vocabulary",
    "load_codebook",
    "load_npz_key",
    "load_tokenizer",
    "read_modalities",
    "write_modalities",
]
