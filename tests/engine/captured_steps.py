"""A step with a recorder that stands in for CUDA graphs: it runs the function and undoes it."""

import torch
from torch import nn

from etude.engine.capture import Capture
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import AdamW
from stub_recorder import RunAgain


def make(model=None, **options):
    torch.manual_seed(0)
    model = (
        model if model is not None else nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    updater = Updater(AdamW(trained, lr=1e-2), clip_norm=1.0)
    task = options.pop("task", None) or SupervisedTask(ClassificationLoss())
    step = Step(model, task, updater, MixedPrecision("fp32"), metrics=True)
    recorder = RunAgain(step, options.pop("share", 1.0), options.pop("room", True))
    step.capture = Capture(step, recorder, **options)
    notices = []
    step.notice = notices.append
    return step, step.capture, notices


def batches(count, rows=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


def weights(step):
    return {name: value.clone() for name, value in step.model.state_dict().items()}


def assert_same(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())
