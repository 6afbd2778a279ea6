"""The data of the code experiment, built from a small folder: what is in it, that it is whole, the same, and right."""

import hashlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config.imports import import_user_modules
from etude.config.registry import lookup
from etude.core import DataError
from etude.corpus import load_tokenizer
from etude.data.catalog.tokens import load_tokens
from etude.data.text import TokenDocuments
from etude.data.tokens import check_tokens, open_tokens

pytest.importorskip("tokenizers")
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "code_multitask"
if str(EXPERIMENT) not in sys.path:
    sys.path.append(str(EXPERIMENT))

from code_tasks import STREAMS, Options, build, ensure, prepare, read_schema, report  # noqa: E402
from code_tasks.encoding import CodeTokenizer  # noqa: E402
from code_tasks.findings import find_ruff  # noqa: E402
from code_tasks.functions import functions_of, parse  # noqa: E402
from code_tasks.labels import ALL_RULES, QUALITY, SECURITY  # noqa: E402
from code_tasks.ontology import label_bytes  # noqa: E402
from code_tasks.sources import SPLITS, read_files  # noqa: E402

OPTIONS = Options(vocab_size=400, max_length=128)
BROKEN = {
    "broken.py": b"def (:\n",
    "nulls.py": b"a = 1\0\n",
    "empty.py": b"",
    "latin.py": b"# coding: klingon\n",
    "notes.txt": b"no code",
}


def write_project(root, num_modules=36):
    """Modules with functions, classes, docstrings, examples and findings; tests of them; files that are none."""
    rng = random.Random(0)
    words = list({"".join(rng.choices("aeioubcdfglmnprst", k=rng.randint(4, 8))): None for _ in range(500)})
    (root / "pkg").mkdir(parents=True)
    (root / "tests").mkdir()
    for number in range(num_modules):
        one, (two, three, four, five) = words[number], rng.sample(words[num_modules:], 4)
        code = f'''"""Module {one} of {two}, with café."""
import os
from random import random as draw


def {one}({two}, {three}=[]):
    """Return the {one} of {two} and {three}.

    >>> {one}({number}, [1])
    {number + 1}
    """
    assert {two}, "no {two}"  # naïve
    for {four} in {three}:
        {two} += {four}
    return {two}


class {two.title()}:
    """A {two} with {three}."""

    def __init__(self, {three}):
        self.{three} = {three} * {rng.randint(2, 99)}

    def {four}(self, {five}):
        """Change the {three} by {five} and tell."""
        if self._{three} is None: return "é%s" % {five}
        else:
            return os.path.join(str(self.{three}), str(draw() * {five}))


def copied(value):
    """Return what all files of this project have."""
    return value + 1
'''
        tests = f'''import unittest
from pkg import {one}_module


class {one.title()}Test(unittest.TestCase):
    def test_{one}(self):
        self.assertEqual({one}_module.{one}({number}, [2]), {number + 2})

    def test_{four}(self):
        made = {one}_module.{two.title()}({number})
        self.assertIn("{five}", made.{four}({number}))

    def test_nothing(self):
        self.assertTrue({number})
'''
        (root / "pkg" / f"{one}_module.py").write_bytes(code.encode())
        (root / "tests" / f"test_{one}_module.py").write_text(tests)
    for name, raw in BROKEN.items():
        (root / name).write_bytes(raw)
    shutil.copy(root / "pkg" / f"{one}_module.py", root / "the_same_again.py")
    return root


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_project(tmp_path_factory.mktemp("project") / "code")


@pytest.fixture(scope="module")
def built(project, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "out"
    lines = []
    prepare([str(project)], out, OPTIONS, tell=lines.append)
    assert len(lines) == 4 + len(STREAMS)
    return out


@pytest.fixture(scope="module")
def tokenizer(built):
    return load_tokenizer(built)


@pytest.fixture(scope="module")
def files(project):
    return {split: [file for file in read_files([str(project)])[0] if file.split == split] for split in SPLITS}


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".inputs.json"
    }


def decoded(tokenizer, ids):
    return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


def samples(built, stream, split):
    return open_tokens(built / stream / f"{split}.bin")


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


def test_the_same_code_gives_the_same_bytes_anywhere(built, project, tmp_path):
    moved = tmp_path / "elsewhere"
    for path in sorted(project.rglob("*"), reverse=True):
        if path.is_file():
            target = moved / path.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    prepare([str(moved)], tmp_path / "out", OPTIONS)
    assert contents(tmp_path / "out") == contents(built)


