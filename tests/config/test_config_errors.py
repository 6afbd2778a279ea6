"""One complete line for every mistake in a file, whatever the mistake."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Len
from hypothesis import assume, given, settings, strategies as st
from pydantic import AliasChoices, Field

from etude.config import Document, Section, SectionModel, SectionSpec, apply_overrides, read_config, register
from etude.config.schema import validate_document, validate_section
from etude.config.selection import plain
from etude.config.shapes import canonical_keys
from etude.core.errors import ConfigError


class Inner(SectionModel):
    enabled: bool = True
    weight: Annotated[float, Ge(0)] = 0.1


class Training(SectionModel):
    epochs: Annotated[int, Gt(0)] = 10
    batch_size: Annotated[int, Gt(0)] = 64
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    log_interval: int = Field(100, validation_alias=AliasChoices("log_interval", "log_every"))
    note: str = ""
    accumulate: Annotated[int, Ge(1)] | dict[int, int] = 1
    device: str | int = "cpu"
    hook: Callable[[int], int] | None = None
    shape: tuple[int, int] = (1, 1)
    tags: Annotated[tuple[str, ...], Len(0, 2)] = ()
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()


SECTIONS = {
    "model": SectionSpec(kind="model", required=True),
    "training": SectionSpec(model=Training),
    "optimizer": SectionSpec(kind="optimizer", provided=("params",)),
    "scheduler": SectionSpec(kind="scheduler", provided=("total_steps",)),
    "callbacks": SectionSpec(kind="callback", many=True),
    "imports": SectionSpec(model=list[str]),
}


@pytest.fixture(autouse=True)
def components(empty_registry: None) -> None:
    @register("model", "lenet5")
    def lenet5(num_classes: int, dropout: float = 0.0) -> None: ...

    @register("optimizer", "sgd", aliases={"learning_rate": "lr"})
    def sgd(params: object, lr: Annotated[float, Gt(0)] = 0.01, momentum: float = 0.0) -> None: ...

    @register("optimizer", "adamw")
    def adamw(params: object, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.999)) -> None: ...

    @register("scheduler", "cosine")
    def cosine(total_steps: int, warmup_steps: int = 0) -> None: ...

    @register("scheduler", "sequence")
    def sequence(
        parts: list[Annotated[object, Section("scheduler")]],
        last: Annotated[object, Section("scheduler")] | None = None,
    ) -> None: ...

    @register("callback", "early_stopping")
    def early_stopping(patience: Annotated[int, Ge(1)] = 3) -> None: ...


TRAINING_KEYS = "(allowed: epochs, batch_size, precision, log_interval, note, accumulate, device, hook, …)"
SECTION_NAMES = "(allowed: model, training, optimizer, scheduler, callbacks, imports)"
GOOD = "model: {name: lenet5, num_classes: 10}\n"


def complain(write: Any, text: str, *overrides: str) -> list[str]:
    document = apply_overrides(read_config(write("x.yaml", text)), overrides)
    with pytest.raises(ConfigError) as caught:
        validate_document(document, SECTIONS)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "training: {batch_sise: 3}",
            "x.yaml:2: training.batch_sise: unknown key; did you mean 'batch_size'? " + TRAINING_KEYS,
        ),
        ("training: {epochs: ten}", "x.yaml:2: training.epochs: expected an integer, got 'ten'"),
        (
            "training: {epochs: '10'}",
            "x.yaml:2: training.epochs: expected an integer, got '10'; write 10 without quotes",
        ),
        ("training: {epochs: 1e2}", "x.yaml:2: training.epochs: expected an integer, got 100.0; write 100"),
        ("training: {epochs: true}", "x.yaml:2: training.epochs: expected an integer, got true"),
        ("training: {epochs: null}", "x.yaml:2: training.epochs: expected an integer, got null"),
        ("training: {epochs: 0}", "x.yaml:2: training.epochs: must be greater than 0, got 0"),
        ("training: {note: 3}", "x.yaml:2: training.note: expected a string, got 3; put it in quotes"),
        (
            "training: {precision: bf6}",
            "x.yaml:2: training.precision: must be 'fp32', 'bf16' or 'fp16', got 'bf6'; did you mean 'bf16'?",
        ),
        ("training: {accumulate: 0}", "x.yaml:2: training.accumulate: must be at least 1, got 0"),
        ("training: {accumulate: x}", "x.yaml:2: training.accumulate: expected an integer or a mapping, got 'x'"),
        ("training: {accumulate: {0: x}}", "x.yaml:2: training.accumulate.0: expected an integer, got 'x'"),
        (
            "training: {device: 1.5}",
            "x.yaml:2: training.device: expected a string or an integer, got 1.5; put it in quotes",
        ),
        (
            "training: {hook: f}",
            "x.yaml:2: training.hook: takes a function, which can only be given in Python, got 'f'",
        ),
        ("training: {shape: [1]}", "x.yaml:2: training.shape.1: expected more values: number 2 is missing, got [1]"),
        ("training: {shape: [1, 2, 3]}", "x.yaml:2: training.shape: must have at most 2 items, got [1, 2, 3]"),
        ("training: {shape: 3}", "x.yaml:2: training.shape: expected a list, got 3"),
        ("training: {tags: [a, 1]}", "x.yaml:2: training.tags.1: expected a string, got 1; put it in quotes"),
        (
            "training: {inner: {enabeld: true}}",
            "x.yaml:2: training.inner.enabeld: unknown key; did you mean 'enabled'? (allowed: enabled, weight)",
        ),
        ("training: {inners: [{weight: -1}]}", "x.yaml:2: training.inners.0.weight: must be at least 0, got -1"),
        ("training: {inner: 3}", "x.yaml:2: training.inner: expected a mapping, got 3"),
        ("training: 3", "x.yaml:2: training: expected a mapping, got 3"),
        ("optimizer: {name: sgd, lr: -0.1}", "x.yaml:2: optimizer.lr: must be greater than 0, got -0.1"),
        (
            "optimizer: {name: sgd, learning_rate: -0.1}",
            "x.yaml:2: optimizer.learning_rate: must be greater than 0, got -0.1",
        ),
        ("optimizer: {name: sgd, lr: x}", "x.yaml:2: optimizer.lr: expected a number, got 'x'"),
        (
            "optimizer: {name: sgd, lr: 1, learning_rate: 1}",
            "x.yaml:2: optimizer.learning_rate: means the same as 'lr', which is given too; keep one of them",
        ),
        (
            "optimizer: {name: sgd, betas: [1, 2]}",
            "x.yaml:2: optimizer.betas: unknown key; it is an argument of 'adamw' (allowed: name, lr, momentum)",
        ),
        (
            "optimizer: {name: sgd, params: 1}",
            "x.yaml:2: optimizer.params: is supplied when the component is built and cannot be given here; remove it",
        ),
        (
            "optimizer: {name: sgdd}",
            "x.yaml:2: optimizer.name: unknown optimizer 'sgdd'; did you mean 'sgd'? (there are: adamw, sgd)",
        ),
        (
            "optimizer: sdg",
            "x.yaml:2: optimizer: unknown optimizer 'sdg'; did you mean 'sgd'? (there are: adamw, sgd)",
        ),
        ("optimizer: {lr: 1}", "x.yaml:2: optimizer.name: missing; name an optimizer (there are: adamw, sgd)"),
        (
            "optimizer: {name: 3}",
            "x.yaml:2: optimizer.name: expected the name of an optimizer, got 3 (there are: adamw, sgd)",
        ),
        (
            "optimizer: 3",
            "x.yaml:2: optimizer: expected the name of an optimizer, or a mapping with 'name:' (there are: adamw, sgd)",
        ),
        (
            "optimizer: {name: sgd, epochs: 3}",
            "x.yaml:2: optimizer.epochs: unknown key; 'epochs' belongs to 'training' (allowed: name, lr, momentum)",
        ),
        (
            "optimizer: {name: sgd, epoch: 3}",
            "x.yaml:2: optimizer.epoch: unknown key; did you mean 'training.epochs'? (allowed: name, lr, momentum)",
        ),
        (
            "epochs: 3",
            "x.yaml:2: epochs: unknown section; 'epochs' belongs to 'training' " + SECTION_NAMES,
        ),
        (
            "optimiser: {name: sgd}",
            "x.yaml:2: optimiser: unknown section; did you mean 'optimizer'? " + SECTION_NAMES,
        ),
        (
            "callbacks:\n  - {name: early_stopping, patience: 0}",
            "x.yaml:3: callbacks.0.patience: must be at least 1, got 0",
        ),
        (
            "callbacks: [early_stopper]",
            (
                "x.yaml:2: callbacks.0: unknown callback 'early_stopper'; "
                "did you mean 'early_stopping'? (there are: early_stopping)"
            ),
        ),
        ("callbacks: early_stopping", "x.yaml:2: callbacks: expected a list, got 'early_stopping'"),
        (
            "scheduler:\n  name: sequence\n  parts:\n    - cosine\n    - {name: cosine, warmup_step: 3}",
            (
                "x.yaml:6: scheduler.parts.1.warmup_step: unknown key; "
                "did you mean 'warmup_steps'? (allowed: name, total_steps, warmup_steps)"
            ),
        ),
        (
            "scheduler: {name: sequence, parts: [], last: {name: cosinus}}",
            (
                "x.yaml:2: scheduler.last.name: unknown scheduler 'cosinus'; "
                "did you mean 'cosine'? (there are: cosine, sequence)"
            ),
        ),
        ("scheduler: sequence", "x.yaml:2: scheduler.parts: missing; this key is required"),
        ("imports: [1]", "x.yaml:2: imports.0: expected a string, got 1; put it in quotes"),
    ],
)
def test_each_mistake_is_one_complete_line(write: Any, section: str, expected: str) -> None:
    assert complain(write, f"{GOOD}{section}\n") == [expected]


def test_a_missing_section_and_a_missing_argument(write: Any) -> None:
    assert complain(write, "training: {}\n") == ["x.yaml: model: missing; this key is required"]
    assert complain(write, "model: lenet5\n") == ["x.yaml:1: model.num_classes: missing; this key is required"]
    # The misspelling explains why the right key is missing: one mistake, one line.
    (line,) = complain(write, "model: {name: lenet5, num_clases: 3}\n")
    assert "did you mean 'num_classes'?" in line


def test_a_misplaced_key_finds_a_section_that_is_not_there_yet(write: Any) -> None:
    (line,) = complain(write, f"{GOOD}training: {{betas: [0.9, 0.99]}}\n")
    assert "training.betas: unknown key; 'betas' belongs to 'optimizer'" in line


def test_all_mistakes_of_a_file_come_together_in_its_order(write: Any) -> None:
    text = "model: {name: lenet5, num_classes: ten}\noptimizer:\n  name: sgd\n  lr: -1\n"
    text += "training:\n  epochs: 0\n  xyz: 1\n"
    lines = complain(write, text, "callbacks=[nope]")
    assert [line.split(": ")[:2] for line in lines] == [
        ["command line", "callbacks.0"],
        ["x.yaml:1", "model.num_classes"],
        ["x.yaml:4", "optimizer.lr"],
        ["x.yaml:6", "training.epochs"],
        ["x.yaml:7", "training.xyz"],
    ]


def test_an_override_of_a_key_that_does_not_exist(write: Any) -> None:
    (line,) = complain(write, GOOD, "training.bacth_size=3")
    assert line.startswith("command line: training.bacth_size: unknown key; did you mean 'batch_size'?")


def keys_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(data, dict):
        return [at for key, value in data.items() for at in [(*path, key), *keys_of(value, (*path, key))]]
    if isinstance(data, list):
        return [at for index, value in enumerate(data) for at in keys_of(value, (*path, index))]
    return []


COMPLETE: dict[str, Any] = {
    "model": {"name": "lenet5", "num_classes": 10, "dropout": 0.5},
    "training": {"epochs": 3, "batch_size": 8, "precision": "bf16", "inner": {"enabled": True, "weight": 0.5}},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "scheduler": {"name": "sequence", "parts": [{"name": "cosine", "warmup_steps": 3}], "last": {"name": "cosine"}},
    "callbacks": [{"name": "early_stopping", "patience": 3}],
}
PATHS = [path for path in keys_of(COMPLETE) if path[-1] != "name"]


def rename(data: Any, path: tuple[Any, ...], new: str) -> Any:
    head, *rest = path
    if isinstance(data, list):
        return [rename(item, tuple(rest), new) if index == head else item for index, item in enumerate(data)]
    if rest:
        return {key: rename(value, tuple(rest), new) if key == head else value for key, value in data.items()}
    return {new if key == head else key: value for key, value in data.items()}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PATHS), st.data())
def test_any_misspelt_key_gives_exactly_one_line_that_names_it(path: tuple[Any, ...], data: st.DataObject) -> None:
    key = str(path[-1])
    at = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcxyz_"))
    edit = data.draw(st.sampled_from(["drop", "add", "change"]))
    wrong = key[:at] + {"drop": "", "add": letter + key[at], "change": letter}[edit] + key[at + 1 :]
    section = COMPLETE
    for part in path[:-1]:
        section = section[part]
    assume(wrong and wrong != key and wrong not in section)
    document = Document(rename(COMPLETE, path, wrong))
    with pytest.raises(ConfigError) as caught:
        validate_document(document, SECTIONS)
    dotted = ".".join(str(part) for part in (*path[:-1], wrong))
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith(f"{dotted}: ")]
    assert "unknown" in line
    if len(key) >= 4:  # of `lr` a single slip can leave one letter, which resembles nothing
        assert f"did you mean '{key}'?" in line
        assert str(caught.value) == line


def test_the_whole_file_validates_and_shows_itself_complete() -> None:
    sections = validate_document(Document(COMPLETE), SECTIONS)
    shown = plain(sections)
    assert shown["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    assert shown["training"]["log_interval"] == 100
    assert shown["scheduler"]["parts"] == [{"name": "cosine", "warmup_steps": 3}]
    assert "imports" not in shown
    again = validate_document(Document(shown), SECTIONS)
    assert plain(again) == shown


def test_null_turns_a_section_off_and_defaults_fill_a_fixed_one() -> None:
    data = {"model": {"name": "lenet5", "num_classes": 2}, "scheduler": None, "training": None}
    sections = validate_document(Document(data), SECTIONS)
    assert sections["scheduler"] is None
    assert sections["training"] == Training()
    assert "optimizer" not in sections
    with pytest.raises(ConfigError, match="model: expected the name of a model"):
        validate_document(Document({"model": None}), SECTIONS)


def test_two_spellings_in_two_files_are_no_conflict(write: Any) -> None:
    write("base.yaml", f"{GOOD}optimizer: {{name: sgd, learning_rate: 1}}\ntraining: {{log_every: 5}}\n")
    child = "extends: base.yaml\noptimizer: {lr: 2}\ntraining: {log_interval: 6}\n"
    document = read_config(write("child.yaml", child))
    sections = validate_document(document, SECTIONS)
    assert sections["optimizer"].arguments == {"lr": 2.0}
    assert sections["training"].log_interval == 6
    document = apply_overrides(document, ["optimizer.learning_rate=3", "training.log_every=7"])
    sections = validate_document(document, SECTIONS)
    assert sections["optimizer"].arguments == {"lr": 3.0}
    assert sections["training"].log_interval == 7


def test_canonical_keys_rename_and_messages_keep_the_written_spelling(write: Any) -> None:
    aliases = {"log_every": "log_interval", "grad_clip": "clip"}
    document = read_config(write("x.yaml", "training:\n  log_every: x\n  epochs: 1\n"))
    data = canonical_keys(document.data["training"], aliases, "training", document)
    assert data == {"log_interval": "x", "epochs": 1}
    with pytest.raises(ConfigError, match=r"^x.yaml:2: training.log_every: expected an integer, got 'x'$"):
        validate_section(Training, data, path="training", document=document)


def test_canonical_keys_refuse_two_spellings_in_one_place(write: Any) -> None:
    document = read_config(write("x.yaml", "training:\n  log_every: 1\n  log_interval: 2\n"))
    with pytest.raises(
        ConfigError, match=r"^x.yaml:3: training.log_interval: means the same as 'log_every', which is given too"
    ):
        canonical_keys(document.data["training"], {"log_every": "log_interval"}, "training", document)
    two = {"log_every": 1, "log_each": 2}
    with pytest.raises(ConfigError, match=r"training.log_each: means the same as 'log_every'"):
        canonical_keys(two, {"log_every": "log_interval", "log_each": "log_interval"}, "training")


def test_without_a_document_the_path_alone_starts_the_line() -> None:
    with pytest.raises(ConfigError, match=r"^training.epochs: must be greater than 0, got -1$"):
        validate_section(Training, {"epochs": -1}, path="training")
    with pytest.raises(ConfigError, match=r"^epochs: must be greater than 0, got -1$"):
        validate_section(Training, {"epochs": -1})
