"""On a CUDA device: Lookahead and SAM without waiting for the device, captured with the bytes of uncaptured steps."""

import pytest
import torch
from captured_runs import assert_same, captured, data, trained
from torch import nn

from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import SAM, SGD, AdamW, Lookahead, RMSprop

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("undo_determinism")]

OPTIMIZERS = {
    "lookahead": lambda p: Lookahead(AdamW(p, lr=1e-2), k=3),
    "lookahead of rmsprop": lambda p: Lookahead(RMSprop(p, lr=1e-3), k=3),
    "sam": lambda p: SAM(SGD(p, lr=0.05, momentum=0.9)),
    "asam": lambda p: SAM(AdamW(p, lr=1e-2), rho=1.0, adaptive=True),
    "both": lambda p: Lookahead(SAM(RMSprop(p, lr=1e-3)), k=3),
}


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), *more, nn.Linear(8 * 36, 10))


def train(model, capture, optimizer, *, tensors=None, folder=None, resume=False, **config):
    return trained(
        model,
        tensors or data(),
        capture=capture,
        config={"epochs": 2, "log_interval": 10, **config},
        optimizer=OPTIMIZERS[optimizer],
        output_dir=folder,
        resume=resume,
    )


@pytest.mark.parametrize("config", [{}, {"precision": "fp16", "grad_accum_steps": 2}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_run_has_the_bytes_of_an_uncaptured_one(optimizer, config):
    mine, theirs = (train(net(), capture, optimizer, **config) for capture in ("on", "off"))
    assert captured(mine)
    assert_same(mine, theirs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_finite_is_skipped_in_a_graph_too(optimizer):
    spoilt = data(bad=500)
    mine, theirs = (train(net(), capture, optimizer, tensors=spoilt) for capture in ("on", "off"))
    assert captured(mine)
    assert_same(mine, theirs)
    assert all(value.isfinite().all() for value in mine.model.state_dict().values())


@pytest.mark.parametrize("capture", ["on", "off"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(optimizer, capture, tmp_path):
    whole = train(net(), capture, optimizer)
    train(net(), capture, optimizer, folder=tmp_path, max_steps=37)
    assert_same(whole, train(net(), capture, optimizer, folder=tmp_path, resume=True))


@pytest.mark.parametrize("config", [{}, {"grad_accum_steps": 2}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_passes_of_a_graph_have_the_dropout_of_eager_steps(optimizer, config):
    mine, theirs = (train(net(nn.Dropout(0.3)), capture, optimizer, **config) for capture in ("on", "off"))
    assert captured(mine)
    assert_same(mine, theirs)


def test_a_resumed_run_with_dropout_in_both_passes_is_the_uninterrupted_one(tmp_path):
    whole = train(net(nn.Dropout(0.3)), "on", "sam")
    train(net(nn.Dropout(0.3)), "on", "sam", folder=tmp_path, max_steps=37)
    assert_same(whole, train(net(nn.Dropout(0.3)), "on", "sam", folder=tmp_path, resume=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_never_waits_for_the_device(optimizer, no_waiting):
    model = net(nn.Dropout(0.3)).cuda()
    step = Step(
        model,
        SupervisedTask(ClassificationLoss()),
        Updater(OPTIMIZERS[optimizer](model.parameters()), clip_norm=1.0),
        MixedPrecision("fp32", torch.device("cuda")),
    )
    x, y = (one[:16].cuda() for one in data())
    for _ in range(4):
        step([(x, y)])
    torch.cuda.synchronize()
    no_waiting(True)
    for _ in range(4):
        step([(x, y)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_are_those_of_the_cpu(optimizer):
    models = []
    for device in ("cpu", "cuda"):
        model = net().double().to(device)
        updater = Updater(OPTIMIZERS[optimizer](model.parameters()))
        step = Step(
            model, SupervisedTask(ClassificationLoss()), updater, MixedPrecision("fp32", torch.device(device))
        )
        x, y = data()
        for start in range(0, 160, 16):
            step([(x[start : start + 16].double().to(device), y[start : start + 16].to(device))])
        models.append(model.cpu().state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)
