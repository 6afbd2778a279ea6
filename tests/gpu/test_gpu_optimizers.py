"""On a CUDA device: every named optimizer is captured, with the bytes of uncaptured steps, and never waits."""

import pytest
import torch
from captured_runs import assert_same, captured, data, net, trained
from torch import nn

from etude import optim
from etude.config.registry import names
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import Muon
from etude.optim.muon import MatrixMuon
from etude.optim.optimizers import FUSED_ADAGRAD_ON_CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("undo_determinism")]

LEFT_OUT = {"lookahead", "sam", "several"} | (set() if FUSED_ADAGRAD_ON_CUDA else {"adagrad"})
NAMES = [name for name in names("optimizer") if name not in LEFT_OUT]
VARIANTS = [
    *NAMES,
    {"name": "muon", "normuon": True, "cautious": True},
    {"name": "schedule_free_adamw", "warmup_steps": 20},
]


def deep():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def train(capture, optimizer, make=deep, tensors=None, **config):
    settings = {"epochs": 1, "log_interval": 10, **config}
    return trained(make(), tensors or data(), capture=capture, config=settings, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", VARIANTS, ids=str)
def test_a_captured_run_has_the_bytes_of_an_uncaptured_one(optimizer):
    mine, theirs = train("on", optimizer), train("off", optimizer)
    assert captured(mine)
    assert_same(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_and_skipped_updates_are_part_of_the_graph(name):
    settings = {"warmup_steps": 20, "precision": "fp16", "loss_scale": 2.0**10}
    mine, theirs = (train(mode, name, tensors=data(bad=333), **settings) for mode in ("on", "off"))
    assert captured(mine)
    assert_same(mine, theirs)
    assert all(value.isfinite().all() for value in mine.model.state_dict().values())


def test_adagrad_trains_in_any_version_of_torch():
    assert_same(train("auto", "adagrad"), train("off", "adagrad"))


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_are_trained_in_captured_steps(name):
    mine, theirs = train("on", name, net), train("off", name, net)
    assert_same(mine, theirs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name, no_waiting):
    from etude.config import build_component
    from etude.optim.groups import named_params

    model = deep().cuda()
    optimizer = build_component("optimizer", name, provided={"params": named_params(model)})
    precision = MixedPrecision("fp32")
    step = Step(model, SupervisedTask(ClassificationLoss()), Updater(optimizer, precision=precision), precision)
    batch = torch.randn(16, 1, 8, 8, device="cuda"), torch.randint(10, (16,), device="cuda")
    for _ in range(3):
        step([batch])
    no_waiting(True)
    for _ in range(3):
        step([batch])
    no_waiting(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_on_the_device_is_torchs(dtype):
    shapes = [(256, 128), (128, 256), (256, 128), (128, 128)]
    generator = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(shape, device="cuda", generator=generator, dtype=dtype) for shape in shapes]
    ours, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    mine = MatrixMuon(ours, 0.02, 0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for params in (ours, theirs):
            generator = torch.Generator("cuda").manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, device="cuda", generator=generator).to(dtype)
        mine.step(), other.step()
    for one, reference, old in zip(ours, theirs, start, strict=True):
        assert (one - reference).norm() < 0.05 * (reference - old).norm()


def test_muon_keeps_its_state_on_the_device():
    model = deep().cuda()
    optimizer = Muon(model)
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    states = optimizer.state.values()
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    assert all(tensor.is_cuda for tensor in tensors)


MIB = 2**20


@pytest.mark.parametrize("clip_value", [None, 0.1])
@pytest.mark.parametrize("name", ["lion", "adafactor", "schedule_free_adamw", "muon", "adamw"])
def test_a_step_that_may_be_skipped_copies_one_piece_at_a_time(name, clip_value, monkeypatch):
    """An update of 512 MiB of weights in pieces of 16 MiB; the copies of all weights and states took 1 GiB and more."""
    from etude.config import build_component
    from etude.optim import device, muon
    from etude.optim.groups import named_params

    monkeypatch.setattr(device, "PIECE_BYTES", 16 * MIB)
    monkeypatch.setattr(muon, "LARGEST_STACK", 4 * MIB)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(128)]).cuda()
    optimizer = build_component("optimizer", name, provided={"params": named_params(model)})
    updater = Updater(optimizer, clip_value=clip_value)
    updater.send_rates()
    for step, is_bad in enumerate([False, False, True, False]):
        for param in model.parameters():
            param.grad = torch.full_like(param, float("nan") if is_bad else 1e-3)
        before = [param.detach().sum() for param in model.parameters()] if is_bad else []
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, skipped = updater.apply(1.0)
        extra = torch.cuda.max_memory_allocated() - start
        assert bool(skipped) == is_bad
        if step > 0:
            assert extra < 256 * MIB
        if is_bad:
            assert torch.stack(before).equal(torch.stack([param.detach().sum() for param in model.parameters()]))


@pytest.mark.parametrize("name", ["lion", "adafactor", "schedule_free_adamw", "muon"])
def test_captured_steps_in_pieces_have_the_bytes_of_whole_ones(name, monkeypatch):
    from etude.optim import device

    whole = train("on", name, tensors=data(bad=333))
    monkeypatch.setattr(device, "PIECE_BYTES", 64 * 64 * 4)
    mine = train("on", name, tensors=data(bad=333))
    assert captured(mine)
    assert_same(mine, whole)


DIRECT = [("SGD", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {}), ("AdamW", {"maximize": True})]


@pytest.mark.parametrize(("name", "arguments"), DIRECT)
def test_fused_kernels_are_called_directly_with_the_bits_of_torchs_step(name, arguments, monkeypatch):
    torch.manual_seed(0)
    values, grads = ([torch.randn(9, 5, device="cuda") for _ in range(count)] for count in (4, 32))
    results = []
    for module in (torch.optim, optim):
        params = [nn.Parameter(value.clone()) for value in values]
        extra = {"fused": True} if module is torch.optim else {"kernel": "fused"}
        optimizer = getattr(module, name)(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], lr=0.01, **arguments, **extra
        )
        for step in range(8):
            if step == 2:  # later than the states are made
                optimizer.grad_scale = torch.tensor(4.0)  # on the host: brought to the device
            if step == 2 and module is optim:
                monkeypatch.setattr(getattr(torch.optim, name), "_init_group", None)
            optimizer.found_inf = torch.tensor(float(step == 5), device="cuda")
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (step + 1), device="cuda")
            for place, param in enumerate(params):
                param.grad = None if place == 3 else grads[4 * step + place].clone()
            optimizer.step()
        results.append(
            [*params, *(optimizer.state[param][key] for param in params[:3] for key in optimizer.state[param])]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert len(results[0]) == len(results[1]) >= 4
