"""Sections of features: found by their keys, unknown like any other where the room is not there."""

import sys

import pytest

from etude.config import Document
from etude.core import ConfigError
from etude.experiment import all_sections, validate_experiment
from etude.experiment.features import ROOM_OF
from etude.lazy import import_room

PLAIN = {"model": "lenet5", "data": "mnist"}
MODAL = PLAIN | {"vocab": {"image": 4}}


def test_every_key_of_the_table_is_served_by_its_room():
    assert set(ROOM_OF) <= set(all_sections())


@pytest.mark.parametrize(
    ("document", "rooms"),
    [
        (PLAIN, set()),
        (MODAL, {"etude.multimodal"}),
        (PLAIN | {"loss": "meaningful"}, {"etude.multimodal"}),
        (PLAIN | {"callbacks": ["task_gradients"]}, {"etude.multitask"}),
        (
            PLAIN | {"tasks": {"a": {"head": {"name": "linear", "out_features": 3}, "loss": "mse"}}},
            {"etude.multitask"},
        ),
    ],
)
def test_a_file_has_the_features_that_it_names(document, rooms):
    found = validate_experiment(Document(document)).features
    assert {type(one).__module__.rpartition(".")[0] for one in found} == rooms


@pytest.mark.parametrize(("key", "room"), ROOM_OF.items())
def test_keys_of_an_absent_room_name_it(monkeypatch, key, room):
    monkeypatch.setitem(sys.modules, f"{room}.feature", None)
    with pytest.raises(ConfigError, match=rf"^{key}: needs {room}\b") as caught:
        validate_experiment(Document(PLAIN | {key: {}}))
    assert "\n" not in str(caught.value)
    assert key not in all_sections()


def test_sections_are_attributes():
    config = validate_experiment(Document(MODAL))
    assert config.vocab.image == 4
    assert config.tasks is None
    assert config.model.component.name == "lenet5"
    with pytest.raises(AttributeError, match="taks"):
        _ = config.taks


def test_a_room_is_absent_only_if_it_is_not_there_itself(tmp_path, monkeypatch):
    (tmp_path / "some_room").mkdir()
    (tmp_path / "some_room" / "feature.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_room("absent_room.feature") is None
    assert import_room("some_room.other") is None
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        import_room("some_room.feature")
