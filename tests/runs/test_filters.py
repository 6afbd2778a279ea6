"""Filters of runs: what is parsed, and what fits."""

from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from etude.core import ConfigError
from etude.runs.filters import Filter, matches, parse_filter, plain

FACTS = {"state": "running", "optimizer.lr": 0.01, "training.compile": False, "data.name": "mnist", "best": None}
keys = st.text("abcxyz_./- ", min_size=1).map(str.strip).filter(bool)
texts = st.text().map(str.strip)


@given(st.text())
def test_any_text_is_a_filter_or_refused(text):
    with suppress(ConfigError):
        one = parse_filter(text)
        assert one.key
        matches(one, "lenet/1", FACTS)


@given(keys, st.sampled_from(["=", "!="]), texts.filter(lambda value: not value.startswith("=")))
def test_keys_and_values_come_back(key, sign, value):
    assert parse_filter(f"{key} {sign} {value}") == Filter(key, sign, value)


@given(keys, st.sampled_from(["<", "<=", ">", ">="]), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_orders_are_those_of_numbers(key, sign, value, limit):
    expected = {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[sign]
    assert matches(parse_filter(f"{key}{sign}{limit!r}"), "", {key: value}) is expected


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text().map(str.strip)))
def test_every_value_is_found_as_it_is_shown(value):
    shown = plain(value)
    one = Filter("key", "=", shown)
    assert matches(one, "", {"key": value})
    assert not matches(Filter("key", "!=", shown), "", {"key": value})


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("LENET", True),
        ("resnet", False),
        ("state=running", True),
        ("state=run*", True),
        ("state!=finished", True),
        ("lr=1e-2", True),
        ("lr=0.1", False),
        ("optimizer.lr<0.1", True),
        ("compile=false", True),
        ("compile=0", False),
        ("best<1", False),
        ("best=null", True),
        ("name=mnist", True),
    ],
)
def test_examples(text, fits):
    assert matches(parse_filter(text), "lenet5/baseline/1", FACTS) is fits


@pytest.mark.parametrize("text", ["", "=3", "lr<abc", "<3", " "])
def test_what_states_nothing_is_refused(text):
    with pytest.raises(ConfigError, match="--filter"):
        parse_filter(text)
