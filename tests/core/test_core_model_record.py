"""The record of a model's class and arguments: built again it is the same, and nothing is guessed or imported."""

import json
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from etude.core import ConfigError
from etude.core.model_record import model_record, rebuild_model
from etude.models import MLP, CausalTransformerLM, LeNet5


@dataclass
class Sizes:
    width: int = 4
    shape: tuple[int, ...] = (1, 2)


class FromConfig(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(config.width, 2)


class Keeps(nn.Module):
    def __init__(self, width, *, names=("a", "b"), extra=None):
        super().__init__()
        self.width, self.names, self.extra = width, names, extra
        self.layer = nn.Linear(width, len(names))


class HasHparams(nn.Module):
    def __init__(self, width, **others):
        super().__init__()
        self.hparams = {"width": width, **others}
        self.layer = nn.Linear(width, 1)


class SomeHparams(nn.Module):
    """As a Lightning module that has not saved all of its hyperparameters."""

    def __init__(self, width=3, activation="relu"):
        super().__init__()
        self.hparams = {"width": width}
        self.layer = nn.Linear(width, 1)


class MoreHparams(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.hparams = {"width": width, "learning_rate": 0.1}
        self.layer = nn.Linear(width, 1)


class Nothing(nn.Module):
    layer = None


class Forgets(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, 1)


class Wider(LeNet5):
    def __init__(self, factor):
        super().__init__(num_classes=factor)


MODELS = [
    lambda: FromConfig(Sizes(3, (5,))),
    lambda: Keeps(3, names=("x", "y", "z"), extra={"deep": [1.5, None, True, ("t",)]}),
    lambda: HasHparams(5, anything="goes"),
    lambda: MoreHparams(6),
    lambda: Nothing(),
    lambda: LeNet5(7, (3, 32, 32), pooling="average"),
    lambda: LeNet5({"num_classes": 4}),
    lambda: MLP(4, [8, 3], out_features=2, activation="gelu"),
    lambda: CausalTransformerLM(11, d_model=8, n_layers=1, n_heads=2, tie_embeddings=False),
]


@pytest.mark.parametrize("make", MODELS)
def test_built_again_it_is_the_same(make):
    model = make()
    record = json.loads(json.dumps(model_record(model)))
    again = rebuild_model(record)
    assert str(again) == str(model)
    again.load_state_dict(model.state_dict(), strict=True)
    assert model_record(again) == model_record(model)


def test_values_come_back_as_they_were():
    again = rebuild_model(json.loads(json.dumps(model_record(MODELS[1]()))))
    assert (again.names, again.extra) == (("x", "y", "z"), {"deep": [1.5, None, True, ("t",)]})
    assert rebuild_model(model_record(MODELS[0]())).config == Sizes(3, (5,))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(plain)
def test_any_plain_value(value):
    record = json.loads(json.dumps(model_record(Keeps(1, extra=value))))
    if "arguments" in record:
        assert rebuild_model(record).extra == value
    else:
        assert {"class", "tuple"} & {*json.dumps(value, default=str).split('"')}


@pytest.mark.parametrize(
    "model",
    [
        Forgets(4),
        SomeHparams(4),
        Wider(3),
        Keeps(2, extra=torch.zeros(1)),
        Keeps(2, extra={1: 2}),
        nn.Linear(2, 3),
        nn.Sequential(nn.ReLU()),
    ],
)
def test_arguments_that_are_not_kept_are_not_guessed(model):
    record = model_record(model)
    assert "arguments" not in record
    with pytest.raises(ConfigError, match=type(model).__name__):
        rebuild_model(record)


def test_hugging_face_models():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    again = rebuild_model(json.loads(json.dumps(model_record(model))))
    again.load_state_dict(model.state_dict(), strict=True)
    assert again.config.to_dict() == model.config.to_dict()


def test_a_module_is_imported_only_on_request(tmp_path, monkeypatch):
    (tmp_path / "somewhere_else.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    pass\nran = True\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record = {"class": "somewhere_else:Net", "arguments": {}}
    with pytest.raises(ConfigError, match="import_class"):
        rebuild_model(record)
    assert "somewhere_else" not in sys.modules
    assert type(rebuild_model(record, import_class=True)).__name__ == "Net"
    assert type(rebuild_model(record)).__name__ == "Net"  # it is imported by now
    del sys.modules["somewhere_else"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (None, "record"),
        ({"class": 3}, "record"),
        ({"class": "os:system", "arguments": {"command": "true"}}, "os:system"),
        ({"class": "pathlib:Path", "arguments": {}}, "pathlib:Path"),
        ({"class": "torch.nn:Nonsense", "arguments": {}}, "Nonsense"),
        ({"class": "torch.nn:Linear", "arguments": {"in_features": 2}}, "out_features"),
        ({"class": "no_such_module_anywhere:Net", "arguments": {}}, "no_such_module_anywhere"),
        (
            {"class": "torch.nn:Dropout", "arguments": {"p": {"class": "pathlib:Path", "arguments": {}}}},
            "pathlib:Path",
        ),
    ],
)
@pytest.mark.parametrize("import_class", [False, True])
def test_records_that_name_something_else(record, named, import_class):
    with pytest.raises(ConfigError, match=named):
        rebuild_model(record, import_class=import_class)