@pytest.mark.parametrize("stage", ["run_ruff", "train", "write_split", "write_json"])
def test_a_stopped_build_leaves_nothing_and_the_next_one_is_whole(built, project, tmp_path, monkeypatch, stage):
    real, calls = getattr(build, stage), []

    def stop(*arguments, **named):
        calls.append(1)
        if len(calls) == (7 if stage == "write_split" else 1):
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(build, stage, stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(project)], tmp_path, OPTIONS)
    assert not (tmp_path / "schema.json").exists()
    monkeypatch.undo()
    ensure([str(project)], tmp_path, OPTIONS)
    assert contents(tmp_path) == contents(built)


def test_several_that_want_the_data_at_once_build_it_once(project, tmp_path, monkeypatch):
    real, made, found = build._build, [], []
    monkeypatch.setattr(build, "_build", lambda *arguments: made.append(1) or real(*arguments))
    run = lambda: found.append(ensure([str(project)], tmp_path / "out", OPTIONS))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert found[0] == found[1] == found[2]


def test_data_that_is_there_is_left_alone_or_refused(built, project, tmp_path):
    before = contents(built)
    prepare([str(project)], built, OPTIONS)
    assert ensure([str(project)], built, OPTIONS) == read_schema(built)
    with pytest.raises(DataError, match="made with vocab_size 400, not 500"):
        ensure([str(project)], built, Options(vocab_size=500, max_length=128))
    with pytest.raises(DataError, match="was made of"):
        ensure([str(tmp_path)], built, OPTIONS)
    (tmp_path / "other.py").write_text("def other():\n    return 1\n")
    with pytest.raises(DataError, match="other code or by other versions"):
        prepare([str(project), str(tmp_path)], built, OPTIONS)
    assert contents(built) == before
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    (copy / "pairs" / "train.bin").unlink()
    with pytest.raises(DataError, match=r"pairs has no train\.bin"):
        ensure([str(project)], copy, OPTIONS)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: [str(root / "nowhere")], "does not exist"),
        (lambda root: [str(root)], "no Python code was found"),
    ],
)
def test_inputs_without_code_are_told_in_one_line(tmp_path, make, words):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=words) as error:
        prepare(make(tmp_path), tmp_path / "out", OPTIONS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"max_length": 3}, "max_length is 3"),
        ({"max_files": 0}, "max_files is 0"),
        ({"validation": 0.6, "test": 0.5}, "shares"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(DataError, match=words):
        Options(**options)


def test_too_little_code_for_the_vocabulary_is_told(project, tmp_path):
    with pytest.raises(DataError, match=r"vocabulary of .* only"):
        prepare([str(project)], tmp_path / "out", Options(vocab_size=60_000))
    assert not (tmp_path / "out" / "schema.json").exists()


@pytest.fixture(scope="module")
def code_tasks_component():
    import_user_modules(["components.py"], EXPERIMENT)
    return lookup("data", "code_tasks").factory


KEYS = {
    "code": {"input_ids", "labels", "simple", "full"},
    "functions": {"input_ids", "attention_mask", "labels", "quality", "security"},
    "tests": {"input_ids", "attention_mask", "labels"},
    "explanations": {"input_ids", "attention_mask", "labels"},
    "pairs": {"input_ids", "attention_mask", "labels", "clarification"},
}


@pytest.mark.parametrize("stream", STREAMS)
def test_batches_of_the_component_have_the_keys_that_tasks_name(code_tasks_component, built, project, stream):
    data = code_tasks_component(stream, inputs=[str(project)], out=str(built), vocab_size=400, max_length=128)
    assert data.vocab_size == 400
    for split in SPLITS:
        batch = next(iter(data.make_loader(split, 4)))
        assert set(batch) == KEYS[stream]
        shape = batch["input_ids"].shape
        assert all(batch[name].shape == shape for name in ("labels", "simple", "full") if name in batch)
        if "quality" in batch:
            assert batch["quality"].shape == (shape[0], len(QUALITY))
            assert batch["security"].shape == (shape[0], len(SECURITY))
        if "attention_mask" in batch:
            padded = batch["attention_mask"] == 0
            assert (batch["input_ids"][padded] == load_tokenizer(built).token_to_id("<|pad|>")).all()
            assert (batch["labels"][padded] == -100).all()
    by_tokens = load_tokens(str(built / stream), read="blocks" if stream == "code" else "documents", length=128)
    assert set(next(iter(by_tokens.make_loader("train", 4)))) == KEYS[stream]


def test_the_component_builds_what_is_missing_and_says_so(code_tasks_component, project, tmp_path, caplog):
    arguments = {"inputs": [str(project)], "out": str(tmp_path / "out"), "vocab_size": 400, "max_length": 128}
    code_tasks_component("pairs", **arguments)
    code_tasks_component("code", **arguments, length=32, mask_rate=0.2)
    assert [record.getMessage() for record in caplog.records if "making" in record.getMessage()] == [
        f"making the data of {project} in {tmp_path / 'out'}, once; it takes a minute or two"
    ]


def test_masked_code_keeps_the_labels_of_its_tokens(code_tasks_component, built, project):
    arguments = {"inputs": [str(project)], "out": str(built), "vocab_size": 400, "max_length": 128, "length": 32}
    plain = code_tasks_component("code", **arguments)
    masked = code_tasks_component("code", **arguments, mask_rate=0.2)
    one, two = (next(iter(data.make_loader("validation", 4))) for data in (plain, masked))
    assert torch.equal(one["full"], two["full"])
    hidden = two["labels"] >= 0
    assert 0.05 < hidden.float().mean() < 0.4
    assert torch.equal(two["labels"][hidden], one["input_ids"][hidden])
    with pytest.raises(DataError, match="mask_rate is for the stream code"):
        code_tasks_component("pairs", **arguments, mask_rate=0.2)


def test_padding_of_labels_of_tokens_is_no_label(built):
    batch = TokenDocuments(samples(built, "code", "train")).gather(np.arange(8), epoch=0, seed=0)
    padded = batch["attention_mask"] == 0
    assert padded.any()
    for name in ("simple", "full"):
        assert (batch[name][padded] == -100).all()
        assert (batch[name][~padded] >= 0).any()


def test_a_stream_for_which_there_is_nothing_is_told(code_tasks_component, tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(30):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 3)
    arguments = {"inputs": [str(folder)], "out": str(tmp_path / "out"), "vocab_size": 270, "max_length": 128}
    code_tasks_component("functions", **arguments)
    with pytest.raises(DataError, match="nothing for the stream tests"):
        code_tasks_component("tests", **arguments)


def test_a_few_files_are_enough_for_a_look(project, tmp_path):
    schema = prepare([str(project)], tmp_path / "out", Options(vocab_size=300, max_length=64, max_files=10))
    assert sum(schema["files"][split]["code"] for split in SPLITS) <= 10
    assert all(schema["files"][split]["code"] for split in SPLITS)


def test_the_script_builds_reports_and_tells_mistakes_in_one_line(project, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("code_multitask_prepare", EXPERIMENT / "prepare.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = ["--out", str(tmp_path / "out")]
    options = ["--inputs", str(project), "--vocab-size", "400", "--max-length", "128"]
    assert script.main([*out, *options]) == 0
    assert "pairs: train" in capsys.readouterr().out
    assert script.main([*out, "--report"]) == 0
    assert capsys.readouterr().out == report(read_schema(tmp_path / "out"))
    assert script.main([*out, *options, "--max-length", "32"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "max_length 128, not 32" in told


def test_the_readme_has_every_label_with_what_makes_it(built):
    readme = (EXPERIMENT / "README.md").read_text(encoding="utf-8")
    wanted = [line.split(" | ")[:3] for line in report(read_schema(built)).split("\n") if line.startswith("| ")]
    rows = {tuple(line.split(" | ")[:3]) for line in readme.split("\n") if line.startswith("| ")}
    labels = [tuple(row) for row in wanted if row[0].removeprefix("| ").lstrip("-").isdigit()]
    assert len(labels) == 8 + 20 + 2 + len(QUALITY) + len(SECURITY)
    assert set(labels) <= rows


@pytest.mark.slow
def test_the_standard_library_has_enough_of_everything(tmp_path):
    schema = prepare(["stdlib"], tmp_path / "out", Options())
    for stream in STREAMS:
        assert all(schema["samples"][stream][split]["samples"] for split in SPLITS)
    assert min(schema["counts"]["code"]["train"]["full"].values()) > 100
    assert min(schema["counts"]["functions"]["train"]["quality"].values()) > 100
