"""Tasks, weighting and curriculum in a config: what loads, what trains, and a line for every mistake."""

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
import yaml

from etude.checkpoint import read_checkpoint
from etude.core import ConfigError, EtudeError
from etude.distributed import World
from etude.experiment import (
    build_data,
    build_trainer,
    evaluate_run,
    experiment_schema,
    load_config,
    resume_run,
    train_experiment as train,
)
from etude.multitask.compare.tasks import single_task_config
from etude.multitask.weighting import UncertaintyWeighting

COMPONENTS = Path(__file__).with_name("task_components.py")
CODE = {"name": "task_sequences", "keys": ["full", "simple"], "seed": 1}
FUNCTIONS = {"name": "task_sequences", "keys": ["quality", "match"], "seed": 2, "samples": 24}
EXPERIMENT = {
    "imports": [str(COMPONENTS)],
    "model": "task_trunk",
    "data": {"name": "streams", "streams": {"code": CODE, "functions": FUNCTIONS}},
    "tasks": {
        "writing": {"data": "code", "head": "language_model"},
        "annotation": {
            "data": "code",
            "labels": "full",
            "head": {"name": "token_classifier", "num_classes": 3},
            "loss": "cross_entropy",
            "metrics": ["f1", {"name": "f1", "average": "micro"}],
            "variants": {"simple": {"labels": "simple", "head": {"name": "token_classifier", "num_classes": 2}}},
        },
        "quality": {
            "data": "functions",
            "labels": "quality",
            "head": {"name": "sequence_classifier", "num_classes": 4},
            "loss": "multi_label",
            "weight": 0.5,
            "metrics": ["f1"],
        },
    },
    "weighting": "uncertainty",
    "curriculum": [
        {"name": "begin", "start": 1, "tasks": ["writing", "annotation"], "variants": {"annotation": "simple"}},
        {"name": "all", "start": 3, "tasks": "all", "ramp": {"epochs": 1}, "lr_scale": 0.5},
    ],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "training": {"epochs": 4, "batch_size": 8, "device": "cpu", "log_interval": 3},
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the experiment with sections replaced (None takes one out) and overrides."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides, **sections):
        data = {**copy.deepcopy(EXPERIMENT), **sections}
        path = Path("x.yaml")
        path.write_text(
            yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False)
        )
        return load_config(path, overrides=overrides)

    return call


def weights(run_dir):
    return read_checkpoint(run_dir / "checkpoints" / "last").model_state


def events(run_dir, kind):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event.get("event") == kind]


# ------------------------------------------------------------------------------------------------ training


def test_yaml_to_trained_model(load, tmp_path):
    outcome = train(load(), run_dir="run", progress=False)
    assert outcome.status == "finished"
    numbers = outcome.metrics
    expected = {"writing/loss", "writing/perplexity", "annotation/f1", "annotation/f1_2", "quality/f1", "loss"}
    assert {f"val_{name}" for name in expected} <= set(numbers)
    state = weights(tmp_path / "run")
    names = {name.split(".")[1] for name in state if name.startswith("heads.")}
    assert names == {"writing", "annotation", "annotation:simple", "quality"}
    assert state["heads.annotation.classify.0.weight"].shape == (3, 8)
    assert state["heads.annotation:simple.classify.0.weight"].shape == (2, 8)
    assert state["weighting.log_variances"].abs().min() > 0  # learned: it began at 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["step"] == 36  # 72 samples in 9 batches, 4 epochs
    # Two epochs of code alone, then two of both streams by their sizes, 48 to 24.
    assert result["samples"] == {"writing": 240, "annotation": 240, "quality": 48}


def test_the_same_config_gives_the_same_weights_stopped_and_resumed_or_not(load, tmp_path):
    train(load(), run_dir="whole", progress=False)
    train(load("training.max_steps=23"), run_dir="parts", progress=False)  # inside of the second phase's ramp
    resume_run("parts", ["training.max_steps=null"], progress=False)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "parts")]
    assert results[0]["samples"] == results[1]["samples"]


