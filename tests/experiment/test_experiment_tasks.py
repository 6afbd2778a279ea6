"""Tasks, weighting and curriculum in a config: what loads, and a line for every mistake."""

import re
import sys

import pytest
import torch
import yaml

from etude.core import ConfigError, EtudeError
from etude.experiment import build_trainer, experiment_schema, load_config
from etude.experiment.dry_run import dry_run
from task_experiment import CODE, EXPERIMENT, FUNCTIONS


def test_resolved_config_reads_back_to_the_same(load, tmp_path):
    config = load()
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "again.yaml")
    assert again.to_dict() == {**config.to_dict(), "name": "x"}
    written = config.to_dict()
    assert written["tasks"]["writing"]["loss"]["name"] == "language_modeling"  # what the head says
    assert written["curriculum"][0]["start"] == {"epoch": 1}


def test_overrides(load):
    config = load(
        "tasks.quality.weight=0.2", "curriculum.1.lr_scale=0.25", "tasks.quality.head.pooling=max", "weighting=dwa"
    )
    assert config.tasks["quality"].weight == 0.2
    assert config.curriculum[1].lr_scale == 0.25
    assert config.tasks["quality"].head.arguments["pooling"] == "max"
    assert config.selection("weighting").component.name == "dwa"


def test_default_curriculum(load):
    names = ("code_generation", "ontology_annotation", "test_generation", "quality")
    tasks = {name: {"head": "language_model"} for name in names}
    tasks["code_generation"]["variants"] = {"masked": {"loss": "masked_language_modeling"}}
    tasks["ontology_annotation"]["variants"] = {"simple": {}, "full": {}}
    config = load(tasks=tasks, curriculum="default", data=CODE)
    assert [phase.name for phase in config.curriculum] == ["code", "simple_ontology", "full_ontology", "all_tasks"]
    assert [phase["name"] for phase in config.to_dict()["curriculum"]] == [phase.name for phase in config.curriculum]


def test_schema_knows_the_sections(load, tmp_path):
    import jsonschema

    load()  # registers the components
    schema = experiment_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(EXPERIMENT)
    validator.validate(load().to_dict())
    for text in (
        "tasks: {a: {head: binary, weigt: 1}}",
        "tasks: {a: {loss: multi_label}}",
        "tasks: {a: {head: {name: sequence_classifier, num_clases: 3}}}",
        "tasks: {a: {head: binary, metrics: [f2]}}",
        "tasks: {a: {head: binary, weight: -1}}",
        "curriculum: [{name: a, start: 1, tasks: all, rmp: 3}]",
        "curriculum: defualt",
        "weighting: uncertainly",
    ):
        assert not validator.is_valid(yaml.safe_load(text)), text


TASK = EXPERIMENT["tasks"]["quality"]


