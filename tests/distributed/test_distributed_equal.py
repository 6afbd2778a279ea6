"""The same global batches on one, two and three processes give the same numbers, step by step, and the same weights."""

import pytest
import torch
from safetensors.torch import load

from etude.distributed import World
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import SupervisedTask
from grids import sampled
from run_files import records

pytestmark = pytest.mark.distributed

TEXT = {"data": {"name": "toy_text", "samples": 41}, "model": {"name": "toy_lm"}}
HEAD = {"loss": {"name": "language_modeling", "fused_head": "head"}}
TERMS = {"loss": {"name": "toy_terms"}}


PEER, LISTS = (
    {"name": "torchmetrics", "metric": f"classification.Multiclass{metric}", "arguments": {"num_classes": 3}}
    for metric in ("F1Score", "CalibrationError")  # whose states are sums, and lists
)
METRICS = ["f1", "confusion_matrix", "auroc", "perplexity", {"name": "recall", "average": "none"}, PEER, LISTS]


def modal(kind, **loss):
    """Rows over two modalities, many of them MISS alone, whose last batch of one leaves a process without samples."""
    return {
        "data": {"name": "toy_modal", "samples": 41},
        "model": {"name": "toy_lm", "double": True},
        "loss": {"name": "meaningful", "kind": kind, "weights": {"vector": 3.0}, "weight": 2.0, "sample_k": None}
        | loss,
    }


def points(samples, **model):
    """Points, and a model in float64: what differs is the division, which is float32 everywhere."""
    return {
        "data": {"name": "toy_classes", "samples": samples, "double": True},
        "model": {"name": "toy_net", "double": True, **model},
    }


