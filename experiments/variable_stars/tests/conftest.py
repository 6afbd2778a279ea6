"""Data of a small catalogue, made once for all tests of this experiment."""

import pytest
from star_catalogue import OPTIONS, lines_of, write_catalogue
from stars import prepare


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The small data, the folder with its catalogue, and its schema."""
    with pytest.MonkeyPatch.context() as patch:
        root = write_catalogue(tmp_path_factory.mktemp("root"), lines_of(), patch)
        out = tmp_path_factory.mktemp("out") / "stars"
        return out, root, prepare(out, OPTIONS, root=str(root), download=False)
