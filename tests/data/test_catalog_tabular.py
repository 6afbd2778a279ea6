"""`csv` and `parquet`: against the csv module and plain formulas; hostile files."""

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from etude.core import ConfigError, DataError
from etude.data.catalog import arrow_lines, delimited, table_files
from etude.data.catalog.holdout import hold_out
from etude.data.catalog.table_files import TableFormat
from etude.data.catalog.tabular import load_csv, load_parquet


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def write(content, name="d.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
        return str(path)

    return write


def whole(path, **options):
    """All rows in their order, with nothing held out and nothing standardised."""
    return load_csv(path, **{"validation": 0.0, "test": 0.0, "standardize": False, **options})


# ------------------------------------------------------------------------------------------------ reading

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


# ------------------------------------------------------------------------------------------------ hostile files

HOSTILE = {
    "ragged, too long": ("a,y\n1,2\n1,2,3\n", {}, [":3", "3 values", "2 columns"]),
    "ragged, too short": ("a,y\n1,2\n1\n", {}, [":3", "1 values"]),
    "ragged lines that balance": ("a,b,y\n1,2\n1,2,3,4\n", {}, [":2", "2 values"]),
    "ragged below quotes": ('a,y\n"1",2\n3,4,5\n', {}, [":3", "3 values"]),
    "open quote": ('a,y\n"1,2\n3,4\n', {}, [":2", "quote"]),
    "text after a quote": ('a,y\n"1"x,2\n', {}, [":2"]),
    "empty": ("", {}, ["empty"]),
    "only empty lines": ("\n\n\n", {}, ["empty"]),
    "header only": ("a,y\n", {}, ["no rows"]),
    "header without a line end": ("a,y", {}, ["no rows"]),
    "names twice": ("a,a,y\n1,2,3\n", {}, [":1", "'a'"]),
    "no target": ("a,b\n1,2\n", {}, ["'y'", "a, b"]),
    "nearly the target": ("a,Y\n1,2\n", {}, ["'y'", "Y"]),
    "unknown column": ("a,y\n1,2\n", {"columns": ["aa"]}, ["'aa'"]),
    "unknown column to exclude": ("a,y\n1,2\n", {"exclude": ["aa"]}, ["'aa'"]),
    "target among columns": ("a,y\n1,2\n", {"columns": ["a", "y"]}, ["'y'"]),
    "only a target": ("y\n1\n2\n", {}, ["'y'", "no column"]),
    "another delimiter": ("a;y\n1;2\n", {}, ["delimiter"]),
    "infinite": ("a,y\n1,2\ninf,3\n", {}, [":3", "'a'", "infinite"]),
    "too large": ("a,y\n1,2\n1e999,3\n", {}, [":3", "'a'", "infinite"]),
    "infinite target": ("a,y\n1,2\n2,-inf\n", {}, [":3", "'y'", "infinite"]),
    "missing": ("a,y\n1,2\n,3\n", {}, [":3", "'a'", "missing"]),
    "missing category": ("a,y\nx,2\nnull,3\nz,2\n", {}, [":3", "'a'", "missing"]),
    "missing target": ("a,y\n1,2\n2,\n", {}, [":3", "'y'"]),
    "missing class": ("a,y\n1,x\n2,\n3,z\n", {}, [":3", "'y'"]),
    "nothing but missing": ("a,b,y\n1,,2\n2,,3\n", {"missing": "mean"}, ["'b'", "exclude"]),
    "thousands": ('a,y\n"1,234",2\n', {}, [":2", "'1,234'", "thousands"]),
    "one class": ("a,y\n1,x\n2,x\n", {}, ["'y'", "one class", "x"]),
    "numbers with underscores": ("a,y\n1_000,2\n2,3\n", {"task": "regression"}, None),
    "regression of text": ("a,y\n1,x\n2,z\n", {"task": "regression"}, ["'y'", "regression"]),
    "too many categories": (
        "a,y\n" + "".join(f"t{i % 33},{i}\n" for i in range(66)),
        {},
        ["'a'", "33", "exclude: [a]"],
    ),
    "a typing error among numbers": (
        "a,y\n" + "".join(f"{'1O.5' if i == 7 else i * 1.5},{i}\n" for i in range(60)),
        {},
        [":9", "'a'", "'1O.5'", "exclude: [a]"],
    ),
    "amounts": ("a,y\n" + "".join(f"${i}.50,{i}\n" for i in range(60)), {}, [":2", "'a'", "'$0.50'"]),
    "percentages": ("a,y\n" + "".join(f"{i % 40} %,{i}\n" for i in range(60)), {}, [":2", "'a'", "'0 %'"]),
    "UTF-16 without a mark": ("a,y\n1,2\n".encode("utf-16-le"), {}, [":1", "encoding", "utf-16-le"]),
    "a folder": (None, {}, ["folder"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(write, tmp_path, case):
    content, options, facts = HOSTILE[case]
    path = str(tmp_path) if content is None else write(content)
    if facts is None:  # a text, not a number: two categories
        assert sorted(whole(path, target="y", **options).facts["features"]) == ["a=1_000", "a=2"]
        return
    with pytest.raises((DataError, ConfigError)) as caught:
        whole(path, target="y", **options)
    message = str(caught.value)
    assert "\n" not in message
    for fact in facts:
        assert fact in message


def test_a_text_below_numbers_is_found_in_a_later_block(write, monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 32)
    with pytest.raises(DataError, match=r":42: column 'a' holds 'oops'.*categorical"):
        whole(write("a,y\n" + "1.5,2\n" * 40 + "oops,3\n"), target="y")


@pytest.mark.parametrize("block", [5, 1000])
def test_a_wrong_encoding_names_the_byte(write, monkeypatch, block):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    path = write(b"a,y\n1,x\n2,caf\xe9\n3,x\n")
    with pytest.raises(DataError, match=r"0xe9 at offset 13.*encoding"):
        whole(path, target="y")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.csv does not exist"):
        whole(str(tmp_path / "nothing.csv"), target="y")


@pytest.mark.parametrize(
    ("test", "facts"),
    [
        ("b,y\n1,p\n", ["t.csv", "'a'"]),
        ("a,c,y\n1,mauve,p\n", ["t.csv:2", "'c'", "mauve", "unseen"]),
        ("a,c,y\n1,red,r\n", ["t.csv:2", "'y'", "p, q"]),
        ("a,c,y\nx,red,p\n", ["t.csv:2", "'a'", "'x'"]),
        ("a,c,y\n", ["t.csv", "no rows"]),
    ],
)
def test_a_test_file_that_does_not_fit(write, test, facts):
    train = write("a,c,y\n1,red,p\n2,blue,q\n")
    with pytest.raises(DataError) as caught:
        load_csv(train, "y", validation=0.0, test=write(test, "t.csv"))
    for fact in facts:
        assert fact in str(caught.value)


def test_unseen_categories_as_zeros(write):
    train, test = write("c,y\nred,p\nblue,q\n"), write("c,y\nmauve,p\n", "t.csv")
    splits = load_csv(train, "y", validation=0.0, test=test, unseen="zeros")
    assert splits.test.data.tolist() == [[0.0, 0.0]]


# ------------------------------------------------------------------------------------------------ parts and numbers


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), min_size=10, max_size=200),
    st.floats(0.1, 0.4),
    st.floats(0.1, 0.4),
)
def test_parts_are_disjoint_complete_and_as_large_as_asked(keys, validation, test):
    parts = hold_out(np.array(keys, dtype=np.uint64), validation, test)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(keys)))
    assert len(parts["validation"]) == round(validation * len(keys))
    assert len(parts["test"]) == round(test * len(keys))
    order = np.argsort(np.array(keys, dtype=np.uint64), kind="stable")
    assert parts["test"].tolist() == sorted(order[: len(parts["test"])].tolist())


