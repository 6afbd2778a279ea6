"""A corpus is a function of its documents and options: the same bytes from any files, in any order."""

import gzip
import json
import math
import os
from collections import Counter

import numpy as np
import pytest
from corpus_texts import SMALL, content, texts, write_folder
from tokenizers import Tokenizer, models, pre_tokenizers

from etude.core.errors import DataError
from etude.corpus import (
    ensure_corpus,
    load_tokenizer,
    prepare_corpus,
    read_report,
    read_vocabulary,
)
from etude.corpus.documents import digests
from etude.data import check_tokens, open_tokens

DOCUMENTS = texts(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("texts") / "a", DOCUMENTS)


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    """A corpus of 60 documents."""
    return prepare_corpus([folder], tmp_path_factory.mktemp("corpus") / "made", **SMALL)


def documents_of(corpus_folder) -> dict[str, list[str]]:
    """The texts of every split, decoded; checks that each ends with the end of a document."""
    tokenizer, report = load_tokenizer(corpus_folder), read_report(corpus_folder)
    found = {}
    for split in report.splits:
        tokens = open_tokens(corpus_folder / f"{split}.bin")
        ids = [tokens[number].ids for number in range(len(tokens))]
        assert all(one[-1] == report.special_ids["end"] for one in ids)
        found[split] = [tokenizer.decode(one[:-1].tolist(), skip_special_tokens=False) for one in ids]
    return found


def test_every_document_is_in_one_split_word_for_word(corpus):
    found = documents_of(corpus.folder)
    assert sorted(text for split in found.values() for text in split) == sorted(DOCUMENTS)
    assert {split: len(inside) for split, inside in found.items()} == {
        split: counts.documents for split, counts in corpus.splits.items()
    }


def test_split_and_order_follow_from_the_digest(corpus):
    """The plain rule, written again: test below its share, validation above the rest, each in order of the digest."""
    found = documents_of(corpus.folder)
    place = {text: digests(text, text.encode(), "")[0] / 2**64 for text in DOCUMENTS}
    ordered = sorted(DOCUMENTS, key=place.__getitem__)
    assert found["test"] == [text for text in ordered if place[text] < 0.2]
    assert found["validation"] == [text for text in ordered if place[text] >= 0.8]
    assert found["train"] == [text for text in ordered if 0.2 <= place[text] < 0.8]


def test_report_agrees_with_plain_formulas(corpus):
    tokens = {split: open_tokens(corpus.folder / f"{split}.bin") for split in corpus.splits}
    ids = {split: file.read(np.array([0]), np.array([file.num_tokens])).tolist() for split, file in tokens.items()}
    train, held_out = Counter(ids["train"]), ids["validation"]
    total = len(ids["train"])
    entropy = -sum(count / total * math.log(count / total) for count in train.values())
    assert corpus.unigram_entropy == pytest.approx(entropy, rel=1e-12)
    loss = -sum(math.log((train[one] + 1) / (total + corpus.vocab_size)) for one in held_out) / len(held_out)
    assert corpus.validation_unigram_loss == pytest.approx(loss, rel=1e-12)
    texts_of = documents_of(corpus.folder)
    for split, counts in corpus.splits.items():
        assert counts.tokens == len(ids[split]) == check_tokens(corpus.folder / f"{split}.bin").num_tokens
        assert counts.bytes == sum(len(text.encode()) for text in texts_of[split])
    facts = json.loads((corpus.folder / "dataset.json").read_text())
    assert facts["splits"]["train"]["tokens"] == total
    assert facts["special_ids"] == {"end": 0, "pad": 1, "mask": 2}
    assert facts["vocab_size"] == tokens["train"].vocab_size == 300
    assert tokens["train"].dtype == np.uint16


def test_same_bytes_from_other_files_and_order(corpus, tmp_path):
    """Names, folders, dates, formats and packing leave no trace."""
    one_by_one = write_folder(tmp_path / "z", DOCUMENTS[::-1], ".md")
    for path in list(one_by_one.iterdir())[:20]:
        os.utime(path, (1, 1))
    report = prepare_corpus([one_by_one], tmp_path / "files", **SMALL)
    assert content(report.folder) == content(corpus.folder)

    def line(text):
        return json.dumps({"id": len(text), "text": text}) + "\n"

    (tmp_path / "a.jsonl").write_text("".join(map(line, DOCUMENTS[40:])))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(map(line, DOCUMENTS[:30])).encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(DOCUMENTS[30].encode()))
    some = write_folder(tmp_path / "some", DOCUMENTS[31:40])
    inputs = [tmp_path / "b.jsonl.gz", some, tmp_path / "*.jsonl", tmp_path / "c.txt.gz"]
    assert content(prepare_corpus(inputs, tmp_path / "lines", **SMALL).folder) == content(corpus.folder)


