"""Text: samples of token files, as blocks, padded documents, packed blocks or masked text, and collating of samples."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.data.text.blocks import TokenBlocks
    from etude.data.text.collating import collate
    from etude.data.text.documents import TokenDocuments
    from etude.data.text.masking import MaskedTokens, mask_tokens, sample_keys
    from etude.data.text.packed import PackedDocuments, document_mask

__all__ = [
    "MaskedTokens",
    "PackedDocuments",
    "TokenBlocks",
    "TokenDocuments",
    "collate",
    "document_mask",
    "mask_tokens",
    "sample_keys",
]

__getattr__ = load_late(__name__, __file__)