def test_different_rows_have_different_keys(write):
    grid = "\n".join(f"{a},{b},{c}" for a in range(16) for b in range(16) for c in range(16))
    keys = TableFormat().read(Path(write(f"a,b,c\n{grid}")), None).keys
    assert len(set(keys.tolist())) == 16**3
    assert abs(np.mean(keys < 2**63) - 0.5) < 0.05


def rows_of(part):
    return sorted(map(tuple, torch.cat([part.data, part.labels], 1).tolist()))


def test_parts_do_not_depend_on_the_order_of_rows(write):
    lines = [f"{i},{i % 5},{i * i}" for i in range(100)]
    before = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1)
    random.Random(0).shuffle(lines)
    after = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1)
    other = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1, seed=1)
    for part, size in (("train", 70), ("validation", 20), ("test", 10)):
        assert rows_of(getattr(before, part)) == rows_of(getattr(after, part))
        assert rows_of(getattr(before, part)) != rows_of(getattr(other, part))
        assert len(getattr(before, part)) == size


@pytest.mark.parametrize(("shares", "fact"), [((0.01, 0.0), "none"), ((0.5, 0.5), "train")])
def test_shares_that_leave_nothing(write, shares, fact):
    with pytest.raises(DataError, match=fact):
        whole(write("a,y\n1,2\n2,3\n3,4\n4,5\n"), target="y", validation=shares[0], test=shares[1])


