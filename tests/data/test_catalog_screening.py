"""Columns that are no features: names of rows, copies of the target; and those that say little."""

import pytest
from table_samples import whole

from etude.core import DataError
from etude.data.catalog.tabular import load_csv

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
    with pytest.raises(DataError, match=r"'y' is the same in every row"):
        whole(write("a,y\n1,5\n2,5\n"), target="y")
