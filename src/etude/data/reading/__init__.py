"""Reading: samples of token files, as padded documents, packed blocks or masked text, and collating of samples."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.data.reading.attention import document_mask
    from etude.data.reading.collating import collate
    from etude.data.reading.documents import TokenDocuments
    from etude.data.reading.masking import MaskedTokens, mask_tokens, sample_keys
    from etude.data.reading.packed import PackedDocuments

__all__ = [
    "MaskedTokens",
    "PackedDocuments",
    "TokenDocuments",
    "collate",
    "document_mask",
    "mask_tokens",
    "sample_keys",
]

__getattr__ = load_late(__name__, __file__)
