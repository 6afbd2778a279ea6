"""Components are found by name in a table, and only those that a file names are imported."""

import json
import pkgutil
from importlib import import_module

import pytest

import etude
from etude.config import kinds, lookup, names, register
from etude.config.components import MODULES
from etude.core import ConfigError
from forked_python import run_python


def modules_after(code: str) -> set[str]:
    """Return the modules of ours that a process of its own has imported after this code."""
    code += "\nimport json, sys; print(json.dumps([one for one in sys.modules if one.startswith('etude')]))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_table_has_every_component_of_ours_with_its_module():
    for module in pkgutil.walk_packages(etude.__path__, "etude."):
        if module.name != "etude.__main__":
            try:
                import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":  # kernels, which nothing imports without it
                    raise
    found = {kind: {name: lookup(kind, name).factory.__module__ for name in names(kind)} for kind in kinds()}
    ours = {
        kind: {name: module for name, module in known.items() if module.startswith(("etude.", "optuna."))}
        for kind, known in found.items()
    }
    for kind in ("sampler", "pruner"):  # most of them are optuna's own classes
        ours[kind] = dict.fromkeys(ours[kind], "etude.sweep.search")
    expected = {kind: {name: f"etude.{one}" for name, one in known.items()} for kind, known in MODULES.items()}
    assert {kind: known for kind, known in ours.items() if known} == expected


def test_only_what_a_file_names_is_imported():
    document = {"model": "lenet5", "data": "mnist", "optimizer": "adamw", "callbacks": ["early_stopping"]}
    code = f"""
from etude.config import Document
from etude.experiment import validate_experiment
validate_experiment(Document({document}))
"""
    loaded = modules_after(code)
    assert {"etude.models.lenet5", "etude.data.catalog.mnist", "etude.callbacks.early_stopping"} <= loaded
    assert not {"etude.models.mlp", "etude.data.catalog.tokens", "etude.callbacks.csv_logger"} & loaded


def test_listing_names_imports_no_component():
    loaded = modules_after("from etude.config import kinds, names\nassert all(names(kind) for kind in kinds())")
    assert not {f"etude.{module}" for known in MODULES.values() for module in known.values()} & loaded


def test_a_name_of_ours_cannot_be_taken_before_ours_is_imported():
    code = """
from etude.config import register
from etude.core import ConfigError
try:
    register("model", "mlp")(dict)
except ConfigError as error:
    assert "etude.models.mlp.MLP" in str(error), error
else:
    raise AssertionError("the name was given away")
"""
    assert "etude.models.mlp" in modules_after(code)


def test_components_of_an_absent_room_are_unknown(monkeypatch):
    from etude.config import registry

    monkeypatch.setattr(registry, "_is_there", lambda room: room != "models")
    monkeypatch.setattr(registry, "_COMPONENTS", {})
    assert "model" not in kinds()
    with pytest.raises(ConfigError, match="unknown model 'lenet5'"):
        lookup("model", "lenet5")
    register("model", "lenet5")(dict)
    assert names("model") == ["lenet5"]
