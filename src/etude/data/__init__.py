"""Data: orders and samplers, loaders, token files, prefetching and data sets."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.corpus.dataset import load_text_corpus as load_text_corpus
    from etude.data.catalog.arrays import load_arrays as load_arrays
    from etude.data.catalog.huggingface import load_huggingface as load_huggingface
    from etude.data.catalog.images import load_image_folder as load_image_folder
    from etude.data.catalog.mnist import (
        Normalize as Normalize,
        fetch_mnist as fetch_mnist,
        load_mnist as load_mnist,
        read_idx as read_idx,
    )
    from etude.data.catalog.streams import (
        combine_streams as combine_streams,
        load_streams as load_streams,
        load_token_mixture as load_token_mixture,
    )
    from etude.data.catalog.tabular import load_csv as load_csv, load_parquet as load_parquet
    from etude.data.catalog.texts import load_jsonl as load_jsonl
    from etude.data.catalog.tokens import load_tokens as load_tokens
    from etude.data.factory import (
        DataLoaderFactory as DataLoaderFactory,
        as_loader as as_loader,
        make_loader as make_loader,
    )
    from etude.data.loader import DataLoader as DataLoader, StreamLoader as StreamLoader
    from etude.data.order.permutation import KeyedPermutation as KeyedPermutation
    from etude.data.order.sampler import BatchSampler as BatchSampler
    from etude.data.sources.adapters import ForeignLoader as ForeignLoader
    from etude.data.sources.base import BatchSource as BatchSource, ResizableSource as ResizableSource
    from etude.data.sources.mixture import TokenMixture as TokenMixture
    from etude.data.splits import (
        DataSplits as DataSplits,
        LoaderData as LoaderData,
        OtherData as OtherData,
        Streams as Streams,
        TensorData as TensorData,
        check_labels as check_labels,
    )
    from etude.data.text.blocks import TokenBlocks as TokenBlocks
    from etude.data.text.collating import collate as collate
    from etude.data.text.documents import TokenDocuments as TokenDocuments
    from etude.data.text.masking import MaskedTokens as MaskedTokens, mask_tokens as mask_tokens
    from etude.data.text.packed import PackedDocuments as PackedDocuments, document_mask as document_mask
    from etude.data.tokens.check import TokenReport as TokenReport, check_tokens as check_tokens
    from etude.data.tokens.dataset import find_split as find_split, read_dataset as read_dataset
    from etude.data.tokens.file import Sample as Sample, TokenFile as TokenFile
    from etude.data.tokens.opening import open_tokens as open_tokens
    from etude.data.tokens.writer import TokenWriter as TokenWriter
    from etude.data.transfer.epoch import EpochIterator as EpochIterator
    from etude.data.transfer.prefetch import PrefetchStream as PrefetchStream, prefetch_stream as prefetch_stream

__getattr__ = load_late(__name__, __file__)
