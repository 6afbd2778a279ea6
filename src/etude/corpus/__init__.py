"""Preparing a corpus: documents from files, a byte-level BPE tokenizer, splits by content, token files."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.corpus.options import CorpusOptions
    from etude.corpus.prepare import ensure_corpus, prepare_corpus
    from etude.corpus.report import CorpusReport, SplitCounts, read_report
    from etude.corpus.tokenizer import Vocabulary, load_tokenizer, read_vocabulary

__all__ = [
    "CorpusOptions",
    "CorpusReport",
    "SplitCounts",
    "Vocabulary",
    "ensure_corpus",
    "load_tokenizer",
    "prepare_corpus",
    "read_report",
    "read_vocabulary",
]

__getattr__ = load_late(__name__, __file__)
