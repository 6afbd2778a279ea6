"""Files that pyarrow reads: CSV as our own reader reads it, and Parquet."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from etude.core import DataError
from etude.data.catalog import arrow_lines, delimited
from etude.data.catalog.table_files import TableFormat
from etude.data.catalog.tabular import load_csv, load_parquet
from forked_python import run_python

READ_PARQUET = """
import sys
from etude.data.catalog.tabular import load_parquet

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            print("pandas is imported")

sys.meta_path.insert(0, Finder())
load_parquet(sys.argv[1], "y", missing="mean")
print("read")
"""
FORMS = [
    "",
    " ",
    "NA",
    "nUlL",
    " nan",
    "-nan",
    "nan(1)",
    "inf",
    "-Infinity",
    "+1",
    "1_0",
    "1e5",
    "1E-05",
    ".5",
    "5.",
    "-.5",
    "0x1",
]
FORMS += [
    "-0",
    "00012",
    "1e400",
    "1e-400",
    "\t7 ",
    "9007199254740993",
    "0.1000000000000000055511151231257827",
    "\ufeff1",
    "½",
    "٣",
]
hostile = (
    st.sampled_from(FORMS)
    | st.floats(allow_nan=False).map(repr)
    | st.from_regex(r"-?[0-9]{1,22}(\.[0-9]{0,22})?", fullmatch=True)
    | st.text(st.sampled_from("0123456789+-.eEnaNif() _\t\0xü'\x1c\x85"), max_size=6)
)


def read_both(monkeypatch, path, form):
    """Return what is read with pyarrow and without: numbers and keys to the last bit, texts and lines, or the error."""
    found = []
    for size in (0, 2**60):
        monkeypatch.setattr(arrow_lines, "MIN_BYTES", size)
        try:
            table = form.read(Path(path), None)
        except DataError as error:
            found.append(str(error))
        else:
            texts = {name: (column.codes.tolist(), column.values) for name, column in table.texts.items()}
            found.append((table.numbers.tobytes(), table.keys.tolist(), [*chain(*table.lines)], texts))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(hostile, hostile, hostile), min_size=1, max_size=6),
    plain=st.lists(st.sampled_from(["1.5,-2,u\n", "7.25,,v \n", ",1e3,w\n"]), max_size=15),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    texts=st.sampled_from([frozenset("c"), frozenset("ac"), frozenset()]),
    odd=st.sampled_from(["", "1,2\n", "1,2,3,4\n", "\n", '"1",2,"x"\n', ",,\n"]),
    block=st.sampled_from([20, 100, 10_000]),
    chunk=st.sampled_from([50, 10_000]),
    span=st.sampled_from([1, 30, 10_000]),
    begin=st.sampled_from(["", "\n", "\ufeff", "\ufeff\n\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    standardize=st.booleans(),
)
def test_what_is_read_does_not_depend_on_pyarrow(
    write, monkeypatch, rows, plain, end, texts, odd, block, chunk, span, begin, encoding, standardize
):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    monkeypatch.setattr(arrow_lines, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(arrow_lines, "SPAN_BYTES", span)
    lines = [begin, "a,b,c\n", *plain, *(f"{','.join(row)}\n" for row in rows), odd]
    path = write("".join(lines).replace("\n", end).encode(encoding, "replace"))
    form = TableFormat(texts=texts, standardize=standardize, encoding=encoding)
    with_pyarrow, without = read_both(monkeypatch, path, form)
    assert with_pyarrow == without


def test_pyarrow_reads_plain_files(write, monkeypatch):
    pytest.importorskip("pyarrow")
    used = []
    read = arrow_lines.ArrowReader.read
    monkeypatch.setattr(arrow_lines.ArrowReader, "read", lambda *given: used.append(read(*given)) or used[-1])
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 100)
    monkeypatch.setattr(arrow_lines, "SPAN_BYTES", 100)
    path = write("a,b,c\n" + "".join(f"{i / 7!r},{i},{'uvw'[i % 3]} \n" for i in range(100)))
    with_pyarrow, without = read_both(monkeypatch, path, TableFormat())
    assert with_pyarrow == without
    assert len(used) > 5
    assert all(isinstance(block, arrow_lines.ArrowBlock) for block in used)


def test_parquet_gives_what_csv_gives(write, tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = np.random.default_rng(1)
    columns = {
        "a": source.normal(size=200).round(6).tolist(),
        "b": source.integers(0, 9, 200).tolist(),
        "c": [["x", "y", None][i % 3] for i in range(200)],
        "y": [["no", "yes"][i % 2] for i in range(200)],
    }
    parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    rows = zip(*columns.values(), strict=True)
    text = "a,b,c,y\n" + "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
    ours = load_csv(write(text), "y", missing="mean")
    theirs = load_parquet(str(tmp_path / "d.parquet"), "y", missing="mean")
    assert ours.facts == theirs.facts
    assert torch.equal(ours.train.data, theirs.train.data)


def test_parquet_that_is_none(write):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"d\.parquet"):
        load_parquet(write("a,y\n1,2\n", "d.parquet"), "y")


@given(
    st.lists(st.none() | st.integers(-100, 100), max_size=70),
    st.integers(0, 9),
    st.sampled_from(["int32", "float64"]),
)
def test_cells_are_values_and_nulls_are_the_missing_one(cells, start, kind):
    pa = pytest.importorskip("pyarrow")
    found = arrow_lines.arrow_values(pa.array(cells, kind).slice(start), -7)
    assert found.dtype == kind
    assert found.tolist() == [-7 if cell is None else cell for cell in cells[start:]]


def test_parquet_is_read_without_pandas(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1.0, None] * 20, "b": [True, None] * 20, "c": ["u", None] * 20, "y": ["no", "yes"] * 20}
    parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    found = run_python("-c", READ_PARQUET, tmp_path / "d.parquet")
    assert (found.returncode, found.stdout.strip()) == (0, "read"), found.stderr