def test_numbers_are_standardised_by_the_training_part(write):
    source = np.random.default_rng(0)
    table = source.normal(
        1.7e9, 50.0, (200, 2)
    )  # as large as times in seconds: float32 alone could not tell them apart
    text = "a,y\n" + "\n".join(f"{a:.6f},{y:.6f}" for a, y in table)
    raw = whole(write(text), target="y", validation=0.25, test=0.25)
    splits = load_csv(write(text), "y", validation=0.25, test=0.25, standardize_target=True)
    facts = splits.facts
    assert raw.facts["rows"] == facts["rows"] == {"train": 100, "validation": 50, "test": 50}
    read = np.array([[float(f"{value:.6f}") for value in row] for row in table])
    (mean, std), (target_mean, target_std) = [
        (facts["mean"][0], facts["std"][0]),
        (facts["target_mean"], facts["target_std"]),
    ]
    expected = {((a - mean) / std, (y - target_mean) / target_std) for a, y in read}
    found = torch.cat(
        [torch.cat([part.data, part.labels], 1) for part in (splits.train, splits.validation, splits.test)]
    )
    np.testing.assert_allclose(np.sort(found, 0), np.sort(np.array(sorted(expected)), 0), rtol=1e-5, atol=1e-6)
    train = splits.train.data.double()
    assert abs(train.mean()) < 1e-6
    assert abs(train.std(correction=0) - 1) < 1e-6
    assert abs(splits.test.data.double().mean()) > 1e-4  # the training part's numbers, not its own


def test_a_constant_column_is_zero_and_stays_finite(write):
    splits = load_csv(write("a,b,y\n" + "5,%d,1\n5,%d,2\n" * 2 % (1, 2, 3, 4)), "y", validation=0.0, test=0.0)
    assert splits.train.data[:, 0].tolist() == [0.0] * 4


def test_a_missing_value_gets_the_mean_of_the_training_part_only(write):
    train, test = write("a,y\n1,1\n3,2\n,3\n"), write("a,y\n,1\n100,1\n", "t.csv")
    splits = load_csv(train, "y", validation=0.0, test=test, missing="mean", standardize=False)
    assert splits.train.data.flatten().tolist() == [1.0, 3.0, 2.0]
    assert splits.test.data.flatten().tolist() == [2.0, 100.0]


def test_classes_of_numbers_are_sorted_by_value(write):
    splits = whole(write("a,y\n1,10\n2,9\n3,1\n"), target="y", task="classification")
    assert splits.facts["classes"] == ["1", "9", "10"]
    assert splits.train.labels.tolist() == [2, 1, 0]
    assert splits.num_classes == 3
    assert splits.model_sizes() == {"num_classes": 3, "input_shape": (1,), "in_features": 1, "out_features": 3}


def test_the_fingerprint_is_that_of_the_values(write):
    one, same, other = (
        whole(write(text), target="y").facts["fingerprint"]
        for text in ("a,y\n1,2\n", "a,y\n1.0,2.00\n", "a,y\n1,3\n")
    )
    assert one == same != other


def test_the_fingerprint_is_that_of_every_part_and_of_the_settings(write):
    train, test = write("a,c,y\n1,u,2\n2,v,3\n3,u,4\n"), write("a,c,y\n1,u,2\n", "t.csv")
    first = load_csv(train, "y", validation=0.0, test=test).facts["fingerprint"]
    assert load_csv(train, "y", validation=0.0, test=test).facts["fingerprint"] == first
    others = [load_csv(train, "y", validation=0.0, test=test, standardize=False)]
    others.append(load_csv(train, "y", validation=0.0, test=test, exclude=["c"]))
    others.append(load_csv(train, "y", validation=0.0, test=write("a,c,y\n1,v,2\n", "t.csv")))
    others.append(load_csv(write("a,c,y\n2,v,3\n1,u,2\n3,u,4\n"), "y", validation=0.0, test=test))  # another order
    others.append(
        load_csv(write("a,c,y\n2,u,1\n2,v,3\n3,u,4\n"), "y", validation=0.0, test=test)
    )  # in another column
    assert first not in [splits.facts["fingerprint"] for splits in others]


# ------------------------------------------------------------------------------------------------ columns that are none

NO_FEATURES = {
    "Unnamed: 0": lambda i: i,
    "": lambda i: i + 1,
    "id": lambda i: 7919 * i + 10**9,
    "customer_id": lambda i: 2**40 - i,
    "PassengerId": lambda i: (i * 37) % 60,
    "name": lambda i: f"Person {i}",
    "label": lambda i: i % 3,
    "label_text": lambda i: f"0{i % 3}",
}


