"""On a CUDA device: the step never waits, precisions train, resumption is exact, memory errors are explained."""

import pytest
import torch
from torch import nn

from etude import Callback, DataLoader, Trainer
from etude.core import TrainingError
from etude.engine.capture import WARM_UP_STEPS
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, LanguageModelingLoss, SupervisedTask
from etude.optim import SGD, Adam, AdamW, RMSprop

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam": lambda p: Adam(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3),
    "torch_default": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10)).cuda()


def data(samples=512, device="cuda"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)
    return x.to(device), y.to(device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_micro", [1, 4])
def test_step_never_waits(no_waiting, optimizer, precision, num_micro):
    model = net()
    chosen = MixedPrecision(precision, torch.device("cuda"), summands=64)
    updater = Updater(OPTIMIZERS[optimizer](model.parameters()), clip_norm=1.0, precision=chosen)
    step = Step(model, SupervisedTask(ClassificationLoss()), updater, chosen, metrics=True)
    x, y = data()
    batches = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 64 * num_micro, 64)]
    while float(step(batches).skipped):  # up to the first update that counts, the step may look
        pass
    no_waiting(True)
    for _ in range(3):
        step(batches)


def test_step_of_a_batch_norm_model_never_waits_and_keeps_its_statistics(no_waiting):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)).cuda()
    precision = MixedPrecision("fp32", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters()), clip_norm=1.0, precision=precision)
    step = Step(model, SupervisedTask(ClassificationLoss()), updater, precision)
    x, y = data(64)
    step([(x, y)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    no_waiting(True)
    step([(x * float("nan"), y)])
    no_waiting(False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class OddBuffers(nn.Module):
    """An expanded buffer that is only read, and one that is written in place, and one that nobody has made."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 10)
        self.register_buffer("wide", torch.ones(1, device="cuda").expand(10))  # moving it would make it dense
        self.register_buffer("seen", torch.zeros(10))
        self.register_buffer("absent", None)

    def forward(self, x):
        output = self.layer(x) * self.wide
        self.seen.add_(output.detach().mean(0))
        return output


def test_step_of_a_model_with_odd_buffers_never_waits_and_puts_them_back(no_waiting):
    torch.manual_seed(0)
    model = OddBuffers().cuda()
    assert model.wide.stride() == (0,)
    precision = MixedPrecision("fp32", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters()), clip_norm=1.0, precision=precision)
    step = Step(model, SupervisedTask(ClassificationLoss()), updater, precision)
    x, y = data(64)
    step([(x, y)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    no_waiting(True)
    step([(x * float("nan"), y)])
    no_waiting(False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("loss_scale", [1024.0, 65536.0])
def test_reported_gradient_norms_of_fp16_hold_no_loss_scale(loss_scale):
    model = net()
    reference = net().double()
    precision = MixedPrecision("fp16", torch.device("cuda"), loss_scale=loss_scale, summands=64)
    step = Step(model, SupervisedTask(ClassificationLoss()), Updater(SGD(model.parameters(), lr=1e-12)), precision)
    x, y = data(64)
    nn.functional.cross_entropy(reference(x.double()), y).backward()
    norm = nn.utils.get_total_norm([param.grad for param in reference.parameters()])
    while float((report := step([(x, y)])).skipped):
        precision.update(report.skipped)
    torch.testing.assert_close(report.grad_norm.double(), norm, rtol=1e-2, atol=0)


def test_language_modelling_step_with_masks_never_waits(no_waiting):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)).cuda()
    precision = MixedPrecision("bf16", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters()), clip_norm=1.0, precision=precision)
    step = Step(model, SupervisedTask(LanguageModelingLoss()), updater, precision, metrics=True)
    ids = torch.randint(50, (8, 16), device="cuda")
    mask = (torch.arange(16, device="cuda") < torch.randint(2, 17, (8, 1), device="cuda")).long()
    batches = [{"input_ids": ids, "attention_mask": mask}] * 2
    step(batches)
    no_waiting(True)
    step(batches)


class Silence(Callback):
    """Forbids waiting after the given step, except around log points and the end."""

    def __init__(self, switch, step):
        super().__init__()
        self.switch, self.after, self.steps = switch, step, 0

    def on_step_end(self, report):
        self.steps += 1
        self.switch(self.steps % 20 not in (19, 0) and self.after <= self.steps < 37)


@pytest.mark.parametrize(
    ("capture", "step"),
    [("off", 3), ("auto", WARM_UP_STEPS + 2)],  # a captured step is compared with the usual one, once: this waits
)
def test_loop_and_loader_never_wait_between_log_points(no_waiting, capture, step):
    x, y = data(64 * 40, device="cpu")
    loader = DataLoader(x, y, 64, device=torch.device("cuda"))
    config = {"epochs": 1, "log_interval": 20, "device": "cuda", "precision": "bf16", "max_steps": 38}
    silence = Silence(no_waiting, step)
    trainer = Trainer(net(), loader, config={**config, "capture": capture}, callbacks=[silence], progress=False)
    trainer.train()
    assert silence.steps == 38
    assert (trainer.step.capture is None) == (capture == "off")
    assert capture == "off" or trainer.step.capture._graphs


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad_step", [0, 3])
def test_non_finite_update_is_skipped_on_the_device(name, bad_step):
    clean, dirty = net(), net()
    steps = []
    for model in (clean, dirty):
        precision = MixedPrecision("fp32", torch.device("cuda"))
        updater = Updater(OPTIMIZERS[name](model.parameters()), clip_norm=1.0, precision=precision)
        steps.append(Step(model, SupervisedTask(ClassificationLoss()), updater, precision))
    x, y = data()
    for place in range(6):
        batch = (x[place * 64 : place * 64 + 64], y[place * 64 : place * 64 + 64])
        if place == bad_step:
            poisoned = batch[0].clone()
            poisoned[0, 0] = float("nan")
            assert float(steps[1]([(poisoned, batch[1])]).skipped) == 1.0
        steps[0]([batch])
        steps[1]([batch])
    for mine, theirs in zip(dirty.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_byte_identical_with_deterministic_kernels(tmp_path, precision):
    class StopAt(Callback):
        seen = 0

        def on_step_end(self, report):
            self.seen += 1
            if self.seen == 11:
                self.control.request_stop("test")

    def trainer(folder, callbacks=()):
        x, y = data(device="cpu")
        config = {
            "epochs": 3,
            "batch_size": 64,
            "device": "cuda",
            "deterministic": True,
            "precision": precision,
            "log_interval": 3,
        }
        return Trainer(
            net(dropout=0.3), (x, y), (x, y), config=config, callbacks=callbacks, output_dir=folder, progress=False
        )

    trainer(tmp_path / "a").train()
    trainer(tmp_path / "b", [StopAt()]).train()
    torch.rand(3, device="cuda")
    second = trainer(tmp_path / "b")
    second.load_checkpoint(tmp_path / "b")
    second.train()
    files = [tmp_path / one / "checkpoints" / "last" / "model.safetensors" for one in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    torch.use_deterministic_algorithms(False)


def test_out_of_memory_is_explained():
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(32, 10))

        def forward(self, x):
            torch.empty(2**50, device="cuda")
            return x @ self.weight

    trainer = Trainer(Hungry(), data(), config={"device": "cuda", "precision": "fp32"}, progress=False)
    with pytest.raises(TrainingError, match=r"out of memory on cuda:0.*precision=bf16"):
        trainer.train()


def test_auto_is_bf16_on_cuda():
    trainer = Trainer(net(), data(), config={"epochs": 1}, progress=False)
    assert (trainer.machine.device.type, trainer.machine.precision.name) == ("cuda", "bf16")
    assert trainer.train()["loss"] < 2.4


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_loaded_before_the_model_is_moved_goes_along(kind):
    """As after `torch.load` of both on the CPU."""
    options = {"lr": 0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    weights = []
    for moved_first in (True, False):
        model = net().cpu()
        optimizer = kind(model.parameters(), **options)
        model(torch.randn(8, 32, generator=torch.Generator().manual_seed(0))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        if moved_first:
            model.cuda()
        optimizer = kind(model.parameters(), **options)
        optimizer.load_state_dict(saved)
        config = {"epochs": 1, "device": "cuda", "precision": "fp32", "deterministic": True}
        Trainer(model, data(128, "cpu"), config=config, optimizer=optimizer, progress=False).train()
        weights.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(*weights)


def test_a_run_in_full_precision_does_not_use_the_fast_products_of_an_earlier_one():
    seen = []

    class Products(Callback):
        def on_train_begin(self, run):
            seen.append(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision("highest")
    configs = [{"epochs": 1, "precision": precision} for precision in ("bf16", "fp32")]
    for config in configs:
        Trainer(net(), data(), config=config, callbacks=[Products()], progress=False).train()
    assert seen == ["high", "highest"]
