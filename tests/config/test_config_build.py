"""Building components: arguments, nested sections, what the builder supplies, and errors of factories."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from annotated_types import Gt

from etude.config import Section, build_component, dump_yaml, read_config, register
from etude.config.schema import select_component
from etude.config.selection import plain
from etude.core.errors import ConfigError, DataError, EtudeError


@dataclass
class Cosine:
    total_steps: int
    warmup_steps: int = 0


@dataclass
class Chain:
    parts: list[Annotated[Any, Section("scheduler")]]
    named: dict[str, Annotated[Any, Section("scheduler")]] = field(default_factory=dict)
    last: Annotated[Cosine, Section("scheduler")] | None = None


class Model:
    def __init__(
        self,
        width: Annotated[int, Gt(0)],
        *,
        act: Literal["relu", "gelu"] = "relu",
        sizes: tuple[int, ...] = (1, 2),
        root: Path = Path("data"),
        init: Any = torch.nn.init.zeros_,
        sentinel: object = object,
        **more: Any,
    ) -> None:
        self.given = {"width": width, "act": act, "sizes": sizes, "root": root, "sentinel": sentinel} | more


@pytest.fixture(autouse=True)
def components(empty_registry: None) -> None:
    register("scheduler", "cosine", aliases={"warmup": "warmup_steps"})(Cosine)
    register("scheduler", "chain")(Chain)
    register("model", "mlp")(Model)
    register("optimizer", "adamw", aliases={"learning_rate": "lr"})(torch.optim.AdamW)


def test_a_torch_optimizer_from_its_section() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    section = {"name": "adamw", "learning_rate": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0}
    optimizer = build_component("optimizer", section, provided={"params": params, "total_steps": 10})
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["params"] == params


def test_sections_inside_sections_are_built_first_with_what_is_supplied() -> None:
    section = {
        "name": "chain",
        "parts": [{"name": "cosine", "warmup": 2}, "cosine", {"name": "chain", "parts": []}],
        "named": {"x": {"name": "cosine", "total_steps": 5}},
        "last": {"name": "cosine"},
    }
    chain = build_component("scheduler", section, provided={"total_steps": 100})
    assert chain == Chain(
        parts=[Cosine(100, 2), Cosine(100), Chain([])],
        named={"x": Cosine(5)},  # the file's word goes before the builder's
        last=Cosine(100),
    )


def test_an_object_made_in_python_passes_through() -> None:
    last = Cosine(3)
    chain = build_component("scheduler", {"name": "chain", "parts": [], "last": last})
    assert chain.last is last
    assert build_component("scheduler", {"name": "chain", "parts": [], "last": None}).last is None


def test_only_what_the_section_gives_is_passed_on() -> None:
    model = build_component("model", {"name": "mlp", "width": 3, "depth": [1]}, provided={"seed": 1})
    assert model.given == {
        "width": 3,
        "act": "relu",
        "sizes": (1, 2),
        "root": Path("data"),
        "sentinel": object,  # an identity that a copied default would lose
        "depth": [1],
    }


def test_the_section_shown_complete_builds_the_same_again(write: Any) -> None:
    shown = plain(select_component("scheduler", {"name": "cosine", "warmup": 2}, provided=["total_steps"]))
    assert shown == {"name": "cosine", "warmup_steps": 2}
    shown = plain(select_component("model", {"name": "mlp", "width": 3, "sizes": [4]}))
    assert shown == {"name": "mlp", "width": 3, "sizes": [4], "act": "relu", "root": "data"}
    again = read_config(write("x.yaml", dump_yaml({"model": shown}))).data["model"]
    assert (
        build_component("model", again).given
        == build_component("model", {"name": "mlp", "width": 3, "sizes": [4]}).given
    )
    nested = plain(select_component("scheduler", {"name": "chain", "parts": ["cosine"]}, provided=["total_steps"]))
    assert nested == {"name": "chain", "parts": [{"name": "cosine", "warmup_steps": 0}], "last": None}


def test_mistakes_come_with_file_line_and_path(write: Any) -> None:
    document = read_config(write("x.yaml", "model:\n  name: mlp\n  width: 0\n  act: rely\n"))
    with pytest.raises(ConfigError) as caught:
        build_component("model", document.data["model"], path="model", document=document)
    assert str(caught.value).splitlines() == [
        "x.yaml:3: model.width: must be greater than 0, got 0",
        "x.yaml:4: model.act: must be 'relu' or 'gelu', got 'rely'; did you mean 'relu'?",
    ]
    with pytest.raises(ConfigError, match=r"^model.width: missing; this key is required$"):
        select_component("model", "mlp")


def fail_with(error: Exception) -> Any:
    def factory() -> None:
        raise error

    return factory


class Awkward(EtudeError):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("width and depth\n  differ"), ConfigError, "width and depth differ"),
        (TypeError("no way"), ConfigError, "no way"),
        (ValueError(), ConfigError, "ValueError"),
        (DataError("no files in data/"), DataError, "no files in data/"),
        (ConfigError("bad {braces}"), ConfigError, "bad {braces}"),
        (Awkward(1, "odd"), ConfigError, "odd"),
    ],
)
def test_a_factory_that_refuses_gives_one_line_and_keeps_the_cause(
    write: Any, error: Exception, kind: type[Exception], text: str
) -> None:
    register("scheduler", "bad")(fail_with(error))
    document = read_config(write("x.yaml", "scheduler:\n  name: chain\n  parts:\n    - name: bad\n"))
    with pytest.raises(kind) as caught:
        build_component("scheduler", document.data["scheduler"], path="scheduler", document=document)
    assert str(caught.value) == f"x.yaml:4: scheduler.parts.0: scheduler 'bad': {text}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("own"), KeyError("own"), ZeroDivisionError("own"), OSError("own")])
def test_other_errors_of_a_factory_come_through_untouched(error: Exception) -> None:
    register("model", "bad")(fail_with(error))
    with pytest.raises(type(error)) as caught:
        build_component("model", "bad")
    assert caught.value is error


def test_positional_only_parameters_are_refused_in_words() -> None:
    def by_place(width: int, /) -> None: ...

    register("model", "by_place")(by_place)
    with pytest.raises(ConfigError, match="takes 'width' by position only"):
        build_component("model", {"name": "by_place", "width": 3})
