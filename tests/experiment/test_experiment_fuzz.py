"""Shipped configs with random damage: each is accepted, or refused with lines that a person can read."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.config import list_experiments, read_config
from etude.core.errors import ConfigError
from etude.experiment import load_config

CONFIGS = dict(list_experiments())
LONG = "x" * 100_000
VALUES = [
    *(None, True, False, 0, 1, -1, -(10**9), 10**12 + 1, 2**64, 10**30, int("9" * 99)),
    *(0.0, -0.5, 1e308, float("inf"), float("nan")),
    *("", " ", "x", LONG, "..", "a.b", "1e-3", "010", "yes", "~", "name", "{x}", "%s", "💥", "\u2028", "\\"),
    *("cudaa", "mps", "mnist", "adamw"),
    *([], [[]], [None], [1, 2, 3], ["x"] * 1000, [{"name": "x"}], [LONG]),
    *({}, {"name": None}, {"name": LONG}, {"name": "mlp"}, {"name": [1]}, {"a": {"b": {"c": 1}}}, {LONG[:900]: 1}),
    *({1: 2}, {0: 0}, {0: 1, 5: 4}, {"": ""}, {"name": "adamw", "lr": "x"}),
]
KEYS = [
    "name",
    "lr",
    "x",
    "",
    LONG[:900],
    "epochs",
    "data",
    "tasks",
    "weights",
    "Epochs",
    "a.b",
    "💥",
    "0",
    "extends",
]
DAMAGED = [
    *("epochs: 010", "epochs: 1:30", "epochs: " + "9" * 5000, "epochs: 0x" + "f" * 5000, "epochs: 1e999", "lr: .inf"),
    *("x: !!int y", "x: !!set {a}", "x: !!python/name:os.system", "x: &a [*a]", "x: *nowhere", "<<: 3", "? [1]\n: 2"),
    *(
        'x: "\\0"',
        'x: "\\ud800"',
        "x: '",
        "\tx: 1",
        "- 1",
        "x: [1",
        "x: {a: b",
        "%x",
        "---",
        "...",
        "\x07",
        "x:" * 999,
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inside in items for place in places(inside, (*path, key)))]


def inside(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def damage(data: dict[str, Any], draw: random.Random) -> None:
    """Replace, remove, add, rename or move one value."""
    where = draw.choice([place for place in places(data) if place] or [("model",)])
    parent = inside(data, where[:-1])
    value = copy.deepcopy(draw.choice(VALUES))
    way = draw.choice(["set", "remove", "add", "rename", "move"])
    if way == "remove":
        parent.pop(where[-1], None) if isinstance(parent, dict) else parent.pop(where[-1])
    elif way == "add" and isinstance(target := inside(data, where), dict):
        target[draw.choice(KEYS)] = value
    elif way == "rename" and isinstance(parent, dict) and where[-1] in parent:
        parent[draw.choice(KEYS)] = parent.pop(where[-1])
    elif way == "move":
        parent[where[-1]] = copy.deepcopy(inside(data, draw.choice(places(data))))
    else:
        parent[where[-1]] = value


def check(path: Path, text: str) -> bool:
    """Load a config; return whether it is accepted, and then also the same when it is written and read again."""
    path.write_text(text)
    try:
        config = load_config(path)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert 0 < len(lines) <= 51
        assert max(map(len, lines)) <= 1000
        str(error).encode()
        return False
    path.write_text(config.to_yaml())
    assert load_config(path).to_dict() == config.to_dict()
    return True


@pytest.mark.parametrize("times", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_values(tmp_path, name, times):
    draw = random.Random(f"{name} {times}")
    original = read_config(CONFIGS[name]).data
    original["imports"] = [str(CONFIGS[name].parent.parent / Path(one).name) for one in original.pop("imports", [])]
    assert check(tmp_path / "damaged.yaml", yaml.safe_dump(original, allow_unicode=True))
    for _ in range(times):
        data = copy.deepcopy(original)
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            damage(data, draw)
        check(tmp_path / "damaged.yaml", yaml.safe_dump(data, allow_unicode=True))


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line)[:30])
def test_damaged_text(tmp_path, line):
    lines = "model: mlp\ntraining:\n  epochs: 3\n".splitlines()
    for place in range(len(lines) + 1):
        for indent in ("", "  "):
            text = "\n".join([*lines[:place], indent + line, *lines[place:]])
            check(tmp_path / "damaged.yaml", text)
