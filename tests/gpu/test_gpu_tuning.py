"""On a CUDA device: averages, freezing, groups, several optimizers, turns and mixed batches in captured steps."""

import pytest
import torch
import torch.nn.functional as F
from captured_runs import assert_same, captured, data, net, trained
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from etude import AlternatingTask, Callback, LossTerm
from etude.callbacks import EMA
from etude.optim import SGD, AdamW, RMSprop

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("undo_determinism")]

DATA, BAD = data(640, classes=3), data(640, bad=333, classes=3)
GROUPS = [{"params": "0", "lr": 1e-4}]


class Turns(AlternatingTask):
    turns = {"early": ["0", "1"], "late": "5"}  # noqa: RUF012
    steps = {"early": 2}  # noqa: RUF012

    def __call__(self, model, batch, *, metrics):
        data, labels = batch
        data = data + 0.1 * torch.randn_like(data)
        loss = F.cross_entropy(model(data), labels, reduction="sum")
        return {self.turn or "loss": LossTerm(loss, len(labels))}


CASES = {
    "ema": {"config": {"ema": {"decay": 0.9, "start": 5, "every": 2}}},
    "ema fp16": {"config": {"ema": 0.9, "precision": "fp16", "loss_scale": 2.0**18}},
    "ema skipped": {"config": {"ema": 0.9}, "data": BAD},
    "freeze": {"config": {"freeze": ["0", "1"], "unfreeze": {1: "1", 2: "0"}}},
    "groups": {"optimizer": lambda m: AdamW(m, groups=GROUPS, decay_only_matrices=True), "warmup": 30},
    "fused": {"optimizer": lambda m: [SGD(m[:2].parameters(), momentum=0.9), AdamW(m[5].parameters())]},
    "mixed": {"optimizer": lambda m: [RMSprop(m[:2].parameters()), AdamW(m[5].parameters())], "warmup": 30},
    "turns": {"task": Turns},
    "mixup": {"config": {"batch_transform": {"name": "mixup_cutmix", "num_classes": 3}}},
}


def train(name, capture, folder=None, *, resume=False, callbacks=(), max_steps=None):
    case, model = CASES[name], net(3)
    config = {"epochs": 4, "precision": "fp32", "warmup_steps": case.get("warmup"), "max_steps": max_steps}
    return trained(
        model.cuda(),
        case.get("data", DATA),
        capture=capture,
        config={**config, **case.get("config", {})},
        optimizer=case["optimizer"](model) if "optimizer" in case else None,
        task=case["task"]() if "task" in case else None,
        callbacks=callbacks,
        output_dir=folder,
        resume=resume,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_captured_run_has_the_bytes_of_an_uncaptured_one(name):
    mine, theirs = train(name, "on"), train(name, "off")
    assert captured(mine)
    assert_same(mine, theirs)


@pytest.mark.parametrize("name", [name for name in CASES if "warmup" not in CASES[name]])
def test_a_resumed_run_has_the_bytes_of_one_never_stopped(name, tmp_path):
    whole = train(name, "on")
    train(name, "on", tmp_path, max_steps=70)  # inside the second epoch
    assert_same(whole, train(name, "on", tmp_path, resume=True))


class Follow(Callback):
    def on_train_begin(self, run):
        self.model, self.theirs = run.model, AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, report):
        if not float(report.skipped):
            self.theirs.update_parameters(self.model)


@pytest.mark.parametrize("name", ["ema fp16", "ema skipped"])
def test_averages_are_those_of_torch(name):
    follow = Follow()
    trainer = train(name, "on", callbacks=[follow])
    ours = next(one for one in trainer.callbacks if isinstance(one, EMA)).weights()
    for name, value in follow.theirs.module.named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
