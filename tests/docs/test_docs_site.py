"""The site of the documentation: built as `make docs` builds it, without a warning."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # a link that leads nowhere is a warning, and that an error
    return folder


def words_of(page):
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


def test_every_guide_note_and_experiment_has_a_page(site):
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/README.md")]
    places = [page.relative_to(ROOT) for page in pages]
    folders = [place.parent if place.name == "README.md" else place.with_suffix("") for place in places]
    assert folders
    assert [str(folder) for folder in folders if not (site / folder / "index.html").is_file()] == []


def test_pictures_of_experiments_are_there(site):
    assert (site / "experiments" / "lenet5" / "curve.svg").is_file()


def test_code_is_shown_as_code(site):
    for page in site.glob("**/index.html"):
        words = words_of(page)
        assert "```" not in words, page
        assert 'title="' not in words, page
    assert "&gt;&gt;&gt;" in (site / "reference" / "etude.losses" / "index.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(site):
    import etude

    words = words_of(site / "reference" / "etude" / "index.html")
    functions = [name for name in etude.__all__ if getattr(getattr(etude, name), "__qualname__", "") == name]
    assert len(functions) > 20
    assert [name for name in functions if name not in words] == []


def test_the_search_knows_the_text(site):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {entry["location"].partition("#")[0] for entry in entries if "capture" in entry["text"]}
    assert "docs/guides/speed/" in places


def test_nothing_is_fetched_from_elsewhere(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page) == []
