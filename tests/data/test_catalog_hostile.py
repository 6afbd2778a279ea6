"""Files that cannot be read or do not fit, and the place that the error names."""

import pytest
import torch
from table_samples import whole

from etude.core import ConfigError, DataError
from etude.data.catalog import delimited
from etude.data.catalog.tabular import load_csv

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


@pytest.mark.parametrize("later", ['"open', "1,2,3", "caf\xe9,2"])
@pytest.mark.parametrize("threads", [1, 4])
def test_of_several_errors_the_first_in_the_file_is_reported(write, monkeypatch, later, threads):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    path = write(("a,y\n" + "1.5,2\n" * 40 + "oops,3\n" + "1.5,2\n" * 10 + f"{later}\n").encode("latin-1"))
    try:
        with pytest.raises(DataError, match=r":42: column 'a' holds 'oops'"):
            whole(path, target="y")
    finally:
        torch.set_num_threads(before)


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
