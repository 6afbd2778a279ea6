"""Several modalities in one vocabulary: tokenizers, codebooks, folders of tokens and the meaningful loss.

vocab               which token ids belong to which modality
tokenizers/         numbers and vectors become codes, and codes values
codebooks           values of codes from files made elsewhere; joblib_files opens pickles without executing them
writer, folder      samples of several modalities as token files, with vocabulary and tokenizers beside them
loss/               cross entropy, and the error of the values that tokens stand for
facts               what checkpoints keep of a vocabulary
training            `Trainer(vocab=…, codebooks=…)`
feature             the section `vocab` of experiment files
training_section    `training.meaningful_loss`, which moves to the section `loss`
"""

from etude.multimodal.codebooks import load_codebook, load_npz_key
from etude.multimodal.folder import Modalities, read_modalities, write_modalities
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
    "load_codebook",
    "load_npz_key",
    "load_tokenizer",
    "read_modalities",
    "write_modalities",
]