@pytest.mark.parametrize(
    ("overrides", "sections", "words"),
    [
        (["tasks.quality.weight=-1"], {}, "command line: tasks.quality.weight: must be at least 0, got -1"),
        (["tasks.quality.weight=.nan"], {}, "command line: tasks.quality.weight: must be a finite number, got nan"),
        (
            ["tasks.quality.weigth=1"],
            {},
            (
                "command line: tasks.quality.weigth: unknown key; did you mean 'weight'? "
                "(allowed: head, loss, data, labels, causal, metrics, weight, variants)"
            ),
        ),
        (
            ["tasks.annotation.variants.simple.weight=1"],
            {},
            (
                "command line: tasks.annotation.variants.simple.weight: unknown key; 'weight' belongs to 'loss' "
                "(allowed: head, loss, data, labels, causal, metrics)"
            ),
        ),
        (
            ["tasks.quality.head.num_clases=3"],
            {},
            (
                "command line: tasks.quality.head.num_clases: unknown key; did you mean 'num_classes'? "
                "(allowed: name, num_classes, pooling, hidden, dropout, in_features)"
            ),
        ),
        (
            ["tasks.quality.metrics=[{name: f1, averag: micro}]"],
            {},
            (
                "command line: tasks.quality.metrics.0.averag: unknown key; did you mean 'average'? "
                "(allowed: name, num_classes, num_labels, average, threshold, ignore_index, class_dim, class_names)"
            ),
        ),
        (
            ["tasks.quality.data=function"],
            {},
            (
                "command line: tasks.quality.data: there is no stream 'function'; did you mean 'functions'? "
                "(there are: code, functions)"
            ),
        ),
        (
            ["curriculum.1.tasks=[writing, qualty]"],
            {},
            (
                "x.yaml:52: curriculum: phase 'all' names the task 'qualty', which is not defined; "
                "did you mean 'quality'? (there are: writing, annotation, quality)"
            ),
        ),
        (
            ["curriculum.0.variants.annotation=simpel"],
            {},
            (
                "command line: curriculum.0.variants.annotation: task 'annotation' has no variant 'simpel'; "
                "did you mean 'simple'? (there are: simple)"
            ),
        ),
        (
            ["curriculum.0.variants.writing=masked"],
            {},
            "command line: curriculum.0.variants.writing: task 'writing' has no variant 'masked' (there are: none)",
        ),
        (
            ["curriculum.1.ramp.epoch=3"],
            {},
            (
                "command line: curriculum.1.ramp.epoch: unknown key; did you mean 'epochs'? "
                "(allowed: start, epochs, steps)"
            ),
        ),
        (
            ["curriculum.1.start={epoc: 3}"],
            {},
            (
                "command line: curriculum.1.start.epoc: unknown key; did you mean 'epoch'? "
                "(allowed: epoch, step, metric, below, above)"
            ),
        ),
        (
            ["curriculum.1.mixture={cod: 1}"],
            {},
            (
                "command line: curriculum.1.mixture.cod: there is no stream 'cod'; did you mean 'code'? "
                "(there are: code, functions)"
            ),
        ),
        (
            ["curriculum.1.start=1"],
            {},
            "x.yaml:52: curriculum: phase 'all' begins at epoch 1, not after 'begin'",
        ),
        (
            ["curriculum.0.variants={quality: low}", "tasks.quality.variants={low: {causal: false}}"],
            {},
            (
                "command line: curriculum.0.variants.quality: phase 'begin' does not train 'quality'; "
                "add it to its tasks"
            ),
        ),
        (
            ["curriculum.1.start={metric: val_quality/f1, above: 0.5}"],
            {},
            (
                "command line: curriculum.1.start.metric: 'val_quality/f1' will not be reported: "
                "phase 'begin' does not train a task 'quality'"
            ),
        ),
        (
            ["curriculum.1.start={metric: val_anotation/f1, above: 0.5}"],
            {},
            (
                "command line: curriculum.1.start.metric: 'val_anotation/f1' will not be reported: "
                "phase 'begin' does not train a task 'anotation'; did you mean 'annotation'?"
            ),
        ),
        (
            [],
            {"tasks": {**EXPERIMENT["tasks"], "val_writing": TASK}},
            "x.yaml:51: tasks.val_writing: task names must not start with 'val_'",
        ),
        (
            ["data.streams={}"],
            {},
            "command line: data.streams: there is no stream; name at least one",
        ),
        (
            ["curriculum.1.lr_scale=-1"],
            {},
            "x.yaml:60: curriculum.1: phase 'all': lr_scale is -1.0; it must be finite and at least 0",
        ),
        (
            ["weighting.regression=[qualit]"],
            {},
            (
                "x.yaml:51: weighting: weighting 'uncertainty': regression names the task 'qualit'; "
                "did you mean 'quality'? (there are: writing, annotation, quality)"
            ),
        ),
        (
            ["weighting.tasks=[quality]"],
            {},
            "command line: weighting.tasks: its tasks are those of the section `tasks`; remove this",
        ),
        (
            ["loss=cross_entropy"],
            {},
            "command line: loss: every task has its own loss; move it to `tasks`, or remove it",
        ),
        (
            [],
            {"tasks": None, "weighting": None},
            "x.yaml:20: curriculum: needs tasks, and there is no `tasks:` section; add one, or remove this one",
        ),
        (
            [],
            {"tasks": None, "curriculum": None},
            "x.yaml:20: weighting: needs tasks, and there is no `tasks:` section; add one, or remove this one",
        ),
        (
            [],
            {"tasks": {}, "curriculum": None, "weighting": None},
            "x.yaml:20: tasks: there is no task",
        ),
        (
            ["tasks.quality.weight=0"],
            {"tasks": {"quality": TASK}, "curriculum": None},
            "x.yaml:20: tasks: there is no task with a weight above 0",
        ),
        (
            ["data=null"],
            {"tasks": {"quality": {**TASK, "data": None}}, "curriculum": None},
            "x.yaml:20: tasks: no task has data, and there is no `data:` section; add one",
        ),
        (
            [],
            {"tasks": {"code": {**TASK, "data": FUNCTIONS}}, "curriculum": None},
            "x.yaml:22: tasks.code.data: there is a stream 'code' already",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_is_one_line(load, overrides, sections, words):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sections)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sections", "words"),
    [
        (
            [],
            {"data": CODE, "curriculum": None},
            (
                "x.yaml:12: tasks.writing.data: there is no stream 'code' (there are: none); "
                "use `data: {name: streams, …}`"
            ),
        ),
        (
            [],
            {"tasks": {**EXPERIMENT["tasks"], "quality": {**TASK, "data": FUNCTIONS}}},
            "x.yaml:42: tasks.quality.data: the data section has streams already; move this data set to data.streams",
        ),
    ],
)
def test_mistake_that_only_the_data_tells(load, overrides, sections, words):
    config = load(*overrides, **sections)
    with pytest.raises(EtudeError) as caught:
        build_trainer(config, progress=False)
    assert str(caught.value).splitlines()[0] == words


@pytest.mark.parametrize(
    ("kind", "path", "override"),
    [
        ("head", "tasks.quality.head", "tasks.quality.head={name: number}"),
        ("metric", "tasks.quality.metrics.0", "tasks.quality.metrics=[number]"),
        ("weighting", "weighting", "weighting=number"),
    ],
)
def test_a_component_that_makes_something_else_is_named(load, tmp_path, kind, path, override):
    (tmp_path / "number.py").write_text(
        f"from etude.config import register\n@register({kind!r}, 'number')\ndef number(): return 3\n"
    )
    sys.modules.pop("number", None)
    config = load(override, imports=[*EXPERIMENT.get("imports", []), "./number.py"])
    with pytest.raises(ConfigError, match=rf"{re.escape(path)}: number is a int"):
        build_trainer(config, progress=False)


def test_the_layer_of_gradnorm_is_named_in_the_config(load):
    build_trainer(load(weighting={"name": "gradnorm", "layer": "trunk.mix"}), progress=False)
    with pytest.raises(ConfigError, match=r"weighting\.layer: .*'mixx' .*did you mean 'mix'"):
        build_trainer(load(weighting={"name": "gradnorm", "layer": "mixx"}), progress=False)


def test_a_dry_run_counts_the_activations_of_all_tasks(load):
    """The model takes the heads of the active tasks beside the batch."""
    config = load()
    found = dry_run(config)
    trainer = build_trainer(config, progress=False)
    own = {one.untyped_storage().data_ptr() for one in trainer.model.state_dict().values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        output = trainer.task.predict(trainer.model, next(iter(trainer.loaders.train.iterate(0))))
    assert set(output) >= {"writing"}
    assert found.activations == sum(size for _, size in kept.values())
