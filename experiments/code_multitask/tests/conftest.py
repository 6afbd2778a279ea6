"""Data of a small folder of code, built once for all tests of this experiment."""

import pytest
from code_project import OPTIONS, write_project
from code_tasks import STREAMS, prepare
from code_tasks.sources import SPLITS, read_files

from etude.corpus import load_tokenizer


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return write_project(tmp_path_factory.mktemp("project") / "code")


@pytest.fixture(scope="session")
def built(project, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "out"
    lines = []
    prepare([str(project)], out, OPTIONS, tell=lines.append)
    assert len(lines) == 4 + len(STREAMS)
    return out


@pytest.fixture(scope="session")
def tokenizer(built):
    return load_tokenizer(built)


@pytest.fixture(scope="session")
def files(project):
    return {split: [file for file in read_files([str(project)])[0] if file.split == split] for split in SPLITS}