def table_with(name, value, rows=60, target=lambda i: i % 3):
    return f"a,{name},y\n" + "".join(f"{i * i % 11},{value(i)},{target(i)}\n" for i in range(rows))


@pytest.mark.parametrize(
    ("name", "task"),
    [*((name, "classification") for name in NO_FEATURES), *((name, "regression") for name in list(NO_FEATURES)[:-1])],
)
def test_names_of_rows_and_copies_of_the_target_are_left_out_unless_named(write, caplog, name, task):
    target = (lambda i: f"0{i % 3}") if name == "label_text" else (lambda i: i % 3)
    path, there = write(table_with(name, NO_FEATURES[name], target=target)), name or "column_2"
    splits = whole(path, target="y", task=task)
    assert splits.facts["features"] == ["a"]
    assert list(splits.facts["left_out"]) == [there]
    assert len(caplog.records) == 1
    assert repr(there) in caplog.text
    if name != "name":
        named = whole(path, target="y", task=task, columns=["a", there])
        assert named.facts["features"][0] == "a"
        assert len(named.facts["features"]) > 1


def test_a_test_file_needs_no_columns_that_are_left_out(write):
    train, test = write(table_with("id", lambda i: i)), write("a,y\n1,2\n", "t.csv")
    assert load_csv(train, "y", validation=0.0, test=test, standardize=False).test.data.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shop_id", lambda i: i % 7),
        ("id", lambda i: i + 0.5),
        ("weight", lambda i: i * 3),
        ("city", lambda i: f"c{i % 5}"),
        ("nearly", lambda i: i % 3 if i < 59 else 5),
    ],
)
def test_other_columns_are_features(write, caplog, name, value):
    splits = whole(write(table_with(name, value)), target="y")
    assert len(splits.facts["features"]) >= 2
    assert "left_out" not in splits.facts
    assert not caplog.records


@pytest.mark.parametrize(("name", "value"), [("t", lambda i: i), ("k", lambda i: 5), ("c", lambda i: "x")])
def test_columns_that_say_little_are_kept_and_reported(write, caplog, name, value):
    assert len(whole(write(table_with(name, value)), target="y").facts["features"]) == 2
    assert caplog.text.count("\n") == 1
    assert name in caplog.messages[0].partition("d.csv")[2]


def test_a_target_that_is_always_the_same(write):
    with pytest.raises(DataError, match=r"'y'.*nothing to learn"):
        whole(write("a,y\n1,5\n2,5\n"), target="y")


# ------------------------------------------------------------------------------------------------ texts and threads

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


# ------------------------------------------------------------------------------------------------ pyarrow

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
        monkeypatch.setattr(table_files, "MIN_BYTES", size)
        try:
            table = form.read(Path(path), None)
        except DataError as error:
            found.append(str(error))
        else:
            texts = {name: (column.codes.tolist(), column.values) for name, column in table.texts.items()}
            found.append((table.numbers.tobytes(), table.keys.tolist(), table.lines.tolist(), texts))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(hostile, hostile, hostile), min_size=1, max_size=12),
    plain=st.integers(0, 30),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    texts=st.sampled_from([frozenset("c"), frozenset("ac"), frozenset()]),
    odd=st.sampled_from(["", "1,2\n", "1,2,3,4\n", "\n", '"1",2,"x"\n', ",,\n"]),
    block=st.sampled_from([20, 100, 10_000]),
)
def test_what_is_read_does_not_depend_on_pyarrow(write, monkeypatch, rows, plain, end, texts, odd, block):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
    lines = ["a,b,c\n", *["1.5,-2,u\n"] * plain, *(f"{','.join(row)}\n" for row in rows), odd]
    path = write("".join(lines).replace("\n", end))
    with_pyarrow, without = read_both(monkeypatch, path, TableFormat(texts=texts))
    assert with_pyarrow == without


def test_pyarrow_reads_plain_files(write, monkeypatch):
    pytest.importorskip("pyarrow")
    used = []
    read = arrow_lines.ArrowReader.read
    monkeypatch.setattr(arrow_lines.ArrowReader, "read", lambda *given: used.append(read(*given)) or used[-1])
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 100)
    path = write("a,b,c\n" + "".join(f"{i / 7!r},{i},{'uvw'[i % 3]} \n" for i in range(100)))
    with_pyarrow, without = read_both(monkeypatch, path, TableFormat())
    assert with_pyarrow == without
    assert len(used) > 5
    assert all(isinstance(block, arrow_lines.ArrowBlock) for block in used)


# ------------------------------------------------------------------------------------------------ parquet


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