@pytest.mark.parametrize("weighting", ["static", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo"])
@pytest.mark.parametrize("draw", ["alternate", "together"])
def test_every_weighting_trains_and_samples_are_counted_once(load, weighting, draw):
    data = {**EXPERIMENT["data"], "draw": draw, "weights": {"code": 1, "functions": 1}, "epoch_samples": 32}
    config = load("training.epochs=2", weighting=weighting, curriculum=None, data=data)
    outcome = train(config, run_dir="run", progress=False)
    result = json.loads((outcome.run_dir / "result.json").read_text())
    assert result["samples"] == {"writing": 32, "annotation": 32, "quality": 32}


def test_evaluate_a_run_with_tasks(load):
    outcome = train(load(), run_dir="run", progress=False)
    _, numbers = evaluate_run("run", split="validation", which="last")
    assert numbers["quality/f1"] == pytest.approx(outcome.metrics["val_quality/f1"])
    assert numbers["annotation/loss"] == pytest.approx(outcome.metrics["val_annotation/loss"])


def test_evaluate_measures_the_tasks_of_the_checkpoints_phase_as_they_were(load, caplog):
    """Before its last phase a run has tasks that nobody has trained, and others in another form."""
    phases = [
        {"name": "first", "start": 1, "tasks": ["annotation"], "variants": {"annotation": "simple"}},
        {"name": "rest", "start": 99, "tasks": "all"},
    ]
    outcome = train(load("training.epochs=1", curriculum=phases), run_dir="run", progress=False)
    with caplog.at_level(logging.WARNING, "etude"):
        _, numbers = evaluate_run("run", split="validation", which="last")
    assert {f"val_{name}" for name in numbers} == {name for name in outcome.metrics if name.startswith("val_")}
    assert numbers["annotation/loss"] == pytest.approx(outcome.metrics["val_annotation/loss"])
    assert "phase 1, which does not train writing, quality: not measured" in caplog.text


def test_weighting_does_not_decay_and_its_state_resumes(load):
    trainer = build_trainer(load("optimizer.weight_decay=0.3"), progress=False)
    found = {
        name: group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for name, parameter in trainer.model.named_parameters()
        if any(parameter is one for one in group["params"])
    }
    assert found.pop("weighting.log_variances") == 0.0
    assert set(found.values()) == {0.3}
    assert len(found) == len(list(trainer.model.parameters())) - 1
    assert isinstance(trainer.model.weighting, UncertaintyWeighting)
    assert trainer.model.weighting is trainer.task.weighting


def test_initial_weights_of_a_head_do_not_depend_on_other_tasks(load):
    def head(config):
        return build_trainer(config, progress=False).model.heads["quality"].classify[0].weight

    alone = {"quality": EXPERIMENT["tasks"]["quality"]}
    more = {"extra": {**EXPERIMENT["tasks"]["quality"]}, **EXPERIMENT["tasks"]}
    same = head(load())
    assert torch.equal(head(load(tasks=more)), same)
    assert torch.equal(head(load(tasks=alone, curriculum=None, weighting=None)), same)
    assert not torch.equal(head(load("training.seed=1")), same)


@pytest.mark.parametrize("task", list(EXPERIMENT["tasks"]))
def test_a_single_task_model_has_the_size_and_the_first_weights_of_the_multi_task_model(load, task):
    """Also where the vocabulary is that of another stream than the task's."""
    config = load("data.streams.functions.vocab_size=20", scheduler={"name": "warmup_cosine", "warmup_steps": 4})
    data = build_data(config, World())
    whole = build_trainer(config, data=data, progress=False).model.state_dict()
    assert whole["trunk.embedding.weight"].shape == (20, 8)
    single = single_task_config(config, task, data)
    trainer = build_trainer(single, progress=False)
    alone = trainer.model.state_dict()
    assert {name.split(".")[1] for name in alone if name.startswith("heads.")} == {task}
    # A language model makes its layer when it is put on the trunk.
    assert all(torch.equal(whole[name], value) for name, value in alone.items())
    trainer.train(1)


def test_metrics_are_told_the_classes_of_the_head(load):
    tasks = copy.deepcopy(EXPERIMENT["tasks"])
    tasks["match"] = {
        "data": "functions",
        "labels": "match",
        "head": "binary",
        "loss": "binary_cross_entropy",
        "metrics": ["f1"],
    }
    tasks["writing"]["metrics"] = [{"name": "recall", "num_classes": 5}]
    tasks["linear"] = {**tasks["annotation"], "head": {"name": "linear", "out_features": 3}, "variants": {}}
    specs = build_trainer(load(tasks=tasks), progress=False).task.tasks

    def told(task, metric="f1"):
        found = specs[task].metrics[metric]
        return found.num_classes, found.num_labels

    assert told("annotation") == told("annotation", "f1_2") == told("linear") == (3, None)
    assert specs["annotation"].variants["simple"].metrics["f1"].num_classes == 2
    assert told("quality") == (None, 4)
    assert told("match") == (None, None)
    assert told("writing", "recall") == (5, None)


def test_tasks_on_plain_data(load):
    """One data set with the labels of all tasks: every batch is for all of them."""
    tasks = {
        "annotation": {
            "labels": "full",
            "head": {"name": "token_classifier", "num_classes": 3},
            "loss": "cross_entropy",
        },
        "writing": {"head": "language_model"},
    }
    outcome = train(load(tasks=tasks, data=CODE, curriculum=None), run_dir="run", progress=False)
    result = json.loads((outcome.run_dir / "result.json").read_text())
    assert result["samples"] == {"annotation": 4 * 48, "writing": 4 * 48}


@pytest.mark.parametrize("data", [CODE, {"name": "streams", "streams": {"code": CODE}}, None], ids=str)
def test_data_of_a_tasks_own(load, data):
    tasks = copy.deepcopy(EXPERIMENT["tasks"])
    tasks["quality"]["data"] = FUNCTIONS
    for name in ("writing", "annotation"):
        if data is None:
            tasks[name]["data"] = {**CODE, "seed": 3}
        elif data is CODE:
            tasks[name]["data"] = "data"
    tasks["annotation"]["variants"]["simple"]["data"] = {**CODE, "seed": 4}
    trainer = build_trainer(load(tasks=tasks, data=data), progress=False)
    streams = [name for name, _ in trainer.loaders.train.mixture.shares]
    shared = {"writing", "annotation"} if data is None else {"data"} if data is CODE else {"code"}
    assert set(streams) == shared | {"quality", "annotation-simple"}
    assert trainer.task.tasks["annotation"].variants["simple"].stream == "annotation-simple"
    trainer.train()


def test_stream_that_no_task_reads_is_left_out(load, caplog):
    streams = {**EXPERIMENT["data"]["streams"], "spare": CODE}
    weights = {"code": 1, "functions": 1, "spare": 3}
    with caplog.at_level(logging.WARNING, logger="etude"):
        config = load(data={"name": "streams", "streams": streams, "weights": weights})
        trainer = build_trainer(config, progress=False)
    assert "no task reads the stream 'spare': it is left out" in caplog.messages
    assert dict(trainer.loaders.train.mixture.shares) == {"code": 0.5, "functions": 0.5}


# ------------------------------------------------------------------------------------------------ configs


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
        (["tasks.quality.weight=.nan"], {}, "command line: tasks.quality.weight: must be finite, got nan"),
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
                "(allowed: name, num_classes, num_labels, average, threshold, ignore_index, class_dim)"
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
            ["tasks.quality.data=mnist"],
            {},
            (
                "command line: tasks.quality.data: there is no stream 'mnist'; as a data set of its own, write it as a "
                "mapping: {name: mnist, …} (there are: code, functions)"
            ),
        ),
        (
            ["curriculum.1.tasks=[writing, qualty]"],
            {},
            (
                "command line: curriculum.1.tasks.1: phase 'all' names the task 'qualty', which is not defined; "
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
            "x.yaml:52: curriculum: phases 'begin' and 'all' both begin at epoch 1; move one of them",
        ),
        (
            ["curriculum.0.variants={quality: low}", "tasks.quality.variants={low: {causal: false}}"],
            {},
            (
                "command line: curriculum.0.variants.quality: phase 'begin' does not train 'quality'; "
                "name it in its tasks, or take this out"
            ),
        ),
        (
            ["curriculum.1.start={metric: val_quality/f1, above: 0.5}"],
            {},
            (
                "command line: curriculum.1.start.metric: 'val_quality/f1' will not be reported: "
                "the phase before, 'begin', does not train a task 'quality'"
            ),
        ),
        (
            ["curriculum.1.start={metric: val_anotation/f1, above: 0.5}"],
            {},
            (
                "command line: curriculum.1.start.metric: 'val_anotation/f1' will not be reported: "
                "the phase before, 'begin', does not train a task 'anotation'; did you mean 'annotation'?"
            ),
        ),
        (
            [],
            {"tasks": {**EXPERIMENT["tasks"], "val_writing": TASK}},
            "x.yaml:51: tasks.val_writing: numbers of validation begin with 'val_', so no task does; call it otherwise",
        ),
        (
            ["data.streams={}"],
            {},
            "command line: data.streams: there is no stream; name at least one",
        ),
        (
            ["curriculum.1.lr_scale=-1"],
            {},
            "x.yaml:60: curriculum.1: phase 'all': lr_scale is -1.0; give a finite number, 0 or more",
        ),
        (
            ["curriculum=default"],
            {},
            (
                "command line: curriculum: the default phases need these tasks (with variants): "
                "code_generation (masked), ontology_annotation (full, simple), test_generation"
            ),
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
            "command line: weighting.tasks: its tasks are those of the section `tasks`; take this out",
        ),
        (
            ["loss=cross_entropy"],
            {},
            "command line: loss: every task has a loss of its own; move it to `tasks`, or take it out",
        ),
        (
            [],
            {"tasks": None, "weighting": None},
            "x.yaml:20: curriculum: needs tasks, and there is no `tasks:` section; add one, or take this one out",
        ),
        (
            [],
            {"tasks": None, "curriculum": None},
            "x.yaml:20: weighting: needs tasks, and there is no `tasks:` section; add one, or take this one out",
        ),
        (
            [],
            {"tasks": {}, "curriculum": None, "weighting": None},
            "x.yaml:20: tasks: there is no task; name at least one, or take the section out",
        ),
        (
            ["tasks.quality.weight=0"],
            {"tasks": {"quality": TASK}, "curriculum": None},
            "x.yaml:20: tasks: no task has a weight above 0: there is nothing to learn from",
        ),
        (
            ["data=null"],
            {"tasks": {"quality": {**TASK, "data": None}}, "curriculum": None},
            "x.yaml:20: tasks: no task has data, and there is no `data:` section; add one",
        ),
        (
            [],
            {"tasks": {"code": {**TASK, "data": FUNCTIONS}}, "curriculum": None},
            "x.yaml:22: tasks.code.data: there is a stream 'code' already; call it or the task otherwise",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_is_one_line(load, overrides, sections, words):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sections)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("overrides", "sections", "words"),
    [
        (
            [],
            {"data": CODE, "curriculum": None},
            (
                "x.yaml:12: tasks.writing.data: the data section has no streams, so 'code' is none; "
                "use `data: {name: streams, …}`"
            ),
        ),
        (
            [],
            {
                "data": {**EXPERIMENT["data"], "weights": {"code": 1, "functions": 1}},
                "tasks": {**EXPERIMENT["tasks"], "quality": {**TASK, "data": FUNCTIONS}},
            },
            (
                "x.yaml:20: data.weights: say nothing of the stream 'quality', the data of a task; "
                "move it to data.streams and give it a weight"
            ),
        ),
    ],
)
def test_mistake_that_only_the_data_tells(load, overrides, sections, words):
    config = load(*overrides, **sections)
    with pytest.raises(EtudeError) as caught:
        build_trainer(config, progress=False)
    assert str(caught.value).splitlines()[0] == words


def test_the_layer_of_gradnorm_is_named_in_the_config(load):
    build_trainer(load(weighting={"name": "gradnorm", "layer": "trunk.mix"}), progress=False)
    with pytest.raises(ConfigError, match=r"weighting\.layer: .*'mixx'; did you mean 'mix'"):
        build_trainer(load(weighting={"name": "gradnorm", "layer": "mixx"}), progress=False)
