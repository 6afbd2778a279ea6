"""Preparing a corpus: documents from files, a byte-level BPE tokenizer, splits by content, token files."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.corpus.options import CorpusOptions as CorpusOptions
    from etude.corpus.prepare import ensure_corpus as ensure_corpus, prepare_corpus as prepare_corpus
    from etude.corpus.report import (
        CorpusReport as CorpusReport,
        SplitCounts as SplitCounts,
        read_report as read_report,
    )
    from etude.corpus.tokenizer import Vocabulary as Vocabulary, read_vocabulary as read_vocabulary
    from etude.data.text.tokenizer import load_tokenizer as load_tokenizer

__getattr__ = load_late(__name__, __file__)
