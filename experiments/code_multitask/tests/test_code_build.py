"""Building the data of the code experiment: the same bytes anywhere, whole or not at all, one line for a mistake."""

import importlib.util
import shutil
import threading

import pytest
from code_project import EXPERIMENT, OPTIONS, contents
from code_tasks import STREAMS, Options, build, ensure, prepare, read_schema, report
from code_tasks.labels import QUALITY, SECURITY
from code_tasks.sources import SPLITS

from etude.core import DataError


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
def test_inputs_without_code_are_reported_in_one_line(tmp_path, make, words):
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


def test_too_little_code_for_the_vocabulary_is_reported(project, tmp_path):
    with pytest.raises(DataError, match=r"vocabulary of .* only"):
        prepare([str(project)], tmp_path / "out", Options(vocab_size=60_000))
    assert not (tmp_path / "out" / "schema.json").exists()


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
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "max_length 128, not 32" in printed


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
