"""On a CUDA device: the gradient monitor and recomputed activations make no step wait; memory and words are right."""

import gc
import logging

import pytest
import torch
from captured_runs import assert_same, captured, data as samples, net, trained
from torch import nn

from etude import Callback, DataLoader, GradientMonitor, Trainer
from etude.core import TrainingError
from etude.engine.precision import MixedPrecision
from etude.engine.recompute import recompute_activations
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


def layer(width=64):
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)


class Net(nn.Module):
    """A few blocks; a batch that begins with 99 has a gradient of NaN from the middle on."""

    def __init__(self, depth=4, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.inward = nn.Linear(32, width)
        self.blocks = nn.ModuleList(layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        marked = (x[:, 0, 0] == 99.0).any()
        x = self.inward(x)
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1 and x.requires_grad:
                x.register_hook(lambda grad: torch.where(marked, torch.nan, grad))
        return self.head(x.mean(1))


def data(samples=640, marked=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 16, 32, generator=generator)
    for batch in marked:
        x[(batch - 1) * 32, 0, 0] = 99.0
    return x, torch.randint(10, (samples,), generator=generator)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_that_is_looked_at_never_waits(no_waiting, precision, recompute):
    model = Net().cuda()
    if recompute:
        recompute_activations(model)
    chosen = MixedPrecision(precision, torch.device("cuda"), summands=32)
    updater = Updater(AdamW(model.parameters()), clip_norm=1.0, precision=chosen)
    step = Step(model, SupervisedTask(ClassificationLoss()), updater, chosen, metrics=True)
    monitor = GradientMonitor(every=1)
    step.watchers = [monitor]
    x, y = (one.cuda() for one in data(64))
    batches = [(x[:32], y[:32]), (x[32:], y[32:])]
    while float(step(batches).skipped):  # up to the first update that counts, the step may look
        pass
    no_waiting(True)
    for _ in range(3):
        monitor.on_step_end(step(batches))
    no_waiting(False)
    monitor.on_log({"skipped": 0})
    assert monitor.report is not None
    assert monitor.report.healthy


def test_only_the_steps_that_are_looked_at_are_eager(undo_determinism):
    config = {"epochs": 2, "log_interval": 10}
    monitors = [GradientMonitor(every=7, log_layers=True) for _ in range(2)]
    watched = trained(net(), samples(), capture="on", config=config, callbacks=monitors[:1])
    assert captured(watched)
    usual = trained(net(), samples(), capture="off", config=config, callbacks=monitors[1:])
    assert_same(watched, usual)
    assert monitors[0].report == monitors[1].report


def test_norms_are_those_of_the_plain_formula():
    model, reference = Net().cuda().eval(), Net().cuda().eval()
    x, y = (one.cuda() for one in data(32))
    nn.functional.cross_entropy(reference(x), y).backward()
    monitor = GradientMonitor()
    precision = MixedPrecision("fp32", torch.device("cuda"))
    step = Step(model, SupervisedTask(ClassificationLoss()), Updater(AdamW(model.parameters())), precision)
    step.watchers = [monitor]
    step([(x, y)])
    monitor.on_log({})
    for name, param in reference.named_parameters():
        assert monitor.report.parameters[name] == pytest.approx(float(param.grad.norm()), rel=1e-3, abs=1e-6)


class Silence(Callback):
    """Forbids waiting between log points."""

    def __init__(self, switch):
        super().__init__()
        self.switch, self.steps = switch, 0

    def on_step_end(self, report):
        self.steps += 1
        self.switch(self.steps % 5 not in (4, 0) and 2 < self.steps < 19)


def test_skipped_updates_are_explained_without_waiting_between_log_points(no_waiting, caplog):
    loader = DataLoader(*data(marked=(7, 12)), 32, shuffle=False, device=torch.device("cuda"))
    config = {
        "epochs": 1,
        "log_interval": 5,
        "device": "cuda",
        "precision": "bf16",
        "max_steps": 20,
        "capture": "off",
    }
    monitor = GradientMonitor()
    with caplog.at_level(logging.WARNING, "etude"):
        Trainer(Net(), loader, config=config, callbacks=[monitor, Silence(no_waiting)], progress=False).train()
    layer, epoch = (record.getMessage() for record in caplog.records)
    assert layer.startswith(
        "layer blocks.1."
    )  # step 7 made it watch the steps after the log point 10: 12 was the next
    assert epoch.startswith("2 of 20")


def test_error_names_the_layer():
    loader = DataLoader(*data(marked=range(5, 21)), 32, shuffle=False, device=torch.device("cuda"))
    config = {"epochs": 1, "log_interval": 20, "device": "cuda", "max_skipped_steps": 10, "capture": "off"}
    trainer = Trainer(Net(), loader, config=config, callbacks=[GradientMonitor()], progress=False)
    with pytest.raises(TrainingError) as raised:
        trainer.train()
    assert raised.value.__notes__[0].startswith("layer blocks.1.")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_weights_in_less_memory(precision):
    peaks, weights = [], []
    options = {"device": "cuda", "precision": precision, "deterministic": True, "capture": "off"}
    for setting in (False, False, True):  # in the first run cuBLAS allocates memory, which it keeps
        model = Net(depth=12)
        config = {"max_steps": 4, "batch_size": 32, **options}
        gc.collect()  # an earlier trainer, whose memory would be freed in the middle of this run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(model, data(), config={**config, "activation_checkpointing": setting}, progress=False)
        before = torch.cuda.memory_allocated()
        trainer.train()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weights.append({name: value.cpu() for name, value in trainer.model.state_dict().items()})
        del trainer, model
    torch.use_deterministic_algorithms(False)
    assert peaks[2] < 0.6 * peaks[1]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[2].items())
