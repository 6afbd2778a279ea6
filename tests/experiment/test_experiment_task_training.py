"""Tasks, weighting and curriculum of a config: what trains, is evaluated and resumes."""

import copy
import json
import logging

import pytest
import torch

from etude.checkpoint import read_checkpoint
from etude.distributed import World
from etude.experiment import (
    build_data,
    build_trainer,
    evaluate_run,
    resume_run,
    train_experiment as train,
)
from etude.multitask.compare.tasks import single_task_config
from etude.multitask.weighting import UncertaintyWeighting
from task_experiment import CODE, EXPERIMENT, FUNCTIONS


def weights(run_dir):
    return read_checkpoint(run_dir / "checkpoints" / "last").model_state


def events(run_dir, kind):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event.get("event") == kind]


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
    numbers = evaluate_run("run", split="validation", which="last").metrics
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
        numbers = evaluate_run("run", split="validation", which="last").metrics
    assert {f"val_{name}" for name in numbers} == {name for name in outcome.metrics if name.startswith("val_")}
    assert numbers["annotation/loss"] == pytest.approx(outcome.metrics["val_annotation/loss"])
    assert "phase 1, which does not train writing, quality: not evaluated" in caplog.text


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


def test_metrics_get_the_classes_of_the_head(load):
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

    def reported(task, metric="f1"):
        found = specs[task].metrics[metric]
        return found.num_classes, found.num_labels

    assert reported("annotation") == reported("annotation", "f1_2") == reported("linear") == (3, None)
    assert specs["annotation"].variants["simple"].metrics["f1"].num_classes == 2
    assert reported("quality") == (None, 4)
    assert reported("match") == (None, None)
    assert reported("writing", "recall") == (5, None)


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


@pytest.mark.parametrize("data", [CODE, None], ids=str)
def test_data_of_a_tasks_own(load, data):
    tasks = copy.deepcopy(EXPERIMENT["tasks"])
    tasks["quality"]["data"] = FUNCTIONS
    for name in ("writing", "annotation"):
        if data is None:
            tasks[name]["data"] = {**CODE, "seed": 3}
        else:
            tasks[name]["data"] = "data"
    tasks["annotation"]["variants"]["simple"]["data"] = {**CODE, "seed": 4}
    trainer = build_trainer(load(tasks=tasks, data=data), progress=False)
    streams = [name for name, _ in trainer.loaders.train.mixture.shares]
    shared = {"writing", "annotation"} if data is None else {"data"}
    assert set(streams) >= shared | {"quality"}
    assert trainer.task.tasks["annotation"].variants["simple"].stream == "annotation-simple"
    trainer.train()


def test_stream_that_no_task_reads_is_left_out(load, caplog):
    streams = {**EXPERIMENT["data"]["streams"], "spare": CODE}
    weights = {"code": 1, "functions": 1, "spare": 3}
    with caplog.at_level(logging.WARNING, logger="etude"):
        config = load(data={"name": "streams", "streams": streams, "weights": weights})
        trainer = build_trainer(config, progress=False)
    assert "no task reads the stream 'spare', so it is skipped" in caplog.messages
    assert dict(trainer.loaders.train.mixture.shares) == {"code": 0.5, "functions": 0.5}
