"""Reading files: numbers, lines, and one clear line for every kind of bad file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from etude.config import dump_yaml, read_config
from etude.config.dialect import parse_value, parse_yaml
from etude.config.overrides import parse_override
from etude.core.errors import ConfigError
from unprivileged import unprivileged

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
KEYS = TEXT.filter(bool)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    TEXT,
    st.from_regex(r"[-+]?[0-9_.:xoe-]{1,8}", fullmatch=True),
    st.sampled_from(["yes", "No", "on", "OFF", "y", "~", "Null", ".inf", "=", "<<", "2020-01-01", "0b11", "true"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2e+3", -2e3),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("6.02e23", 6.02e23),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("0.001", 0.001),
    ],
)
def test_floats_of_yaml_1_2_are_numbers(text: str, value: float) -> None:
    data, _ = parse_yaml(f"x: {text}", "x.yaml")
    assert data["x"] == value
    assert type(data["x"]) is float


@pytest.mark.parametrize("text", ["e5", "1e", "1e-", "v1e-3", ".", "+", "1.2.3", "'1e-3'", "2020-01-01", "1e3x"])
def test_what_only_looks_like_a_float_stays_text(text: str) -> None:
    data, _ = parse_yaml(f"x: {text}", "x.yaml")
    assert data["x"] == text.strip("'")


@pytest.mark.parametrize("text", ["1e-3", "1E5", "+.5", "1.", "2020-01-01", "null", "true", "10", "", "a: b", "- x"])
def test_text_that_looks_like_something_else_is_written_in_quotes(text: str) -> None:
    assert parse_yaml(dump_yaml({"x": text}), "x.yaml")[0] == {"x": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 10), ("-3", -3), ("0x1F", 31), ("0o17", 15), ("010", 10), ("-007", -7), ("09", 9), ("1_000", 1000)],
)
def test_integers_are_read_as_they_look(text: str, value: int) -> None:
    for read in (parse_yaml(f"x: {text}", "x.yaml")[0]["x"], parse_value(text)):
        assert read == value
        assert type(read) is int


@pytest.mark.parametrize(
    "text", ["yes", "no", "On", "off", "y", "1:30", "190:20:30.15", "0b11", "1__0", "2020-01-01", "="]
)
def test_what_only_yaml_1_1_reads_otherwise_is_text(text: str) -> None:
    assert parse_yaml(f"x: {text}", "x.yaml")[0]["x"] == text
    assert parse_value(text) == text


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_dumped_yaml_reads_back_the_same(data: dict[str, Any]) -> None:
    text = dump_yaml(data)
    read, _ = parse_yaml(text, "x.yaml")
    assert (read or {}) == data
    assert repr(read or {}) == repr(data)  # 1 and 1.0 and True are different values in a config


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_every_value_has_the_line_it_stands_on(data: dict[str, Any]) -> None:
    """The line that the map gives for a top-level key is where PyYAML's own composer saw it."""
    text = dump_yaml(data)
    _, lines = parse_yaml(text, "x.yaml")
    for key, value in yaml.compose(text).value:
        assert lines[key.value] == key.start_mark.line + 1
        assert value is not None


def test_lines_reach_into_lists_and_merge_keys(write: Any) -> None:
    path = write("x.yaml", "a: &a\n  lr: 1\nb:\n  <<: *a\n  eps: 2\ncallbacks:\n  - name: x\n    k: 1\n  - y\n")
    document = read_config(path)
    assert document.data["b"] == {"lr": 1, "eps": 2}
    lines = {known: location.line for known, location in document.locations.items()}
    assert lines["b.eps"] == 5
    assert lines["b.lr"] == 2
    assert lines["callbacks.0.k"] == 8
    assert lines["callbacks.1"] == 9


def test_json_reads_like_yaml_with_lines_even_with_tabs(write: Any) -> None:
    data = {"optimizer": {"name": "sgd", "lr": 1e-3}, "emoji": "\U0001f600/"}
    path = write("x.json", json.dumps(data, indent="\t"))
    document = read_config(path)
    assert document.data == data
    plain = read_config(write("y.json", json.dumps({"optimizer": {"lr": 1e-3}}, indent="\t")))
    assert plain.locations["optimizer.lr"].line == 3