def test_more_documents_move_none(corpus, tmp_path):
    more = write_folder(tmp_path / "more", DOCUMENTS + texts(30, seed=1))
    report = prepare_corpus([more], tmp_path / "out", **SMALL)
    before, after = documents_of(corpus.folder), documents_of(report.folder)
    for split, inside in before.items():
        assert [text for text in after[split] if text in DOCUMENTS] == inside


def test_copies_are_dropped_and_never_in_two_splits(corpus, tmp_path):
    copies = [text.replace("\n", "\r\n") for text in DOCUMENTS[:20]] + DOCUMENTS[20:40]
    twice = write_folder(tmp_path / "twice", DOCUMENTS + copies)
    report = prepare_corpus([twice], tmp_path / "out", **SMALL)
    assert report.num_duplicates == 40
    assert sum(split.documents for split in report.splits.values()) == 60
    kept = prepare_corpus([twice], tmp_path / "kept", keep_duplicates=True, **SMALL)
    assert kept.num_duplicates == 0
    found = documents_of(kept.folder)
    seen = [{text.replace("\r", "") for text in inside} for inside in found.values()]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 60
    assert sorted(len(inside) for inside in found.values()) != [20, 20, 20]
    assert sum(len(inside) for inside in found.values()) == 100


def test_which_copy_stays_does_not_depend_on_the_order_of_files(tmp_path):
    copies = [text.replace("\n", " \r\n") for text in DOCUMENTS]
    one = prepare_corpus(write_folder(tmp_path / "1", DOCUMENTS + copies), tmp_path / "one", **SMALL)
    other = prepare_corpus(write_folder(tmp_path / "2", copies + DOCUMENTS), tmp_path / "other", **SMALL)
    assert one.num_duplicates == other.num_duplicates == 60
    assert content(one.folder) == content(other.folder)


def test_tokenizer_knows_only_the_training_split(tmp_path):
    """A word that is common outside of training is no token; the same word in training is one."""

    def place(text):
        return digests(text, text.encode(), "")[0] / 2**64

    def marked(text, trained):
        """The text with the word often enough that it falls into training, or that it does not."""
        longer = (text + " Zyzzyva" * count for count in range(30, 100))
        return next(one for one in longer if (0.2 <= place(one) < 0.8) == trained)

    for trained in (False, True):
        documents = DOCUMENTS[:40] + [marked(text, trained) for text in DOCUMENTS[40:]]
        folder = write_folder(tmp_path / f"in-{trained}", documents)
        report = prepare_corpus([folder], tmp_path / f"out-{trained}", **SMALL)
        assert ("ĠZyzzyva" in load_tokenizer(report.folder).get_vocab()) == trained


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"min_chars": 100}, "too short"),
        ({"max_chars": 200}, "too long"),
    ],
)
def test_length_limits(folder, tmp_path, change, left_out):
    report = prepare_corpus([folder], tmp_path / "out", **{**SMALL, **change, "vocab_size": 270})
    low, high = change.get("min_chars", 0), change.get("max_chars", 10**9)
    kept = [text for text in DOCUMENTS if low <= len(text) <= high]
    assert 0 < len(kept) < 60
    assert sorted(text for inside in documents_of(report.folder).values() for text in inside) == sorted(kept)
    assert report.skipped == {left_out: 60 - len(kept)}


