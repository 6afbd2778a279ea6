"""The streams of the code experiment, built from a small folder: what is in them, and that they are right."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from code_project import OPTIONS, decoded, samples
from code_tasks import STREAMS, prepare, read_schema, report
from code_tasks.encoding import CodeTokenizer
from code_tasks.findings import find_ruff
from code_tasks.functions import functions_of, parse
from code_tasks.labels import ALL_RULES, QUALITY, SECURITY
from code_tasks.ontology import label_bytes
from code_tasks.sources import SPLITS

from etude.corpus import load_tokenizer
from etude.data import check_tokens, open_tokens


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_stream_is_a_sound_token_file_with_the_same_tokenizer(built, stream, split):
    path = built / stream / f"{split}.bin"
    check_tokens(path)
    file = open_tokens(path)
    schema = read_schema(built)
    assert (len(file), file.num_tokens) == tuple(
        schema["samples"][stream][split][name] for name in ("samples", "tokens")
    )
    assert file.vocab_size == schema["vocab_size"] == 400
    assert file.meta["special_ids"].keys() == {"end", "pad", "mask", "tests", "explanation", "docstring"}
    assert (built / stream / "tokenizer.json").read_bytes() == (built / "tokenizer.json").read_bytes()
    if stream != "code":
        assert max(file.lengths()) <= OPTIONS.max_length


@pytest.mark.parametrize("split", SPLITS)
def test_documents_of_code_are_the_files_and_their_labels_those_of_the_bytes(built, tokenizer, files, split):
    found = samples(built, "code", split)
    texts = [file.text for file in files[split] if not file.is_test and parse(file.text)]
    assert [decoded(tokenizer, sample.ids) for sample in found] == [f"{text}<|endoftext|>" for text in texts]
    pieces = CodeTokenizer(built / "tokenizer.json")
    for number, text in enumerate(texts):
        streams = {name: found.read(*found.spans(np.array([number])), name) for name in ("simple", "full")}
        for name, labels in zip(("simple", "full"), label_bytes(text, parse(text)), strict=True):
            place = 0
            for token, label in zip(found[number].ids[:-1], streams[name], strict=False):
                raw = text.encode()[place : pieces.byte_ends(np.array([token]))[0] + place]
                words = [i for i, byte in enumerate(raw) if byte >= 128 or chr(byte).isalnum() or byte == 95]
                signs = [i for i, byte in enumerate(raw) if not raw[i : i + 1].isspace()]
                assert label == labels[place + (words or signs or [0])[0]]
                place += len(raw)
            assert streams[name][-1] == -100
            assert place == len(text.encode())


def test_labels_of_functions_are_those_of_ruff_on_the_file_alone(built, tokenizer, files, tmp_path):
    found = samples(built, "functions", "train")
    by_text = {decoded(tokenizer, sample.ids): number for number, sample in enumerate(found)}
    labels = {name: found.label(name, np.arange(len(found))) for name in ("quality", "security")}
    checked = 0
    for file in files["train"][:10]:
        if parse(file.text) is None:
            continue
        (tmp_path / "one.py").write_text(file.text, encoding="utf-8")
        command = [find_ruff(), "check", "--isolated", "--no-cache", "--output-format", "json"]
        command += ["--select", ",".join(ALL_RULES), "--target-version", f"py3{min(sys.version_info[1], 13)}"]
        text = subprocess.run([*command, str(tmp_path / "one.py")], capture_output=True, check=False).stdout
        codes = [(one["location"]["row"], one["code"]) for one in json.loads(text)]
        for function in functions_of(parse(file.text), file.text):
            number = by_text.get(f"{function.text}<|endoftext|>")
            if number is None:
                continue  # longer than a sample, or the same as another
            mine = {code for line, code in codes if function.first_line <= line <= function.last_line}
            for name, groups in (("quality", QUALITY), ("security", SECURITY)):
                rules = {
                    name: re.compile("|".join(f"{rule}[0-9]*$" for rule in group)) for name, group in groups.items()
                }
                expected = [any(map(rule.match, mine)) for rule in rules.values()]
                assert labels[name][number].tolist() == list(map(int, expected)), function.text
            checked += 1
    assert checked > 10


def test_what_is_cut_off_a_function_has_no_say_in_its_labels(project, tmp_path, built):
    folder = tmp_path / "code"
    shutil.copytree(project, folder)
    lines = "".join(f"    value = value * {number} + 1\n" for number in range(60))
    for number in range(30):
        text = f"def long_{number}(value):\n{lines}    assert value\n    return value\n"
        (folder / f"long_{number}.py").write_text(text)
    prepare([str(folder)], tmp_path / "out", OPTIONS)
    found, tokenizer = samples(tmp_path / "out", "functions", "train"), load_tokenizer(tmp_path / "out")
    for number, sample in enumerate(found):
        if "def long_" in decoded(tokenizer, sample.ids):
            assert len(sample.ids) == OPTIONS.max_length
            assert not found.label("security", np.array([number])).any()


@pytest.mark.parametrize(("stream", "separator"), [("tests", "<|tests|>"), ("explanations", "<|explanation|>")])
def test_targets_are_what_follows_the_separator(built, tokenizer, stream, separator):
    found = samples(built, stream, "train")
    targets = []
    for number, sample in enumerate(found):
        labels = found.read(*found.spans(np.array([number])), "labels")
        place = list(sample.ids).index(tokenizer.token_to_id(separator))
        assert (labels[:place] == -100).all()
        assert labels[place:-1].tolist() == sample.ids[place + 1 :].tolist()
        assert labels[-1] == -100
        targets.append(decoded(tokenizer, labels[labels >= 0]))
    first = "Return the " if stream == "explanations" else "def test_"
    assert sum(target.startswith(first) for target in targets) > len(targets) / 4


def test_tests_come_with_the_code_that_they_call(built, tokenizer):
    kinds = Counter()
    for sample in samples(built, "tests", "train"):
        code, test = decoded(tokenizer, sample.ids).split("<|tests|>")
        assert code.startswith("# pkg.")
        name = code.split("def ")[1].split("(")[0].replace("__init__", code.split("class ")[-1].split(":")[0])
        kinds["doctest" if test.startswith(">>> ") else "unit test"] += 1
        assert name in test
        assert "test_nothing" not in test
    assert min(kinds.values()) > 10


@pytest.mark.parametrize("split", SPLITS)
def test_half_of_the_pairs_belong_together_and_no_docstring_tells_which(built, tokenizer, split):
    found = samples(built, "pairs", split)
    labels = found.label("clarification", np.arange(len(found))).tolist()
    assert sum(labels) * 2 == len(labels) > 0
    texts = [decoded(tokenizer, sample.ids).split("<|docstring|>")[1] for sample in found]
    by_label = [
        Counter(text for text, label in zip(texts, labels, strict=True) if label == which) for which in (0, 1)
    ]
    assert by_label[0] == by_label[1]


def test_the_same_function_is_never_in_two_splits(built, tokenizer, project):
    seen = {
        split: {decoded(tokenizer, sample.ids) for sample in samples(built, "functions", split)} for split in SPLITS
    }
    assert any("def copied" in text for text in seen["train"])
    for split in ("validation", "test"):
        assert not seen[split] & seen["train"]
        assert not any("def copied" in text for text in seen[split])
    assert read_schema(built)["functions_left_out_as_seen_in_training"] > 0


def test_what_is_no_code_is_counted_and_passed_over(built):
    schema = read_schema(built)
    assert schema["skipped"] == {
        "with null bytes": 1,
        "empty": 1,
        "in an unknown encoding": 1,
        "the same as another file": 1,
        "not Python that this version reads": 1,
    }
    files = schema["files"]
    assert sum(files[split]["code"] for split in SPLITS) == sum(files[split]["tests"] for split in SPLITS) == 36


def test_counts_in_the_schema_are_those_of_the_files(built):
    schema = read_schema(built)
    for split in SPLITS:
        code, functions = samples(built, "code", split), samples(built, "functions", split)
        for name in ("simple", "full"):
            values = code.read(np.array([0]), np.array([code.num_tokens]), name)
            found = {label: int((values == number).sum()) for number, label in enumerate(schema["labels"][name])}
            assert found == schema["counts"]["code"][split][name]
        for name in ("quality", "security"):
            values = functions.label(name, np.arange(len(functions)))
            found = dict(zip(schema["labels"][name], values.sum(axis=0).tolist(), strict=True))
            assert found == schema["counts"]["functions"][split][name]
    text = report(schema)
    for name in ("simple", "full", "quality", "security"):
        assert all(f"| `{label}` |" in text for label in schema["labels"][name])
