"""A signature is a schema: what each kind of parameter takes from YAML, and what it refuses."""

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
import torch
from annotated_types import Gt, Interval
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from torch import nn

from etude.config import SectionModel
from etude.config.signature import schema_of, spellings

if TYPE_CHECKING:
    from nowhere import Unknown


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass
class Window:
    size: int
    shift: float = 0.0


def component(
    i: int = 0,
    f: float = 0.0,
    b: bool = False,
    s: str = "",
    pair: tuple[float, float] = (0.9, 0.999),
    many: tuple[int, ...] = (),
    unique: frozenset[int] = frozenset(),
    sizes: Sequence[int] = (),
    table: dict[str, float] | None = None,
    schedule: dict[int, int] | None = None,
    path: Path = Path(),
    mode: Mode = Mode.FAST,
    word: Literal["a", "b"] = "a",
    either: int | str = 0,
    number_or_list: float | list[float] = 0.0,
    window: Window | None = None,
    positive: Annotated[float, Gt(0)] = 1.0,
    share: Annotated[float, Interval(ge=0, le=1)] = 0.0,
    tensor: float | torch.Tensor = 0.0,
) -> None:
    """Take one of everything."""


ACCEPTED = [
    ("i", 3, 3),
    ("f", 3, 3.0),
    ("b", True, True),
    ("s", "3", "3"),
    ("pair", [0.9, 1], (0.9, 1.0)),
    ("many", [1, 2, 3], (1, 2, 3)),
    ("unique", [1, 1], frozenset({1})),
    ("sizes", [1, 2], [1, 2]),
    ("table", {"x": 1}, {"x": 1.0}),
    ("table", None, None),
    ("schedule", {0: 1}, {0: 1}),
    ("schedule", {"5": 2}, {5: 2}),
    ("path", "data/x", Path("data/x")),
    ("mode", "exact", Mode.EXACT),
    ("word", "b", "b"),
    ("either", 3, 3),
    ("either", "3", "3"),
    ("number_or_list", [1, 2.5], [1.0, 2.5]),
    ("window", {"size": 3}, Window(3)),
    ("share", 1, 1.0),
    ("tensor", 1, 1.0),
]
REFUSED = [
    ("i", True),
    ("i", "3"),
    ("i", 3.5),
    ("i", 3.0),
    ("i", None),
    ("f", True),
    ("f", "0.1"),
    ("b", 1),
    ("b", "yes"),
    ("s", 3),
    ("s", True),
    ("pair", [0.9]),
    ("pair", [0.9, 0.8, 0.7]),
    ("pair", ["0.9", 0.8]),
    ("many", [1, True]),
    ("sizes", [1.5]),
    ("sizes", "12"),
    ("table", {"x": "1"}),
    ("path", 3),
    ("mode", "slow"),
    ("word", "c"),
    ("either", 1.5),
    ("number_or_list", ["a"]),
    ("window", {"size": "3"}),
    ("window", {"size": 3, "shfit": 1}),
    ("positive", 0),
    ("share", 1.01),
    ("tensor", "x"),
]


@pytest.mark.parametrize(("name", "given", "value"), ACCEPTED)
def test_natural_values_are_taken(name: str, given: Any, value: Any) -> None:
    result = getattr(schema_of(component).model_validate({name: given}), name)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(("name", "given"), REFUSED)
def test_nothing_is_converted_silently(name: str, given: Any) -> None:
    with pytest.raises(ValidationError):
        schema_of(component).model_validate({name: given})


def test_defaults_are_those_of_the_signature() -> None:
    model = schema_of(component).model_validate({})
    for name in ("i", "pair", "path", "mode", "unique", "positive"):
        assert getattr(model, name) == component.__defaults__[list(schema_of(component).model_fields).index(name)]
    assert not model.model_fields_set


def test_required_parameters_and_unknown_keys() -> None:
    def sgd(lr: float, momentum: float = 0.0) -> None: ...

    with pytest.raises(ValidationError, match="lr"):
        schema_of(sgd).model_validate({})
    with pytest.raises(ValidationError, match="momentun"):
        schema_of(sgd).model_validate({"lr": 1, "momentun": 0.9})


def test_open_signatures_take_more() -> None:
    def model(width: int, **kwargs: Any) -> None: ...

    assert schema_of(model).model_validate({"width": 1, "depth": 2}).model_extra == {"depth": 2}


def test_provided_parameters_need_not_be_given_and_may_be_if_yaml_can_say_them() -> None:
    def schedule(
        optimizer: torch.optim.Optimizer, total_steps: int, steps: Iterable[nn.Parameter], warmup: int = 0
    ) -> None: ...

    model = schema_of(schedule, provided=["optimizer", "total_steps", "steps", "unrelated"])
    assert list(model.model_fields) == ["total_steps", "warmup"]
    assert model.supplied_ == {"optimizer", "steps"}
    assert model.model_validate({}).model_fields_set == set()
    assert model.model_validate({"total_steps": 3}).model_fields_set == {"total_steps"}
    with pytest.raises(ValidationError):
        model.model_validate({"total_steps": "3"})


