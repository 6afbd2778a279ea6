"""Delimited text, against the csv module: forms, encodings, blocks, threads, texts."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from table_samples import whole

from etude.data.catalog import delimited
from etude.data.catalog.table_files import TableFormat
from etude.data.catalog.tabular import load_csv

cells = st.one_of(
    st.floats(-1e9, 1e9).map(repr), st.integers(-(10**6), 10**6).map(str), st.decimals(-1000, 1000, places=3).map(str)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(
        st.tuples(cells, cells, st.sampled_from(["a", 'b "x"', "c,d", "e\nf", "ü"])), min_size=2, max_size=40
    ),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    block=st.sampled_from([7, 64, 4096]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_a_file_is_read_as_the_csv_module_reads_it(write, monkeypatch, rows, quoting, block, end):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    rows = [*rows, ("1", "2", "a"), ("1", "2", "ü")]
    text = io.StringIO()
    csv.writer(text, quoting=quoting, lineterminator=end).writerows([("x", "y", "label"), *rows])
    splits = whole(write(text.getvalue()), target="label")
    classes = sorted({row[2] for row in rows})
    assert splits.facts["classes"] == classes
    assert splits.train.labels.tolist() == [classes.index(row[2]) for row in rows]
    expected = np.array([[float(row[0]), float(row[1])] for row in rows]).astype(np.float32)
    np.testing.assert_allclose(splits.train.data.numpy(), expected, rtol=2e-7)


@pytest.mark.parametrize("block", [16, 50, 10_000])
def test_blocks_do_not_matter(write, monkeypatch, block):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    rows = [[f"{i * 0.37 - 5:.3f}", f"{i % 7}", "1e-3", ["on", "off"][i % 2]] for i in range(60)]
    splits = whole(write("\n".join(",".join(row) for row in [["a", "b", "c", "y"], *rows])), target="y")
    np.testing.assert_array_equal(splits.train.data, np.array([row[:3] for row in rows], dtype=float).astype("f4"))
    assert splits.facts["classes"] == ["off", "on"]


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("\ufeffa,y\n1,2\n", {}, [[1.0]]),
        ("a;y\n1,5;2\n", {"delimiter": ";", "decimal": ","}, [[1.5]]),
        ('a,y\n"1,234.5",2\n', {"thousands": ","}, [[1234.5]]),
        ("a;y\n1.234,5;2\n", {"delimiter": ";", "decimal": ",", "thousands": "."}, [[1234.5]]),
        ("a,y\n\n1,2\n\n\n3,4", {}, [[1.0], [3.0]]),
        ("a,y\r1,2\r3,4\r", {}, [[1.0], [3.0]]),
        (" a , y \n 1 , 2 \n", {}, [[1.0]]),
        ("a,y\n1e3,2\n-1E-2,4\n", {}, [[1000.0], [-0.01]]),
        (",y\n1,2\n", {"columns": ["column_1"]}, [[1.0]]),
        ("a,b,y\n1,x,2\n3,z,4\n", {"exclude": ["b"]}, [[1.0], [3.0]]),
        ("a,b,y\n1,x,2\n3,z,4\n", {}, [[1.0, 1.0, 0.0], [3.0, 0.0, 1.0]]),
        ("a,y\n9,2\n10,4\n", {"categorical": ["a"]}, [[1.0, 0.0], [0.0, 1.0]]),
        ("a,y\n1,2\n,4\n", {"missing": "mean"}, [[1.0], [1.0]]),
        ("a,y\n1,2\nNaN,4\n", {"missing": "indicator"}, [[1.0, 0.0], [1.0, 1.0]]),
        ("a,b,y\n1,x,2\n3,NA,4\n", {"missing": "mean"}, [[1.0, 1.0], [3.0, 0.0]]),
    ],
)
def test_forms_of_files(write, content, options, expected):
    splits = whole(write(content), **{"target": "y", **options})
    assert splits.train.data.tolist() == torch.tensor(expected).tolist()
    assert splits.train.labels.shape == (len(expected), 1)
    assert splits.input_shape == (len(expected[0]),)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_encodings(write, encoding):
    path = write("größe,y\n1,ä\n2,ö\n", encoding=encoding)
    assert whole(path, target="y", encoding=encoding).facts["classes"] == ["ä", "ö"]


def test_tabs_in_tsv(write):
    assert whole(write("a\ty\n1\t2\n", "d.tsv"), target="y").train.data.tolist() == [[1.0]]


SAME_END = ["north district", "south district", " district", "district ", "\0district", "a district of 25 characters"]
short_texts = st.text(st.characters(blacklist_characters='",\r\n', blacklist_categories=("Cs",)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(short_texts | st.sampled_from(SAME_END), min_size=1, max_size=40),
    block=st.sampled_from([40, 4096]),
)
def test_texts_are_those_that_python_reads(write, monkeypatch, texts, block):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    texts = [text for text in texts if text.splitlines() in ([text], [])]
    content = "a,b\n" + "".join(f"{text},1\n" for text in [*texts, "x"])
    column = TableFormat(texts=frozenset("a")).read(Path(write(content)), None).texts["a"]
    found = [None if code < 0 else column.values[code] for code in column.codes]
    words = [text.strip() for text in [*texts, "x"]]
    assert found == [None if word.lower() in delimited.MISSING else word for word in words]


def test_threads_do_not_matter(write, monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 500)
    source = np.random.default_rng(0)
    rows = [
        f"{a:.6g},{b!r},{'uvw'[c]},{y}"
        for a, b, c, y in zip(
            source.normal(size=300),
            source.normal(size=300).tolist(),
            source.integers(0, 3, 300),
            source.integers(0, 2, 300),
            strict=True,
        )
    ]
    path = write("a,b,c,y\n" + "\n".join(rows))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(load_csv(path, "y", task="classification"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert other.facts == found[0].facts
        assert torch.equal(other.train.data, found[0].train.data)
        assert torch.equal(other.test.labels, found[0].test.labels)
