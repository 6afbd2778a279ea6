"""Data: orders and samplers, loaders, token files, prefetching and data sets."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.corpus.dataset import load_text_corpus
    from etude.data.catalog.arrays import load_arrays
    from etude.data.catalog.huggingface import load_huggingface
    from etude.data.catalog.images import load_image_folder
    from etude.data.catalog.mnist import Normalize, fetch_mnist, load_mnist, read_idx
    from etude.data.catalog.streams import combine_streams, load_streams, load_token_mixture
    from etude.data.catalog.tabular import load_csv, load_parquet
    from etude.data.catalog.texts import load_jsonl
    from etude.data.catalog.tokens import load_tokens
    from etude.data.factory import DataLoaderFactory, as_loader, make_loader
    from etude.data.loader import DataLoader, StreamLoader
    from etude.data.order.permutation import KeyedPermutation
    from etude.data.order.sampler import BatchSampler
    from etude.data.sources.adapters import ForeignLoader
    from etude.data.sources.base import BatchSource, ResizableSource
    from etude.data.sources.mixture import TokenMixture
    from etude.data.splits import DataSplits, LoaderData, OtherData, Streams, TensorData, check_labels
    from etude.data.text.blocks import TokenBlocks
    from etude.data.text.collating import collate
    from etude.data.text.documents import TokenDocuments
    from etude.data.text.masking import MaskedTokens, mask_tokens
    from etude.data.text.packed import PackedDocuments, document_mask
    from etude.data.tokens.check import TokenReport, check_tokens
    from etude.data.tokens.dataset import find_split, read_dataset
    from etude.data.tokens.file import Sample, TokenFile
    from etude.data.tokens.opening import open_tokens
    from etude.data.tokens.writer import TokenWriter
    from etude.data.transfer.epoch import EpochIterator
    from etude.data.transfer.prefetch import PrefetchStream, prefetch_stream

__all__ = [
    "BatchSampler",
    "BatchSource",
    "DataLoader",
    "DataLoaderFactory",
    "DataSplits",
    "EpochIterator",
    "ForeignLoader",
    "KeyedPermutation",
    "LoaderData",
    "MaskedTokens",
    "Normalize",
    "OtherData",
    "PackedDocuments",
    "PrefetchStream",
    "ResizableSource",
    "Sample",
    "StreamLoader",
    "Streams",
    "TensorData",
    "TokenBlocks",
    "TokenDocuments",
    "TokenFile",
    "TokenMixture",
    "TokenReport",
    "TokenWriter",
    "as_loader",
    "check_labels",
    "check_tokens",
    "collate",
    "combine_streams",
    "document_mask",
    "fetch_mnist",
    "find_split",
    "load_arrays",
    "load_csv",
    "load_huggingface",
    "load_image_folder",
    "load_jsonl",
    "load_mnist",
    "load_parquet",
    "load_streams",
    "load_text_corpus",
    "load_token_mixture",
    "load_tokens",
    "make_loader",
    "mask_tokens",
    "open_tokens",
    "prefetch_stream",
    "read_dataset",
    "read_idx",
]

__getattr__ = load_late(__name__, __file__)