def test_torch_optimizers_are_components_as_they_stand() -> None:
    model = schema_of(torch.optim.AdamW, provided=["params"])
    assert model.supplied_ == {"params"}
    values = model.model_validate({"lr": 1e-3, "betas": [0.8, 0.9], "fused": True}).model_dump()
    assert values["betas"] == (0.8, 0.9)
    assert values["weight_decay"] == 0.01


def test_hints_that_cannot_be_resolved_count_as_any() -> None:
    def odd(a: "Unknown", b: 5, c: "int" = 1, d=2, e: "Unknown | None" = None) -> None: ...

    model = schema_of(odd)
    assert model.model_validate({"a": object, "b": "x", "c": 3, "d": "text"}).c == 3
    with pytest.raises(ValidationError):
        model.model_validate({"a": 1, "b": 1, "c": "3"})


@pytest.mark.parametrize("given", [{"a": [{"lrr": 1}]}, {"b": ["x"]}, {"c": {"k": {"lrr": 1}}}])
def test_names_in_text_are_resolved_inside_of_hints_too(given: Any) -> None:
    def nested(a: "list['Data']" = [], b: list["int"] = [], c: dict[str, "Data"] = {}) -> None: ...  # noqa: B006

    found: Any = schema_of(nested).model_validate({"a": [{"lr": 1}], "b": [2], "c": {"k": {"lr": 3}}})
    assert (found.a[0].lr, found.b, found.c["k"].lr) == (1, [2], 3)
    with pytest.raises(ValidationError):
        schema_of(nested).model_validate(given)


def test_a_default_of_none_allows_null() -> None:
    def sloppy(x: int = None, y: float | None = None) -> None: ...  # noqa: RUF013

    assert schema_of(sloppy).model_validate({"x": None}).x is None
    with pytest.raises(ValidationError):
        schema_of(sloppy).model_validate({"x": "1"})


class Classy:
    def __init__(self, copy: int, schema: str = "s", _hidden: int = 0, model_dim: int = 3, json: int = 1) -> None:
        self.copy = copy


def test_names_that_pydantic_uses_itself_are_keys_like_any_other() -> None:
    model = schema_of(Classy)
    given = {"copy": 1, "schema": "x", "_hidden": 2, "model_dim": 4, "json": 5}
    validated = model.model_validate(given)
    read = {spellings(model, name)[0]: getattr(validated, name) for name in model.model_fields}
    assert read == given
    with pytest.raises(ValidationError, match="copy"):
        model.model_validate({"copy": "1"})


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


@wrapped
def decorated(lr: float) -> None: ...


class Callish:
    def __call__(self, lr: float) -> None: ...


@dataclass
class Data:
    lr: float


class Inherited(Classy):
    pass


@dataclass
class Unhashable:
    def __call__(self, lr: float) -> None: ...


@pytest.mark.parametrize(
    "factory", [decorated, Callish(), Unhashable(), Data, functools.partial(lambda *, lr, k: None, k=1)]
)
def test_every_kind_of_callable_has_a_schema(factory: Callable[..., Any]) -> None:
    model = schema_of(factory)
    assert "lr" in model.model_fields
    assert model.model_validate({"lr": 1}).lr == 1


def test_an_inherited_constructor_counts() -> None:
    assert list(schema_of(Inherited).model_fields) == list(schema_of(Classy).model_fields)


def test_aliases_fill_the_argument() -> None:
    def sgd(lr: float) -> None: ...

    model = schema_of(sgd, aliases={"learning_rate": "lr", "epsilon": "eps"})
    assert model.model_validate({"learning_rate": 1}).lr == 1.0
    assert spellings(model, "lr") == ["lr", "learning_rate"]
    with pytest.raises(ValidationError):
        model.model_validate({"learning_rate": 1, "lr": 1})
    with pytest.raises(ValidationError):
        model.model_validate({"lr": 1, "epsilon": 1})


def test_descriptions_are_kept() -> None:
    def sgd(lr: float, m: Annotated[float, Field(description="Momentum.")] = 0.0) -> None:
        """Descend.

        More.
        """

    schema = schema_of(sgd).model_json_schema()
    assert schema["properties"]["m"]["description"] == "Momentum."
    assert schema["description"] == "Descend."


def test_fixed_sections_are_strict_too_and_refer_to_themselves() -> None:
    class Node(SectionModel):
        width: int = 1
        below: "Node | None" = None
        pairs: tuple[tuple[int, float], ...] = ()
        default: int = 0
        type: str = ""

    assert Node.model_validate({"below": {"width": 2}, "pairs": [[1, 2]]}).pairs == ((1, 2.0),)
    for mistake in (
        {"below": {"width": "2"}},
        {"default": "1"},
        {"type": 1},
        {"below": {"widht": 1}},
        {"pairs": [[1.5, 2]]},
    ):
        with pytest.raises(ValidationError):
            Node.model_validate(mistake)


def test_spellings_put_the_canonical_key_first() -> None:
    class Plain(BaseModel):
        a: int = 0
        b: int = Field(0, validation_alias=AliasChoices("bee", "b"))
        c: int = Field(0, alias="see")

    assert [spellings(Plain, name) for name in "abc"] == [["a"], ["b", "bee"], ["see"]]
