"""The JSON Schema accepts what the reader accepts, and refuses what it refuses."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import torch
from annotated_types import Ge, Gt
from hypothesis import given, settings, strategies as st
from pydantic import AliasChoices, Field

from etude.config import Document, Section, SectionModel, SectionSpec, register
from etude.config.editor import json_schema
from etude.config.schema import validate_document
from etude.core.errors import ConfigError


class Training(SectionModel):
    epochs: Annotated[int, Gt(0)] = Field(10, validation_alias=AliasChoices("epochs", "num_epochs", "n_epochs"))
    log_interval: Annotated[int, Ge(1)] = Field(100, validation_alias=AliasChoices("log_interval", "log_every"))
    clip: float | None = Field(None, description="Clip the norm to this.")
    seed: int = 0


class Data(SectionModel):
    root: str


SECTIONS = {
    "model": SectionSpec(kind="model", required=True, description="The model."),
    "training": SectionSpec(model=Training),
    "data": SectionSpec(model=Data),
    "optimizer": SectionSpec(kind="optimizer", provided=("params",)),
    "scheduler": SectionSpec(kind="scheduler", provided=("total_steps",)),
    "callbacks": SectionSpec(kind="callback", many=True),
    "imports": SectionSpec(model=list[str]),
    "seeds": SectionSpec(kind="a_kind_nobody_registered"),
}


@pytest.fixture(autouse=True)
def components(empty_registry: None) -> None:
    @register("model", "mlp", aliases={"hidden": "width"})
    def mlp(
        width: int,
        act: Literal["relu", "gelu"] = "relu",
        init: Callable[..., Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Stack layers."""

    @register("optimizer", "sgd", aliases={"learning_rate": "lr"})
    def sgd(params: object, lr: float | torch.Tensor = 0.1, betas: tuple[float, float] = (0.9, 0.999)) -> None: ...

    @register("scheduler", "cosine")
    def cosine(total_steps: int, warmup: int = 0) -> None: ...

    @register("scheduler", "chain")
    def chain(
        parts: list[Annotated[object, Section("scheduler")]],
        last: Annotated[object, Section("scheduler")] | None = None,
    ) -> None: ...

    @register("callback", "print")
    def printer(every: int = 1, **more: Any) -> None: ...

    @register("elsewhere", "thing")
    def thing(x: complex, y: torch.nn.Module) -> None: ...


BASE = {"model": {"name": "mlp", "width": 3}, "data": {"root": "x"}}

VALID: list[dict[str, Any]] = [
    {},
    {"model": {"name": "mlp", "hidden": 3}},
    {"model": {"name": "mlp", "width": 3, "act": "gelu", "init": None}},
    {"training": {"epochs": 3, "log_every": 5, "clip": None}},
    {"training": {"num_epochs": 3}},
    {"training": None},
    {"optimizer": "sgd"},
    {"optimizer": {"name": "sgd", "learning_rate": 1, "betas": [0.9, 0.99]}},
    {"optimizer": None},
    {"scheduler": {"name": "cosine", "total_steps": 5}},
    {
        "scheduler": {
            "name": "chain",
            "parts": [{"name": "cosine"}, "cosine"],
            "last": {"name": "cosine", "warmup": 1},
        }
    },
    {"callbacks": [{"name": "print", "every": 2, "anything": 1}, "print"]},
    {"imports": ["a.b", "./c.py"]},
]
INVALID: list[dict[str, Any]] = [
    {"modle": {"name": "mlp"}},
    {"model": {"name": "mlp"}},
    {"model": {"name": "mlpp", "width": 3}},
    {"model": {"width": 3}},
    {"model": {"name": "mlp", "widht": 3}},
    {"model": {"name": "mlp", "width": "3"}},
    {"model": {"name": "mlp", "width": 3, "hidden": 3}},
    {"model": {"name": "mlp", "width": 3, "act": "rely"}},
    {"training": {"epoch": 3}},
    {"training": {"epochs": 0}},
    {"training": {"epochs": 1, "num_epochs": 1}},
    {"training": {"n_epochs": 1, "num_epochs": 1}},
    {"training": {"log_every": 1, "log_interval": 1}},
    {"training": {"log_every": 0}},
    {"data": {}},
    {"optimizer": "sdg"},
    {"optimizer": 3},
    {"optimizer": {"name": "sgd", "lr": "x"}},
    {"optimizer": {"name": "sgd", "betas": [0.9]}},
    {"optimizer": {"name": "sgd", "params": []}},
    {"scheduler": {"name": "chain"}},
    {"scheduler": {"name": "chain", "parts": [{"name": "cosine", "warm": 1}]}},
    {"scheduler": {"name": "chain", "parts": ["cosin"]}},
    {"callbacks": {"name": "print"}},
    {"callbacks": [{"name": "print", "every": 1.5}]},
    {"imports": "a"},
]


def checker() -> jsonschema.Draft202012Validator:
    schema = json_schema(SECTIONS)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("change", VALID, ids=str)
def test_valid_files_validate(change: dict[str, Any]) -> None:
    checker().validate(BASE | change)
    validate_document(Document(BASE | change), SECTIONS)


@pytest.mark.parametrize("change", INVALID, ids=str)
def test_mistakes_are_refused(change: dict[str, Any]) -> None:
    assert not checker().is_valid(BASE | change)
    with pytest.raises(ConfigError):
        validate_document(Document(BASE | change), SECTIONS)


def test_a_key_that_no_component_knows_is_refused_anywhere() -> None:
    document: dict[str, Any] = {**BASE, "training": {}, "optimizer": {"name": "sgd"}, "scheduler": {"name": "cosine"}}
    check = checker()
    check.validate(document)

    @settings(deadline=None, max_examples=50)
    @given(st.sampled_from([*document, ""]), st.from_regex(r"[a-z]{3,9}_q", fullmatch=True))
    def refuses(section: str, key: str) -> None:
        wrong = document | ({section: {**document[section], key: 1}} if section else {key: 1})
        assert not check.is_valid(wrong)

    refuses()


def test_a_file_that_extends_another_may_be_partial_but_not_misspelt() -> None:
    check = checker()
    assert not check.is_valid({"optimizer": {"lr": 1}})
    for partial in (
        {},
        {"optimizer": {"lr": 1}},
        {"model": {"name": "mlp", "act": "gelu"}},
        {"scheduler": {"name": "chain", "last": {"name": "chain"}}},
    ):
        check.validate({"extends": "base.yaml"} | partial)
    for wrong in (
        {"extends": 3},
        {"extends": "base.yaml", "model": {"name": "mlp", "atc": "gelu"}},
        {"extends": ["a.yaml"], "training": {"epoch": 3}},
        {"extends": "base.yaml", "scheduler": {"name": "chain", "parts": [{"name": "cosine", "warm": 1}]}},
    ):
        assert not check.is_valid(wrong)


def test_what_json_schema_cannot_say_is_left_open_and_descriptions_are_kept() -> None:
    schema = json_schema(SECTIONS)
    definitions = schema["$defs"]
    (mlp,) = definitions["section.model"]["else"]["allOf"]
    arguments = mlp["then"]["properties"]
    assert arguments["dtype"] == {}
    assert mlp["then"]["description"] == "Stack layers."
    assert definitions["file"]["properties"]["model"]["description"] == "The model."
    assert (
        definitions["file"]["properties"]["training"]["properties"]["clip"]["description"] == "Clip the norm to this."
    )