CASES = {
    # 50 samples in batches of 8: the last has 2, so that the first of three processes has none
    "plain": ((2, 3), {}, points(50)),
    # the last batch has 1 sample: the first of two processes, which is the one that writes, has none
    "one left": ((2,), {}, points(49)),
    "fewer samples than processes": ((3,), {"epochs": 6}, points(2)),
    "ragged masks": ((2, 3), {}, TEXT),
    "accumulation": ((2,), {"grad_accum_steps": 4}, points(49)),
    "accumulation, ragged masks": ((3,), {"grad_accum_steps": 2, "gradient_clip_norm": 0.2}, TEXT),
    "fused head": ((2,), {"grad_accum_steps": 2}, TEXT | HEAD),
    # torch looks for unused parameters in the model's output, where the head's weights are not used yet
    "fused head, unused parameters": (
        (2,),
        {"find_unused_parameters": True, "epochs": 1},
        TEXT | HEAD | {"model": {"name": "toy_lm", "spare": True}},
    ),
    "several terms": ((2, 3), {}, points(49) | TERMS),
    "several terms, accumulation": ((3,), {"grad_accum_steps": 4}, points(50) | TERMS),
    "meaningful": ((2,), {"grad_accum_steps": 2}, modal({"scalar": "hl_gauss"}, fused_head=False)),
    "meaningful, fused head": ((2,), {"grad_accum_steps": 2}, modal({"scalar": "wasserstein"}, fused_head="head")),
    # the norms of layers are those after the processes have met, and are in the records
    "gradient monitor": (
        (2, 3),
        {"grad_accum_steps": 2},
        points(49) | {"callbacks": [{"name": "gradient_monitor", "every": 1, "log_layers": True}]},
    ),
    # a last batch of 1 leaves ranks without samples; counts are summed, scores are gathered
    "metrics": ((2, 3), {"train_metrics": True}, points(49) | {"metrics": METRICS}),
    "metrics of a process without validation samples": (
        (2,),
        {},
        points(49)
        | {
            "data": {"name": "toy_classes", "samples": 49, "validation": 1, "double": True},
            "metrics": [PEER, LISTS, "f1"],
        },
    ),
    # torch warns if no parameter is unused any more
    "frozen at first, averaged": (
        (2, 3),
        {
            "epochs": 10,
            "max_steps": 14,
            "freeze": "middle",
            "unfreeze": {1: "middle.weight", 9: "middle.bias"},
            "ema": 0.9,
        },
        points(49),
    ),
    "several optimizers": (
        (2, 3),
        {},
        points(49)
        | {
            "optimizer": {
                "name": "several",
                "patterns": ["last", "*"],
                "optimizers": [{"name": "sgd", "momentum": 0.9}, {"name": "adamw", "decay_only_matrices": True}],
            }
        },
    ),
    # moved by the gradient of all ranks, also where one of them has no samples
    "lookahead of sam": (
        (2, 3),
        {"grad_accum_steps": 2},
        points(49)
        | {
            "optimizer": {
                "name": "lookahead",
                "k": 3,
                "optimizer": {"name": "sam", "rho": 0.5, "optimizer": {"name": "sgd", "lr": 0.1}},
            }
        },
    ),
    "muon": ((2, 3), {"grad_accum_steps": 2}, points(49) | {"optimizer": {"name": "muon", "lr": 0.01}}),
    "sam of schedule-free": (
        (2,),
        {},
        points(49) | {"optimizer": {"name": "sam", "optimizer": {"name": "schedule_free_adamw", "lr": 0.01}}},
    ),
    "no clipping": ((2,), {"gradient_clip_norm": None}, points(50)),
    "clipped elements": ((2,), {"gradient_clip_norm": None, "gradient_clip_value": 0.01}, points(49)),
    "bf16": ((2,), {"precision": "bf16"}, {}),
    "fp16": ((2,), {"precision": "fp16"}, {}),
    "dataset": ((3,), {}, {"data": {"name": "toy_dataset", "samples": 49}}),
    "dataset with workers": ((2,), {"num_workers": 1}, {"data": {"name": "toy_dataset", "samples": 49}}),
    "drop last": ((2,), {"drop_last": True}, points(49)),
    "unused parameters": ((2, 3), {"find_unused_parameters": True}, {"model": {"name": "toy_unused"}}),
    "momentum": (
        (3,),
        {"grad_accum_steps": 2},
        points(50) | {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
    ),
    "compiled": ((2,), {"compile": "step"}, points(49)),
}
LOOSE = {"bf16": 2e-3, "fp16": 2e-3}


@pytest.mark.parametrize("case", sampled(2, CASES))
def test_losses_and_weights_do_not_depend_on_the_number_of_processes(runs, case):
    sizes, training, sections = CASES[case]
    config = runs.write("run", {"epochs": 2, "save_every_steps": 5, **training}, **sections)
    alone, ended = runs.train(1, config)
    ended.ok()
    tolerance = LOOSE.get(case, 1e-7 if sections.get("model", {}).get("double") else 2e-5)
    for size in sizes:
        folder, ended = runs.train(size, config)
        ended.ok()
        expected, found = records(alone), records(folder)
        assert len(expected) > 4
        assert [list(one) for one in found] == [list(one) for one in expected]
        for mine, theirs in zip(found, expected, strict=True):
            numbers = {key: value for key, value in theirs.items() if isinstance(value, int | float)}
            assert {key: mine[key] for key in numbers} == pytest.approx(numbers, rel=tolerance, abs=tolerance), size
            assert mine | numbers == theirs  # the rest is the same
        for name, weight in weights_of(alone).items():
            # The first updates of AdamW are ± lr: there a rounding error in a gradient near 0 shows in full.
            torch.testing.assert_close(weights_of(folder)[name], weight, rtol=tolerance, atol=10 * tolerance)


def weights_of(folder):
    return load((folder / "checkpoints" / "last" / "model.safetensors").read_bytes())


def test_what_is_evaluated_is_what_is_saved(runs):
    """Running statistics differ between processes; all evaluate with those of the one that saves."""
    config = runs.write("norm", {"epochs": 2, "drop_last": True}, model={"name": "toy_net", "batch_norm": True})
    folder, ended = runs.train(2, config)
    ended.ok()
    recorded = records(folder, "val")[-1]["val_loss"]
    for size in (1, 2):
        command = ["evaluate", folder, "--split", "validation", "--checkpoint", "last"]
        ended = runs.server.run(size, command, runs.root / f"evaluate-{size}").ok()
        name, value = ended.out[0].splitlines()[1].split()
        assert (name, float(value)) == ("loss", pytest.approx(recorded, rel=1e-5))
        assert not any(ended.out[1:])


def test_alone_a_step_does_nothing_for_others(monkeypatch):
    model = torch.nn.Linear(3, 2)
    task = SupervisedTask()
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1))
    step = Step(model, task, updater, MixedPrecision("fp32"), world=World())
    assert step.objective.task is task
    for name in ("check_gradients", "local_gradients", "_on_device"):
        monkeypatch.setattr(f"etude.engine.objective.{name}", None)
    for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
        monkeypatch.setattr(torch.distributed, name, None)
    step([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))])
