"""Which files are taken: named ones always, those of folders by kind; the standard library without tests and tables."""

import os
import sysconfig
from pathlib import Path

import pytest

from etude.core.errors import DataError
from etude.corpus.sources import find_sources


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name in (
        *("a.py", "b.txt", "c.png", "Makefile", "d.jsonl", "e.txt.gz", "notes.md", ".hidden.py"),
        *("sub/a.py", "sub/deep/x.rs", ".git/config.txt", "__pycache__/z.py", "node_modules/m.js"),
        *("env/pyvenv.cfg", "env/lib/big.py", "out/old.txt"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def names(found, root) -> list[str]:
    return [Path(source.path).relative_to(root).as_posix() for source in found.files]


def test_folder_gives_text_and_code(tree):
    found = find_sources([tree], out=tree / "out")
    assert names(found, tree) == [
        *("Makefile", "a.py", "b.txt", "d.jsonl", "e.txt.gz", "notes.md", "sub/a.py", "sub/deep/x.rs")
    ]
    assert found.skipped == {"other kinds of file": 1}
    kinds = {Path(source.path).name: (source.kind, source.packed) for source in found.files}
    assert (kinds["d.jsonl"], kinds["e.txt.gz"], kinds["a.py"]) == (("json", False), ("text", True), ("text", False))


def test_include_and_exclude(tree):
    assert names(find_sources([tree], include=["*.py"], exclude=["env"]), tree) == ["a.py", "sub/a.py"]
    assert names(find_sources([tree], include=["*.py"], exclude=["sub/*"]), tree) == ["a.py"]
    assert names(find_sources([tree], include=["c.png"]), tree) == ["c.png"]
    assert names(find_sources([tree], include=["sub"]), tree) == ["sub/a.py", "sub/deep/x.rs"]


def test_named_files_and_patterns(tree, monkeypatch):
    assert names(find_sources([tree / "c.png"]), tree) == ["c.png"]
    assert names(find_sources([f"{tree}/**/a.py"]), tree) == ["a.py", "sub/a.py"]
    monkeypatch.chdir(tree)
    assert [source.path for source in find_sources(["sub/**/*.rs"]).files] == ["sub/deep/x.rs"]


def test_file_given_twice_is_taken_once(tree):
    (tree / "link.py").symlink_to(tree / "a.py")
    found = find_sources([tree / "a.py", tree, tree / "link.py"], include=["*.py"], exclude=["env", "sub"])
    assert names(found, tree) == ["a.py"]


@pytest.mark.skipif(os.name == "nt", reason="no named pipes")
def test_pipes_and_dangling_links_are_counted(tree):
    os.mkfifo(tree / "pipe.txt")
    (tree / "gone.txt").symlink_to(tree / "nothing.txt")
    assert find_sources([tree]).skipped["unreadable"] == 2


def test_standard_library_is_the_default():
    root = Path(sysconfig.get_path("stdlib"))
    found = find_sources([])
    assert found.files == find_sources(["stdlib"]).files
    inside = names(found, root)
    assert {"ast.py", "asyncio/tasks.py", "json/decoder.py"} <= set(inside)
    assert all(name.endswith(".py") for name in inside)
    folders = {part for name in inside for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__", "encodings"}
    assert not found.skipped


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nowhere"], "input 'nowhere' does not exist; pass a file, a folder, a pattern or the word stdlib"),
        (["no*.txt"], "nothing matches 'no\\*.txt'"),
        (["empty"], "no text or code was found in empty; set"),
        (["images"], "no text or code was found in images; 1 other kinds of file; set .* with --include"),
    ],
)
def test_nothing_found(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=words):
        find_sources(given)
