"""`jsonl`: texts and classes to padded batches."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from etude.core import DataError
from etude.data import DataLoaderFactory
from etude.data.catalog.texts import LabeledText, load_jsonl, text_splits


@pytest.fixture
def write(tmp_path):
    def write(lines, name="d.jsonl"):
        path = tmp_path / name
        text = lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines))
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def whole(path, **options):
    return load_jsonl(path, **{"validation": 0.0, "test": 0.0, **options})


def texts_of(batch):
    """The texts that byte tokens stand for."""
    return [
        bytes((ids[mask == 1] - 1).tolist()).decode()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@given(st.lists(st.tuples(st.text(max_size=30), st.sampled_from("ab")), min_size=1, max_size=20), st.randoms())
def test_bytes_are_the_text_and_padding_is_masked(pairs, source):
    pairs = [*pairs, ("x", "a"), ("y", "b")]
    main = [LabeledText(text, label, "here") for text, label in pairs]
    part = text_splits(main, {}, (0.0, 0.0), 0, "bytes", 1000).train.data
    indices = np.array(source.sample(range(len(pairs)), source.randint(1, len(pairs))))
    batch = part.gather(indices, epoch=0, seed=0)
    assert texts_of(batch) == [pairs[place][0] for place in indices]
    assert batch["labels"].tolist() == ["ab".index(pairs[place][1]) for place in indices]
    lengths = [len(pairs[place][0].encode()) for place in indices]
    assert part.lengths(indices).tolist() == batch["attention_mask"].sum(1).tolist() == lengths
    assert not batch["input_ids"][batch["attention_mask"] == 0].any()
    assert batch["input_ids"].shape[1] % 8 == 0


def test_classes(write):
    lines = [{"text": "a", "label": 10}, {"text": "b", "label": 9}, {"text": "c", "label": 10}]
    splits = whole(write(lines))
    assert splits.facts["classes"] == ["9", "10"]
    assert splits.model_sizes() == {"vocab_size": 257, "num_classes": 2, "out_features": 2}
    booleans = whole(write([{"t": "a", "y": True}, {"t": "b", "y": False}]), text="t", label="y")
    assert booleans.facts["classes"] == ["false", "true"]


def test_half_a_character(write):
    splits = whole(write('{"text": "a\\ud800b", "label": 1}\n{"text": "", "label": 2}'))
    assert texts_of(splits.train.data.gather(np.arange(2), epoch=0, seed=0)) == ["a?b", ""]


def test_long_texts_are_cut(write):
    splits = whole(write([{"text": "abcdef", "label": "x"}, {"text": "gh", "label": "y"}]), max_length=3)
    assert texts_of(splits.train.data.gather(np.arange(2), epoch=0, seed=0)) == ["abc", "gh"]


def test_parts_do_not_depend_on_the_order_of_lines(write):
    lines = [{"text": f"text {i}", "label": i % 3} for i in range(60)]

    def held(seed=0):
        splits = load_jsonl(write(lines), validation=0.2, test=0.1, seed=seed)
        assert splits.facts["rows"] == {"train": 42, "validation": 12, "test": 6}
        part = splits.test.data
        return sorted(texts_of(part.gather(np.arange(6), epoch=0, seed=0)))

    before = held()
    random.Random(1).shuffle(lines)
    assert held() == before
    assert held(seed=1) != before


def test_a_loader_brings_similar_lengths_together(write):
    lines = [{"text": "x" * (1 + i * 7 % 100), "label": i % 2} for i in range(200)]
    loader = DataLoaderFactory(batch_size=10, seed=1).create(whole(write(lines)).train)
    batches = list(loader.iterate(epoch=0))
    assert sum(len(batch["labels"]) for batch in batches) == 200
    padded = 1 - sum(batch["attention_mask"].sum() for batch in batches) / sum(
        b["input_ids"].numel() for b in batches
    )
    assert padded < 0.2
    resumed = next(loader.iterate(epoch=0, position=50))
    assert torch.equal(resumed["input_ids"], batches[5]["input_ids"])


def test_files_of_parts(write):
    train = write([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    test = write([{"text": "c", "label": "y"}], "t.jsonl")
    splits = load_jsonl(train, validation=0.0, test=test)
    assert texts_of(splits.test.data.gather(np.arange(1), epoch=0, seed=0)) == ["c"]
    with pytest.raises(DataError, match=r"t\.jsonl:1.*'z'"):
        load_jsonl(train, validation=0.0, test=write([{"text": "c", "label": "z"}], "t.jsonl"))


def test_a_tokenizer_file(write, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "good": 1, "bad": 2, "day": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_padding(length=7)
    words.save(str(tmp_path / "tokenizer.json"))
    path = write([{"text": "good day", "label": "x"}, {"text": "bad", "label": "y"}])
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        splits = whole(path, tokenizer=str(place))
        assert splits.vocab_size == 4
        batch = splits.train.data.gather(np.arange(2), epoch=0, seed=0)
        assert batch["input_ids"][:, :2].tolist() == [[1, 3], [2, 0]]
    (tmp_path / "broken.json").write_text("{}")
    for name, fact in (("broken.json", "tokenizer.json"), ("nothing.json", "does not exist")):
        with pytest.raises(DataError, match=fact):
            whole(path, tokenizer=str(tmp_path / name))


good = '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'
HOSTILE = {
    "empty": ("", ["no lines"]),
    "only blanks": ("\n \n", ["no lines"]),
    "no json": (good + "{text: a}\n", [":3", "JSON"]),
    "cut off": (good + '{"text": "a", "la', [":3", "JSON"]),
    "a list": (good + "[1, 2]\n", [":3", "list"]),
    "no label": (good + '{"text": "a", "lable": 1}\n', [":3", "'label'", "lable"]),
    "null label": (good + '{"text": "a", "label": null}\n', [":3", "'label' is null"]),
    "a label of numbers": (good + '{"text": "a", "label": 1.5}\n', [":3", "1.5"]),
    "a text that is none": (good + '{"text": 5, "label": "x"}\n', [":3", "'text'", "5"]),
    "one class": ('{"text": "a", "label": "x"}\n' * 3, ["'x'", "others"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(write, case):
    content, facts = HOSTILE[case]
    with pytest.raises(DataError) as caught:
        whole(write(content))
    for fact in facts:
        assert fact in str(caught.value)


def test_wrong_encodings_and_marks(write, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good.encode())
    assert whole(str(path)).facts["rows"] == {"train": 2}
    path.write_bytes(good.encode() + b'{"text": "caf\xe9", "label": "x"}\n')
    with pytest.raises(DataError, match=r":3: .*UTF-8"):
        whole(str(path))
    with pytest.raises(DataError, match="cannot be read"):
        whole(str(tmp_path / "nothing.jsonl"))
