"""`extends:`: later files win, another component replaces the section, circles are named."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from etude.config import Document, read_config
from etude.config.document import merge
from etude.core.errors import ConfigError

TREES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.recursive(
        st.integers(0, 9), lambda inner: st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4), max_leaves=10
    ),
    max_size=5,
)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Paths to everything that is not a non-empty mapping: an independent picture of a tree."""
    if isinstance(tree, dict) and tree:
        return {key: value for name, sub in tree.items() for key, value in leaves(sub, (*path, name)).items()}
    return {path: tree}


@settings(deadline=None, max_examples=60)
@given(TREES, TREES)
def test_merge_keeps_all_leaves_that_nothing_covers(base: dict[str, Any], top: dict[str, Any]) -> None:
    before = copy.deepcopy((base, top))
    merged = merge(Document(base), Document(top)).data
    assert (base, top) == before
    over = leaves(top) if top else {}
    expected = {
        path: value
        for path, value in (leaves(base) if base else {}).items()
        # A leaf survives unless the top says something at its path, or at one above or below it. An empty mapping
        # on top says nothing about what the base has below it.
        if not any(
            (path[: len(other)] == other and not (said == {} and len(path) > len(other)))
            or (other[: len(path)] == path)
            for other, said in over.items()
        )
    }
    said = {
        path: value
        for path, value in over.items()
        if not (value == {} and any(other[: len(path)] == path and len(other) > len(path) for other in leaves(base)))
    }
    assert (leaves(merged) if merged else {}) == expected | said


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_merging_with_nothing_or_itself_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge(Document(tree), Document({})).data == tree
    assert merge(Document({}), Document(tree)).data == tree
    assert merge(Document(tree), Document(tree)).data == tree


@settings(deadline=None, max_examples=60)
@given(TREES, TREES, TREES)
def test_merging_is_associative_where_no_mapping_is_replaced(a: Any, b: Any, c: Any) -> None:
    """Laying files over each other gives the same result however they are grouped, if kinds of values agree."""

    def shapes_agree(x: Any, y: Any) -> bool:
        if isinstance(x, dict) and isinstance(y, dict):
            return all(shapes_agree(x[key], y[key]) for key in x.keys() & y.keys())
        return isinstance(x, dict) == isinstance(y, dict)

    if not (shapes_agree(a, b) and shapes_agree(b, c) and shapes_agree(a, c)):
        return

    def over(x: Any, y: Any) -> Any:
        return merge(Document(x), Document(y)).data

    assert over(over(a, b), c) == over(a, over(b, c))


def test_the_child_wins_and_locations_follow(write: Any) -> None:
    write("base.yaml", "training:\n  epochs: 10\n  batch_size: 64\n")
    document = read_config(write("sub/child.yaml", "extends: ../base.yaml\ntraining:\n  epochs: 3\n"))
    assert document.data == {"training": {"epochs": 3, "batch_size": 64}}
    assert document.place("training.epochs") == "sub/child.yaml:3: training.epochs"
    assert document.place("training.batch_size") == "base.yaml:3: training.batch_size"


def test_another_component_drops_the_arguments_of_the_former(write: Any) -> None:
    write(
        "base.yaml",
        "optimizer: {name: adamw, betas: [0.9, 0.95], lr: 0.1}\nmodel: {name: mlp, width: 3}\nname: base\n",
    )
    child = "extends: base.yaml\nname: child\noptimizer: {name: sgd, lr: 1}\nmodel: {name: mlp, depth: 2}\n"
    document = read_config(write("child.yaml", child))
    assert document.data["optimizer"] == {"name": "sgd", "lr": 1}
    assert document.data["model"] == {"name": "mlp", "width": 3, "depth": 2}
    assert document.data["name"] == "child"
    assert "optimizer.betas" not in document.locations


def test_arguments_join_a_component_given_by_its_bare_name(write: Any) -> None:
    write("base.yaml", "optimizer: sgd\nscheduler: cosine\n")
    document = read_config(write("child.yaml", "extends: base.yaml\noptimizer: {lr: 1}\nscheduler: null\n"))
    assert document.data == {"optimizer": {"name": "sgd", "lr": 1}, "scheduler": None}


def test_several_parents_apply_in_their_order(write: Any) -> None:
    write("a.yaml", "x: {k: 1, a: 1}\n")
    write("b.yaml", "x: {k: 2, b: 2}\n")
    assert read_config(write("c.yaml", "extends: [a.yaml, b.yaml]\n")).data == {"x": {"k": 2, "a": 1, "b": 2}}
    # A diamond is no circle.
    write("d.yaml", "extends: a.yaml\nx: {d: 4}\n")
    diamond = read_config(write("e.yaml", "extends: [a.yaml, d.yaml]\n"))
    assert diamond.data == {"x": {"k": 1, "a": 1, "d": 4}}
    assert "extends" not in diamond.data


def test_json_may_extend_yaml(write: Any) -> None:
    write("base.yaml", "x: {lr: 1e-3}\n")
    assert read_config(write("c.json", '{"extends": "base.yaml", "x": {"k": 2}}')).data == {
        "x": {"lr": 0.001, "k": 2}
    }


def test_circles_and_missing_parents_are_explained(write: Any) -> None:
    a = write("a.yaml", "x: 1\nextends: b.yaml\n")
    write("b.yaml", "extends: a.yaml\n")
    with pytest.raises(
        ConfigError, match=r"b.yaml:1: extends: files extend each other in a circle: a.yaml → b.yaml → a.yaml;"
    ):
        read_config(a)
    alone = write("self.yaml", "extends: [self.yaml]\n")
    with pytest.raises(ConfigError, match=r"circle: self.yaml → self.yaml"):
        read_config(alone)
    lost = write("lost.yaml", "x: 1\nextends:\n  - a.yml\n")
    with pytest.raises(ConfigError, match=r"lost.yaml:3: extends.0: no file 'a.yml'; did you mean 'a.yaml'\?"):
        read_config(lost)