def test_one_long_file_can_be_cut(tmp_path):
    whole = "".join(DOCUMENTS)
    (tmp_path / "book.txt").write_bytes(whole.encode())
    (tmp_path / "book.jsonl").write_text(json.dumps({"body": whole}))
    with pytest.raises(DataError, match=r"of 1 documents none is left for .* --cut-chars 20000"):
        prepare_corpus([tmp_path / "book.txt"], tmp_path / "out", **SMALL)
    report = prepare_corpus([tmp_path / "book.txt"], tmp_path / "out", cut_chars=300, **SMALL)
    pieces = [text for inside in documents_of(report.folder).values() for text in inside]
    assert max(map(len, pieces)) <= 300
    assert sum(map(len, pieces)) == len(whole)
    assert all(piece in whole for piece in pieces)
    lines = prepare_corpus([tmp_path / "book.jsonl"], tmp_path / "lines", cut_chars=300, text_key="body", **SMALL)
    assert documents_of(lines.folder) == documents_of(report.folder)


def test_what_cannot_be_read_is_counted(tmp_path):
    folder = write_folder(tmp_path / "in", DOCUMENTS)
    (folder / "image.txt").write_bytes(b"\0\1\2")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_bytes(b" \n\n ")
    (folder / "photo.png").write_bytes(b"x")
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}\n{"text": null}\n')
    report = prepare_corpus([folder], tmp_path / "out", **SMALL)
    assert report.skipped == {
        "other kinds of file": 1,
        "binary": 1,
        "not UTF-8": 1,
        "empty": 3,
        "not valid Unicode": 1,
    }
    assert sum(split.documents for split in report.splits.values()) == 60


# ------------------------------------------------------------------------------------------------ tokenizers


