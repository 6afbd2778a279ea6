"""A model that processes divide, by FSDP2, tensor parallelism or both, is trained like that of one process."""

import pytest
import torch
from test_distributed_equal import CASES, LOOSE

from etude.checkpoint import read_checkpoint
from grids import sampled
from run_files import files_of, records

pytestmark = pytest.mark.distributed

FSDP = {"parallel": {"shard": "all", "data": 1}}
HYBRID = {"parallel": {"data": 2, "shard": 2}}
TENSOR = {"parallel": {"tensor": 2}}
MODEL = {"name": "transformer_lm", "vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0}
TRANSFORMER = {"data": {"name": "toy_text", "samples": 41}, "model": {**MODEL, "max_len": 12}}
FUSED = {"loss": {"name": "language_modeling", "fused_head": True}}
UNSUPPORTED = {
    "gradient monitor",
    "dataset with workers",
    "fused head, unused parameters",
}


def check(runs, sizes, training, sections, layout, tolerance):
    training = {"epochs": 2, **training}
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
        for name, weight in weights_of(alone).items():
            torch.testing.assert_close(weights_of(folder)[name], weight, rtol=tolerance, atol=10 * tolerance)


def weights_of(folder):
    """The weights of the last checkpoint, put together if several processes wrote them."""
    return read_checkpoint(folder / "checkpoints" / "last").model_state


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
    "sharded, without memory": (2, {"parallel": {"shard": 2, "meta_device": True}}),
    "shards, tensor, without memory": (4, {"parallel": {"shard": 2, "tensor": 2, "meta_device": True}}),
}
SAM = {"name": "sam", "optimizer": {"name": "adamw", "lr": 1e-3}}
NORMUON = {"name": "muon", "lr": 1e-3, "normuon": True}
SETTINGS = {
    "plain": ({}, {}),
    "accumulated": ({"grad_accum_steps": 2}, {}),
    # weights that were gathered for a validation are not those to train on, and no save frees them
    "averaged": ({"ema": 0.9, "validate_every_steps": 2, "checkpoint_interval": 0}, {}),
    "recomputed": ({"activation_checkpointing": True}, {}),
    "in parts": ({"micro_batch_size": 4}, {}),
    "clipped elements": ({"gradient_clip_norm": None, "gradient_clip_value": 0.01}, {}),
    "fused head": ({"grad_accum_steps": 2}, FUSED),
    "frozen": ({"freeze": "embedding"}, {}),
    "lion": ({}, {"optimizer": {"name": "lion", "lr": 1e-3}}),
    "schedule-free": ({}, {"optimizer": {"name": "schedule_free_adamw", "lr": 1e-3}}),
    "bf16": ({"precision": "bf16"}, {}),
    "muon": ({"grad_accum_steps": 2}, {"optimizer": {"name": "muon", "lr": 1e-3, "cautious": True}}),
    "normuon": ({}, {"optimizer": NORMUON}),
    "sam": ({"grad_accum_steps": 2}, {"optimizer": SAM}),
    "adaptive sam": ({"ema": 0.9}, {"optimizer": {**SAM, "rho": 0.5, "adaptive": True}}),
    "compiled": ({"compile": "step", "grad_accum_steps": 2}, {}),
    "momentum": ({}, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}}),
    "compiled, recomputed": ({"compile": "model", "activation_checkpointing": True}, FUSED),
}


@pytest.mark.parametrize("layout", sampled(2, LAYOUTS))
def test_a_transformer_in_every_layout(runs, layout):
    size, section = LAYOUTS[layout]
    check(runs, (size,), {}, TRANSFORMER | {"optimizer": {"name": "adamw", "lr": 1e-3}}, section, 2e-5)


@pytest.mark.parametrize(("setting", "layout"), sampled(4, SETTINGS, ["sharded", "tensor", "shards, tensor"]))
def test_a_transformer_with_every_setting(runs, setting, layout):
    training, sections = SETTINGS[setting]
    size, section = LAYOUTS[layout]
    sections = TRANSFORMER | {"optimizer": {"name": "adamw", "lr": 1e-3}} | sections
    check(runs, (size,), training, sections, section, 2e-2 if setting == "bf16" else 5e-5)


OPTIMIZERS = {"adamw": {"name": "adamw", "lr": 1e-3}, "sam of normuon": {**SAM, "optimizer": NORMUON}}


