"""Several modalities in one vocabulary: tokenizers, codebooks, folders of tokens and the meaningful loss.

vocab               which token ids belong to which modality
tokenizers/         numbers and vectors to codes and back
codebooks           values of codes from external files; joblib_files reads pickles without executing them
writer, folder      samples of several modalities as token files, with vocabulary and tokenizers beside them
loss/               cross entropy, and the error of the values that tokens represent
training            `Trainer(vocab=…, codebooks=…)`
feature             the section `vocab` of experiment files
"""

from etude.multimodal.codebooks import load_codebook as load_codebook, load_npz_key as load_npz_key
from etude.multimodal.folder import (
    Modalities as Modalities,
    read_modalities as read_modalities,
    write_modalities as write_modalities,
)
from etude.multimodal.loss import MeaningfulLoss as MeaningfulLoss, combined_loss as combined_loss
from etude.multimodal.tokenizers import (
    ScalarTokenizer as ScalarTokenizer,
    Tokenizer as Tokenizer,
    VectorTokenizer as VectorTokenizer,
    load_tokenizer as load_tokenizer,
)
from etude.multimodal.vocab import Modality as Modality, VocabSpec as VocabSpec, build_vocab_spec as build_vocab_spec
from etude.multimodal.writer import MultimodalWriter as MultimodalWriter
