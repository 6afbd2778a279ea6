"""An experiment with several tasks, as a config."""

from pathlib import Path

COMPONENTS = Path(__file__).with_name("task_components.py")
CODE = {"name": "task_sequences", "keys": ["full", "simple"], "seed": 1}
FUNCTIONS = {"name": "task_sequences", "keys": ["quality", "match"], "seed": 2, "samples": 24}
TASKS = {
    "writing": {"data": "code", "head": "language_model"},
    "annotation": {
        "data": "code",
        "labels": "full",
        "head": {"name": "token_classifier", "num_classes": 3},
        "loss": "cross_entropy",
        "metrics": ["f1"],
    },
    "quality": {
        "data": "functions",
        "labels": "quality",
        "head": {"name": "sequence_classifier", "num_classes": 4},
        "loss": "multi_label",
        "weight": 0.5,
        "metrics": ["f1"],
    },
}
EXPERIMENT = {
    "imports": [str(COMPONENTS)],
    "model": "task_trunk",
    "data": {"name": "streams", "streams": {"code": CODE, "functions": FUNCTIONS}},
    "tasks": {
        **TASKS,
        "annotation": {
            **TASKS["annotation"],
            "metrics": ["f1", {"name": "f1", "average": "micro"}],
            "variants": {"simple": {"labels": "simple", "head": {"name": "token_classifier", "num_classes": 2}}},
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
