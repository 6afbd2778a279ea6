"""A model that processes divide, by FSDP2, tensor parallelism or both, is trained like that of one process."""

import pytest
from test_distributed_equal import CASES, LOOSE

from grids import sampled
from run_files import records

pytestmark = pytest.mark.distributed

FSDP = {"parallel": {"shard": "all", "data": 1}}
HYBRID = {"parallel": {"data": 2, "shard": 2}}
TENSOR = {"parallel": {"tensor": 2}}
MODEL = {"name": "transformer_lm", "vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0}
TRANSFORMER = {"data": {"name": "toy_text", "samples": 41}, "model": {**MODEL, "max_len": 12}}
FUSED = {"loss": {"name": "language_modeling", "fused_head": True}}
UNSUPPORTED = {"lookahead of sam", "gradient monitor", "dataset with workers", "fused head, unused parameters"}


def check(runs, sizes, training, sections, layout, tolerance):
    training = {"epochs": 2, "save_checkpoints": False, **training}
    alone, ended = runs.train(1, runs.write("alone", training, **sections))
    ended.ok()
    config = runs.write("divided", training, **sections, **layout)
    for size in sizes:
        folder, ended = runs.train(size, config)
        ended.ok()
        expected, found = records(alone), records(folder)
        assert len(expected) > 4
        assert [list(one) for one in found] == [list(one) for one in expected]
        for mine, theirs in zip(found, expected, strict=True):
            numbers = {key: value for key, value in theirs.items() if isinstance(value, int | float)}
            assert {key: mine[key] for key in numbers} == pytest.approx(numbers, rel=tolerance, abs=tolerance), size


@pytest.mark.parametrize("case", sampled(3, [name for name in CASES if name not in UNSUPPORTED]))
def test_sharded_over_processes(runs, case):
    sizes, training, sections = CASES[case]
    tolerance = LOOSE.get(case, 1e-7 if sections.get("model", {}).get("double") else 2e-5)
    check(runs, sizes, training, sections, FSDP, tolerance)


LAYOUTS = {
    "sharded": (2, FSDP),
    "replicas of shards": (4, HYBRID),
    "tensor": (2, TENSOR),
    "replicas, tensor": (4, {"parallel": {"data": 2, "tensor": 2}}),
    "shards, tensor": (4, {"parallel": {"shard": 2, "tensor": 2}}),
}
SETTINGS = {
    "plain": ({}, {}),
    "accumulated": ({"grad_accum_steps": 2}, {}),
    "recomputed": ({"activation_checkpointing": True}, {}),
    "averaged": ({"ema": 0.9}, {}),
    "in parts": ({"micro_batch_size": 4}, {}),
    "clipped elements": ({"gradient_clip_norm": None, "gradient_clip_value": 0.01}, {}),
    "fused head": ({"grad_accum_steps": 2}, FUSED),
    "frozen": ({"freeze": "embedding"}, {}),
    "lion": ({}, {"optimizer": {"name": "lion", "lr": 1e-3}}),
    "schedule-free": ({}, {"optimizer": {"name": "schedule_free_adamw", "lr": 1e-3}}),
    "bf16": ({"precision": "bf16"}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transformer_in_every_layout(runs, layout):
    size, section = LAYOUTS[layout]
    check(runs, (size,), {}, TRANSFORMER | {"optimizer": {"name": "adamw", "lr": 1e-3}}, section, 2e-5)


@pytest.mark.parametrize("layout", ["sharded", "tensor", "shards, tensor"])
@pytest.mark.parametrize("setting", sampled(2, SETTINGS))
def test_a_transformer_with_every_setting(runs, setting, layout):
    training, sections = SETTINGS[setting]
    size, section = LAYOUTS[layout]
    sections = TRANSFORMER | {"optimizer": {"name": "adamw", "lr": 1e-3}} | sections
    check(runs, (size,), training, sections, section, 2e-2 if setting == "bf16" else 5e-5)
