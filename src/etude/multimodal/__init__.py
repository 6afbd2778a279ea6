"""Several modalities in one vocabulary: tokenizers, codebooks, folders of tokens and the meaningful loss.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "codebooks.loading": (
        "load_codebook",
        "load_npz_key",
    ),
    "folder": (
        "Modalities",
        "has_vocabulary",
        "read_modalities",
        "write_modalities",
    ),
    "loss": (
        "MeaningfulLoss",
        "combined_loss",
    ),
    "tokenizers.loading": (
        "Tokenizer",
        "load_tokenizer",
    ),
    "tokenizers.scalar": ("ScalarTokenizer",),
    "tokenizers.vector": ("VectorTokenizer",),
    "vocab": (
        "Modality",
        "VocabSpec",
        "build_vocab_spec",
    ),
    "writer": ("MultimodalWriter",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