@pytest.fixture
def words_tokenizer(tmp_path):
    """A tokenizer of another kind, that truncates, pads and has an end of its own."""
    vocabulary = {"[UNK]": 0, "<end>": 70_000, **{f"w{number}": number for number in range(1, 50)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    (tmp_path / "given").mkdir()
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    return tmp_path / "given"


def test_given_tokenizer_is_used_as_it_is(words_tokenizer, tmp_path):
    folder = write_folder(tmp_path / "in", [f"w{n} w{n} w1 w2 w3 w4 unknown" for n in range(5, 40)])
    options = {"validation": 0.2, "test": 0, "tokenizer": str(words_tokenizer)}
    with pytest.raises(DataError, match=r"no known token for the end of a text; .* --end-token"):
        prepare_corpus([folder], tmp_path / "out", **options)
    report = prepare_corpus([folder], tmp_path / "out", **options, end_token="<end>")
    assert (report.vocab_size, report.dtype) == (70_001, "uint32")
    assert report.special_ids == {"end": 70_000, "pad": None, "mask": None}
    copied = (report.folder / "tokenizer.json").read_bytes()
    assert copied == (words_tokenizer / "tokenizer.json").read_bytes()
    tokens = open_tokens(report.folder / "train.bin")
    samples = [tokens[number].ids.tolist() for number in range(len(tokens))]
    assert all(sample == [sample[0], sample[0], 1, 2, 3, 4, 0, 70_000] for sample in samples)
    assert not (report.folder / "test.bin").exists()


def test_tokenizer_config_names_the_end(words_tokenizer):
    tokens = {"eos_token": {"content": "w7"}, "pad_token": "w8"}
    (words_tokenizer / "tokenizer_config.json").write_text(json.dumps(tokens))
    vocabulary = read_vocabulary(words_tokenizer)
    assert vocabulary.special_ids() == {"end": 7, "pad": 8, "mask": None}


def test_trained_tokenizer_can_be_given_to_another_corpus(corpus, tmp_path):
    folder = write_folder(tmp_path / "in", texts(20, seed=5))
    report = prepare_corpus([folder], tmp_path / "out", tokenizer=str(corpus.folder), validation=0.3, test=0)
    assert report.tokenizer_sha256 == corpus.tokenizer_sha256
    assert report.special_ids == corpus.special_ids
    found = documents_of(report.folder)
    assert sorted(found["train"] + found["validation"]) == sorted(texts(20, seed=5))


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"model": 3}', b"\xff\xfe", b"[]"])
def test_bad_tokenizer_file(tmp_path, raw):
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(
        DataError, match=r"tokenizer\.json is not a tokenizer.json of the tokenizers library"
    ) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_vocabulary_that_the_text_cannot_fill(folder, tmp_path):
    with pytest.raises(DataError, match=r"text for a vocabulary of (\d+) only; use --vocab-size \1 or less"):
        prepare_corpus([folder], tmp_path / "out", **{**SMALL, "vocab_size": 50_000})


# ------------------------------------------------------------------------------------------------ what is there already


def test_finished_corpus_is_returned_at_once(corpus, folder):
    said = []
    again = prepare_corpus([folder], corpus.folder, progress=lambda *step: said.append(step), **SMALL)
    assert again.reused
    assert said == []
    assert (again.splits, again.fingerprint) == (corpus.splits, corpus.fingerprint)


def test_same_documents_from_elsewhere_are_recognised(corpus, folder, tmp_path):
    before = content(corpus.folder)
    moved = write_folder(tmp_path / "moved", DOCUMENTS)
    assert prepare_corpus(str(moved), corpus.folder, **SMALL).reused
    assert content(corpus.folder) == before


def test_other_documents_or_options_are_refused_then_replaced(tmp_path):
    first, second = write_folder(tmp_path / "1", texts(30)), write_folder(tmp_path / "2", texts(30, seed=2))
    out = tmp_path / "out"
    prepare_corpus([first], out, **SMALL)
    before = content(out)
    with pytest.raises(DataError, match="holds a corpus of other documents; add --overwrite"):
        prepare_corpus([second], out, **SMALL)
    with pytest.raises(DataError, match="made with vocab_size 300, not 280; add --overwrite"):
        prepare_corpus([first], out, **{**SMALL, "vocab_size": 280})
    assert content(out) == before
    replaced = prepare_corpus([second], out, overwrite=True, **{**SMALL, "test": 0})
    assert not replaced.reused
    fresh = prepare_corpus([second], tmp_path / "fresh", **{**SMALL, "test": 0})
    assert content(out) == content(fresh.folder)


def test_files_of_others_are_not_overwritten(folder, tmp_path):
    (tmp_path / "train.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"already has train\.bin; choose another --out, or use --overwrite"):
        prepare_corpus([folder], tmp_path, **SMALL)
    assert (tmp_path / "train.bin").read_bytes() == b"mine"


def test_missing_file_of_a_finished_corpus(folder, tmp_path):
    prepare_corpus([folder], tmp_path / "out", **SMALL)
    (tmp_path / "out" / "validation.bin").unlink()
    with pytest.raises(DataError, match=r"no validation\.bin; rebuild it with --overwrite"):
        prepare_corpus([folder], tmp_path / "out", **SMALL)
    with pytest.raises(DataError, match=r"no validation\.bin"):
        ensure_corpus([folder], tmp_path / "out", **SMALL)


def test_ensure_makes_once_and_compares_options(folder, tmp_path):
    inputs = write_folder(tmp_path / "in", DOCUMENTS[:40])
    out = ensure_corpus([inputs], tmp_path / "out", **SMALL)
    before = content(out)
    for path in inputs.iterdir():
        path.unlink()
    assert ensure_corpus([inputs], tmp_path / "out", **SMALL) == out, "the files it was made of may be gone"
    assert content(out) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert ensure_corpus("in", "out", **SMALL).resolve() == out
    with pytest.raises(DataError, match="made with vocab_size 300, not 290"):
        ensure_corpus([inputs], out, **{**SMALL, "vocab_size": 290})
    with pytest.raises(DataError, match=r"was made of .*, not of stdlib"):
        ensure_corpus([], out, **SMALL)


def test_nothing_is_left_behind(corpus):
    assert sorted(path.name for path in corpus.folder.iterdir()) == [
        *(".inputs.json", "dataset.json", "test.bin", "tokenizer.json", "train.bin", "validation.bin")
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation": 1.0}, "validation 1.0 .* together less than 1"),
        ({"validation": 0.6, "test": 0.5}, "leave nothing to train on"),
        ({"vocab_size": 10}, "vocab_size must be at least 259"),
        ({"vocab_size": 10**9}, "vocab_size must be at most"),
        ({"min_chars": 5, "max_chars": 3}, "no document is left"),
        ({"cut_chars": 2}, "cut_chars must be at least 16"),
        ({"tokenizer": "nowhere"}, "tokenizer nowhere does not exist; pass a tokenizer.json"),
        ({"max_chars": 20}, r"no text in any of 60 files \(60 too long\)"),
    ],
)
def test_mistakes_in_words(folder, tmp_path, options, words):
    with pytest.raises(DataError, match=words) as caught:
        prepare_corpus([folder], tmp_path / "out", **{**SMALL, **options})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*"))
