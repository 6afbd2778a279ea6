"""Overrides: what is written is what is set, and bad text is explained."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from etude.config import Document, apply_overrides, dump_yaml, read_config
from etude.config.document import COMMAND_LINE
from etude.config.overrides import parse_override
from etude.core.errors import ConfigError

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(".".join)
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # the others are refused
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(CHARACTERS, max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=5), inner, max_size=3),
    max_leaves=8,
)


def get(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data[key]
    return data


@settings(deadline=None, max_examples=60)
@given(PATHS, VALUES)
def test_a_value_survives_the_command_line(path: str, value: Any) -> None:
    text = f"{path}={dump_yaml(value, flow=True)}"
    parsed = parse_override(text)
    assert parsed == (path, value)
    assert repr(parsed[1]) == repr(value)
    assert get(apply_overrides(Document({}), [text]).data, path) == value


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(NAMES, NAMES, st.integers()), max_size=6))
def test_later_overrides_win_and_the_rest_stays(triples: list[tuple[str, str, int]]) -> None:
    """Against a plain dictionary of pairs."""
    triples = [(section, key, value) for section, key, value in triples if key != "name"]
    document = Document({"kept": {"x": 1}})
    result = apply_overrides(document, [f"{section}.{key}={value}" for section, key, value in triples])
    expected = {("kept", "x"): 1} | {(section, key): value for section, key, value in triples}
    assert {(section, key): value for section, keys in result.data.items() for key, value in keys.items()} == expected
    assert document.data == {"kept": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3e-4", 3e-4),
        ("a.b=[1,2]", [1, 2]),
        ("a.b={x: 1}", {"x": 1}),
        ("a.b=null", None),
        ("a.b=true", True),
        ("a.b='3'", "3"),
        ("a.b=adamw", "adamw"),
        ("a.b=x=y", "x=y"),
        ("a.b=a: b", "a: b"),
        ("a.b=- x", "- x"),
        ("a.b=#fff", "#fff"),
        ("a.b=@home", "@home"),
        ("a.b=*.txt", "*.txt"),
        ("a.b=C:\\data", "C:\\data"),
        ("a.b= 7 ", 7),
        ("a.b=''", ""),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.batch_size", "write section.key=value"),
        ("=3", "write section.key=value"),
        ("a..b=3", "write section.key=value"),
        ("a b=3", "write section.key=value"),
        ("+a.b=3", "write section.key=value, without the leading '+'"),
        ("--a.b=3", "write section.key=value, without the leading '--'"),
        ("a.b=", "'a.b=' has no value; write a.b=null to disable it"),
        ("a.b=[1, 2", "a.b: not valid YAML"),
        ('a.b="x', "a.b: not valid YAML"),
        ("a.b={x:1}", "a.b: write a space after the colon in 'x:1'"),
        ("a.b={x: 1, x: 2}", "a.b: key 'x' is given twice"),
        ("seed.x=1", "seed is 3, not a section"),
        ("callbacks.2.k=1", "callbacks is a list; number its element (0 to 1)"),
        ("callbacks.²=1", "callbacks is a list; number its element (0 to 1)"),
        ("callbacks." + "9" * 5000 + "=1", "callbacks is a list; number its element (0 to 1)"),
        ("callbacks.first.k=1", "callbacks is a list; number its element (0 to 1)"),
    ],
)
def test_bad_overrides_give_one_line(text: str, expected: str) -> None:
    document = Document({"seed": 3, "callbacks": [{"name": "a"}, "b"]})
    with pytest.raises(ConfigError) as caught:
        apply_overrides(document, [text])
    assert str(caught.value).startswith("command line: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sections_are_made_filled_and_turned_off() -> None:
    document = Document(
        {"scheduler": {"name": "cosine"}, "optimizer": "sgd", "callbacks": [{"name": "a"}, "b"], "off": None}
    )
    overrides = [
        "scheduler=null",
        "optimizer.lr=0.1",
        "callbacks.0.k=1",
        "callbacks.1.k=2",
        "off.x=1",
        "new.deep.y=2",
    ]
    assert apply_overrides(document, overrides).data == {
        "scheduler": None,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "callbacks": [{"name": "a", "k": 1}, {"name": "b", "k": 2}],
        "off": {"x": 1},
        "new": {"deep": {"y": 2}},
    }


@pytest.mark.parametrize("order", [1, -1])
def test_naming_another_component_drops_only_what_the_file_said(order: int) -> None:
    document = Document({"optimizer": {"name": "adamw", "betas": [0.9, 0.99], "lr": 1}})
    overrides = ["optimizer.name=sgd", "optimizer.lr=2"][::order]
    assert apply_overrides(document, overrides).data == {"optimizer": {"name": "sgd", "lr": 2}}
    same = apply_overrides(document, ["optimizer.name=adamw"])
    assert same.data == document.data


def test_number_keys_are_found_again() -> None:
    document = Document({"training": {"grad_accum_steps": {0: 1, 5: 2}}})
    changed = apply_overrides(document, ["training.grad_accum_steps.5=4"])
    assert changed.data == {"training": {"grad_accum_steps": {0: 1, 5: 4}}}


def test_origins_say_command_line(write: Any) -> None:
    document = read_config(write("x.yaml", "a:\n  b: {c: 1}\n  d: 2\n"))
    changed = apply_overrides(document, ["a.b={e: [1, 2]}"])
    assert changed.place("a.b.e.1") == "command line: a.b.e.1"
    assert changed.place("a.d") == "x.yaml:3: a.d"
    assert "a.b.c" not in changed.locations
    assert changed.locations["a.b"].file == COMMAND_LINE
    assert changed.layer("a.b") > changed.layer("a.d")
