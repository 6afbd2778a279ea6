"""Killed and started again, a corpus comes out as if nothing had happened; several processes make it once."""

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from corpus_texts import SMALL, content, texts, write_folder

from etude.core.errors import DataError
from etude.corpus import ensure_corpus, index, prepare_corpus
from etude.corpus.making import WORK
from etude.corpus.report import folder_lock
from etude.data import TokenWriter

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("texts") / "in", texts(60))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The files of a corpus that was made in one go."""
    return content(prepare_corpus([folder], tmp_path_factory.mktemp("whole") / "out", **SMALL).folder)


@pytest.fixture
def many_parts(monkeypatch):
    """Small parts, so that there is something to go on with."""
    monkeypatch.setattr(index, "PART_BYTES", (1 << 10, 1 << 10))


def killed_again_and_again(folder, out, stride):
    command = [sys.executable, str(HERE / "corpus_killing.py"), str(folder), str(out), str(stride)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_killed_again_and_again(folder, whole, tmp_path):
    """Every attempt gets further and finds the lock of the killed one free; none starts over, or it would never end."""
    done = killed_again_and_again(folder, tmp_path / "out", stride=16)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_killed_after_every_task(folder, whole, tmp_path):
    done = killed_again_and_again(folder, tmp_path / "out", stride=2)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8
    assert content(tmp_path / "out") == whole


class Stop(Exception):
    """Ends an attempt in this process."""


def stop_at(step, done_at_least=1):
    def progress(name, done, total):
        if name == step and done >= done_at_least:
            raise Stop

    return progress


@pytest.mark.parametrize("step", ["encoding", "writing"])
def test_goes_on_from_finished_parts(folder, whole, tmp_path, many_parts, step):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare_corpus([folder], out, progress=stop_at(step), **SMALL)
    (work,) = out.glob(f"{WORK}*")
    kept = {path: path.stat().st_mtime_ns for path in work.glob("*.npz")}
    assert len(kept) >= 2
    steps = []

    def progress(name, done, total):
        steps.append(name)
        if name == "writing":
            assert kept.items() <= {path: path.stat().st_mtime_ns for path in work.glob("*.npz")}.items()

    assert not prepare_corpus([folder], out, progress=progress, **SMALL).reused
    assert "writing" in steps
    assert "reading" not in steps, "what was done is not done again"
    assert content(out) == whole


def test_a_damaged_part_is_made_again(folder, whole, tmp_path, many_parts):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare_corpus([folder], out, progress=stop_at("writing", 0), **SMALL)
    (part,) = out.glob(f"{WORK}*/train-0.npz")
    raw = bytearray(part.read_bytes())
    raw[200] ^= 1
    part.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-0\.npz is damaged"):
        prepare_corpus([folder], out, **SMALL)
    prepare_corpus([folder], out, **SMALL)
    assert content(out) == whole


def test_a_disk_that_is_full_in_the_end_costs_nothing_that_was_done(folder, whole, tmp_path, many_parts, monkeypatch):
    out = tmp_path / "out"

    def full(writer):
        with writer._telling_of_the_disk():
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TokenWriter, "close", full)
        with pytest.raises(DataError, match="disk is full"):
            prepare_corpus([folder], out, **SMALL)
    steps = []
    prepare_corpus([folder], out, progress=lambda name, done, total: steps.append(name), **SMALL)
    assert "reading" not in steps
    assert content(out) == whole


def test_changed_inputs_begin_again(whole, tmp_path, many_parts, caplog):
    folder, out = write_folder(tmp_path / "in", texts(60)), tmp_path / "out"
    (folder / "59.txt").write_text("another text in its place")
    with pytest.raises(Stop):
        prepare_corpus([folder], out, progress=stop_at("encoding"), **SMALL)
    write_folder(folder, texts(60))
    with caplog.at_level("WARNING", "etude"):
        prepare_corpus([folder], out, **SMALL)
    assert "differ from those of the interrupted run" in caplog.text
    assert content(out) == whole


def test_killed_while_replacing_another_corpus(folder, whole, tmp_path, many_parts, monkeypatch):
    """After the old dataset.json is gone there is no corpus until the new one is whole."""
    out = tmp_path / "out"
    prepare_corpus([write_folder(tmp_path / "old", texts(40, seed=3))], out, **SMALL)

    def stop(**_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("etude.corpus.making.CorpusReport", stop)  # the files are in place, dataset.json is not
        with pytest.raises(Stop):
            prepare_corpus([folder], out, overwrite=True, **SMALL)
    assert not (out / "dataset.json").exists()
    prepare_corpus([folder], out, **SMALL)
    assert content(out) == whole


def test_killed_while_cleaning_up(whole, tmp_path, many_parts, monkeypatch):
    """Half of what was kept is not taken for the whole: here the unpacked texts are gone, but not where they lay."""
    out, packed = tmp_path / "out", tmp_path / "all.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts(60)).encode()))

    def remove_some(path, **_):
        for kept in [*path.glob("texts"), *path.glob("train-*")]:
            kept.unlink()
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", remove_some)
        with pytest.raises(Stop):
            prepare_corpus(packed, out, **SMALL)
    prepare_corpus(packed, out, overwrite=True, **SMALL)
    assert content(out) == whole, "and the rest is removed, too"


def test_an_interrupted_run_says_how_to_go_on(folder, tmp_path, many_parts):
    def interrupt(name, done, total):
        if name == "encoding" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        prepare_corpus([folder], tmp_path / "out", progress=interrupt, **SMALL)
    assert caught.value.__notes__ == ["run the same command again to continue"]


# ------------------------------------------------------------------------------------------------ several processes


def test_folder_is_written_by_one_process(folder, tmp_path):
    words = f"is being written by process {os.getpid()}; wait until it ends"
    with folder_lock(tmp_path, wait=False), pytest.raises(DataError, match=words):
        prepare_corpus([folder], tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_that_need_a_corpus_make_it_once(folder, whole, tmp_path):
    """Threads here, each with a lock of its own, as processes have; one works, the others wait and find it done."""
    worked, problems = [], []

    def need(number):
        def progress(step, done, total):
            worked.append(number)

        try:
            assert ensure_corpus([folder], tmp_path / "out", progress=progress, **SMALL) == tmp_path / "out"
            assert (tmp_path / "out" / "dataset.json").exists()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=need, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(set(worked)) == 1
    assert content(tmp_path / "out") == whole