def bad(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.yaml", "", "x.yaml: the file is empty; write sections"),
        ("x.yaml", "# only a comment\n", "x.yaml: the file is empty"),
        ("x.json", " \n", "x.json: the file is empty"),
        ("x.yaml", "- a\n- b\n", "at the top, found a list"),
        ("x.yaml", "hello\n", "at the top, found the single value 'hello'"),
        ("x.json", "[1]", "at the top, found a list"),
        ("x.yaml", "1: a\n", "the name of a section must be text, found 1"),
        ("x.yaml", "a:\n  b: 1\n  c: 2\n  b: 3\n", "x.yaml:4: key 'b' is given twice, first on line 2"),
        ("x.json", '{"a": {"b": 1,\n "b": 2}}', "x.json:2: key 'b' is given twice"),
        ("x.json", '{"a": "\\ud83d\\ude00", "b": 1, "b": 2}', "key 'b' is given twice"),
        ("x.yaml", "a:\n\tb: 1\n", "x.yaml:2:1: not valid YAML: tabs are not allowed"),
        ("x.yaml", "a: [1, 2\nb: 3\n", "x.yaml:2:2: not valid YAML:"),
        ("x.yaml", "a: b: c\n", "x.yaml:1:5: not valid YAML: mapping values are not allowed"),
        (
            "x.yaml",
            "a: !!python/object/apply:os.system ['true']\n",
            "python/object/apply:os.system",
        ),
        ("x.yaml", "a: 1\n---\nb: 2\n", "x.yaml:2:1: not valid YAML: but found another document"),
        ("x.yaml", "a: *nowhere\n", "x.yaml:1:4: not valid YAML: found undefined alias"),
        ("x.yaml", "a: &a [*a]\n", "x.yaml: values are nested too deeply or refer to themselves"),
        ("x.yaml", "a:\n  b: !!int x\n", "x.yaml: not valid YAML"),
        ("x.yaml", "a: !!float x\n", "x.yaml: not valid YAML"),
        ("x.yaml", "a: !!bool x\n", "x.yaml: not valid YAML"),
        ("x.yaml", "a: {[b:c]: 2}\n", "x.yaml:1:5: not valid YAML: found unhashable key"),
        ("x.yaml", "a: {<<: 3}\n", "x.yaml:1"),
        ("x.yaml", f"a: {'9' * 5000}\n", "x.yaml: not valid YAML"),
        ("x.json", '{"a": "\\ud800"}', "x.json"),
        ("x.json", '{"a": ' + "[" * 200 + "]" * 200 + "}", "x.json: values are nested too deeply"),
        ("x.yaml", f"extends: {'b' * 300}.yaml\n", "x.yaml:1: extends: cannot read 'bbb"),
        ("x.yaml", f"extends: [{'b' * 100_000}, 3]\n", "x.yaml:1: extends: expected a file name or a list"),
        ("x.yaml", "a:\n  [1, 2]: 3\n", "x.yaml:2:3: not valid YAML: found unhashable key"),
        ("x.yaml", "extends: 3\n", "x.yaml:1: extends: expected a file name or a list of file names, got 3"),
        ("x.yaml", "a: \x07\n", "x.yaml"),
    ],
)
def test_bad_files_give_one_line(write: Any, name: str, text: str, expected: str) -> None:
    found = bad(write(name, text))
    assert expected in found
    assert found.count(f"{name}:") == 1


def test_an_alias_bomb_ends_quickly(write: Any) -> None:
    levels = "\n".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 12))
    assert "nested too deeply" in bad(write("bomb.yaml", f"k0: &k0 [1]\n{levels}\n"))


def test_an_alias_bomb_in_an_override_ends_quickly() -> None:
    levels = ", ".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 12))
    with pytest.raises(ConfigError, match="training"):
        parse_override(f"training={{k0: &k0 [1], {levels}}}")


def test_files_that_link_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    assert "a.yaml" in bad(tmp_path / "a.yaml")


def test_deep_nesting_is_an_error_and_no_crash(write: Any) -> None:
    assert "nested too deeply" in bad(write("deep.json", "[" * 1_000 + "]" * 1_000))
    assert "nested too deeply" in bad(write("deep.yaml", "a: " + "[" * 1_000 + "]" * 1_000))


def test_a_missing_file_names_its_neighbours(write: Any) -> None:
    write("configs/baseline.yaml", "a: 1\n")
    write("configs/other.yaml", "a: 1\n")
    text = bad(Path("configs/bsaeline.yaml"))
    assert (
        text
        == "no file 'configs/bsaeline.yaml'; did you mean 'baseline.yaml'? (in configs: baseline.yaml, other.yaml)"
    )
    assert "its folder does not exist" in bad(Path("nowhere/baseline.yaml"))
    assert "is a folder" in bad(Path("configs"))


def test_bytes_that_are_no_text(write: Any) -> None:
    path = write("x.yaml", "")
    path.write_bytes(b"a: \xff\xfe")
    assert "x.yaml: not a text file in UTF-8 (byte 3)" in bad(path)


def test_a_file_without_permission(write: Any) -> None:
    path = write("x.yaml", "a: 1")
    path.chmod(0)
    with unprivileged():
        assert "cannot read 'x.yaml': Permission denied" in bad(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(write: Any) -> None:
    assert read_config(write("x.yaml", "\ufeffa: 1\n")).data == {"a": 1}