@pytest.mark.parametrize(("layout", "optimizer"), sampled(3, LAYOUTS, OPTIMIZERS))
def test_a_stopped_run_continues_with_the_same_bytes(runs, layout, optimizer):
    size, section = LAYOUTS[layout]
    model = {**TRANSFORMER["model"], "dropout": 0.2}
    sections = {**TRANSFORMER, "model": model, "optimizer": OPTIMIZERS[optimizer], **section}
    training = {"epochs": 2, "ema": 0.9, "grad_accum_steps": 2}
    straight, ended = runs.train(size, runs.write("straight", training, **sections))
    ended.ok()
    stopped, ended = runs.train(size, runs.write("stopped", {**training, "max_steps": 2}, **sections))
    ended.ok()
    runs.resume(size, stopped, "training.max_steps=null").ok()
    found, expected = files_of(stopped), files_of(straight)
    assert found.keys() == expected.keys()
    assert len(found) >= 2
    for name in found:
        assert found[name] == expected[name], name


CHAINS = [
    ("adamw", "sharded", "tensor", "alone"),
    ("adamw", "alone", "shards, tensor", "sharded"),
    ("normuon", "replicas of shards", "tensor", "alone"),
    ("normuon", "alone", "shards, tensor", "sharded"),
]


@pytest.mark.parametrize("chain", sampled(2, CHAINS))
def test_a_run_continues_in_another_layout(runs, chain):
    """Every part of the run is trained by other processes, and it ends like that of one process."""
    layouts = {**LAYOUTS, "alone": (1, {"parallel": {"data": 1}})}
    optimizer, *chain = chain
    sections = TRANSFORMER | {"optimizer": {**OPTIMIZERS, "normuon": NORMUON}[optimizer]}
    training = {"epochs": 3, "ema": 0.9}
    alone, ended = runs.train(1, runs.write("alone", training, **sections))
    ended.ok()
    size, section = layouts[chain[0]]
    folder, ended = runs.train(size, runs.write("chain", {**training, "max_steps": 4}, **sections, **section))
    ended.ok()
    for part, name in enumerate(chain[1:], start=1):
        size, section = layouts[name]
        sizes = {"data": "auto", "shard": 1, "tensor": 1} | section["parallel"]
        end = "null" if part == 2 else 9
        changes = [f"parallel.{key}={value}" for key, value in sizes.items()]
        ended = runs.resume(size, folder, *changes, f"training.max_steps={end}")
        assert set(ended.codes) == {0}, ended
    for name, weight in weights_of(alone).items():
        torch.testing.assert_close(weights_of(folder)[name], weight, rtol=5e-5, atol=5e-4)
    last, expected = records(folder, "val")[-1], records(alone, "val")[-1]
    assert last["val_loss"] == pytest.approx(expected["val_loss"], rel=5e-5)


@pytest.mark.parametrize(
    ("layout", "sections", "words"),
    [
        ({"shard": 3}, {}, "number of processes, 2"),
        ({"tensor": 2}, {}, "no tensor plan"),
        ({"tensor": 2}, {**TRANSFORMER, "model": {**TRANSFORMER["model"], "n_heads": 1}}, "n_heads 1"),
        ({"shard": 2}, {"optimizer": {"name": "adafactor"}}, "whole matrices"),
        ({"shard": 2, "blocks": "layers.*"}, {}, "no module matches 'layers.*'"),
        ({"shard": 2, "cpu_offload": True}, {}, "is for CUDA"),
    ],
)
def test_what_cannot_be_divided_is_one_line(runs, layout, sections, words):
    _, ended = runs.train(2, runs.write("refused", {}, parallel=layout, **sections))
    assert set(ended.codes) == {2}
    assert len(ended.said) == 1
    assert words in ended.said[0]


@pytest.mark.parametrize(
    "check_name",
    [
        "sharded_like_alone",
        "replicated_like_alone",
        "plan_inside",
        "compiled_blocks",
        "deferred",
        "embedding_by_rows",
        "first_rank_without_samples",
        "what_is_not_divided",
        "weight_on_one_rank",
        "divided_already",
        "what_is_not_all_reduced",
        "lent_batches_draw_nothing",
        "lent_batches_stay_on_their_device",
        "backward_passes_of_others",
        "several_forward_passes",
    ],
)
def test_models_of_every_kind(runs, check_name):
    ended = runs.call(2, check_name)
    assert set(ended.codes) == {0}, ended


@pytest.mark.parametrize("size", [2, 3])
def test_counts_with_gradients(runs, size):
    runs.call(size, "counts_with_gradients").ok()


@pytest.mark.parametrize(
    "check_name",
    [
        "llama_tensor",
        "llama_sharded",
        pytest.param("llama_compiled", marks=pytest.mark.slow),
        "mlp_plan",
        "mlp_optimizer",
        "mlp_double",
        "mlp_kernels",
    ],
)
def test_models_of_other_people(runs, check_name):
    ended = runs.call(2, check_name)
    assert set(ended.codes) == {0}, ended


def test_a_convolution_of_one_channel_trains_in_silence(runs):
    runs.call(2, "lenet").ok()
