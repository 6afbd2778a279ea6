"""Updates that the device decides to skip change nothing, and take little memory; here with tensors on the CPU."""

import math

import pytest
import torch
from torch import nn

from etude.engine.update import Updater, state_tensors
from etude.optim import SAM, SGD, Adafactor, AdamW, Lion, Lookahead, Muon, RMSprop, ScheduleFreeAdamW, device
from etude.optim.device import in_pieces
from etude.optim.several import Optimizers

OWN = {
    "lion": lambda m: Lion(m, lr=0.01, weight_decay=0.1),
    "adafactor": lambda m: Adafactor(m, weight_decay=0.1),
    "muon": lambda m: Muon(m, normuon=True, cautious=True),
    "schedule_free": lambda m: ScheduleFreeAdamW(m, weight_decay=0.1, warmup_steps=2),
    "schedule_free in foreach": lambda m: ScheduleFreeAdamW(m, weight_decay=0.1, kernel="foreach"),
    "maximize": lambda m: Lion(m, lr=0.01, maximize=True),
    "lookahead": lambda m: Lookahead(Lion(m, lr=0.01), k=2),
    "several": lambda m: Optimizers([Lion(m[0]), AdamW(m[1])]),
    "adamw": lambda m: AdamW(m),
    "sgd": lambda m: SGD(m, momentum=0.9),
}
OTHERS = {"rmsprop": lambda m: RMSprop(m), "loop": lambda m: AdamW(m, kernel="loop")}


class HostCounter(torch.optim.SGD):
    """Counts its steps in its group, as optimizers of some packages do."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)

    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        super().step()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Embedding(3, 5)).double()


def trained(make, marks, guarded):
    """Train with gradients of which some are bad; `guarded`: by the code for devices that must not wait."""
    model = network()
    updater = Updater(make(model))
    for step, is_bad in enumerate(marks):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        if is_bad:
            next(model.parameters()).grad[0, 0] = math.nan
        if guarded and step > 0:
            updater._guarded_step(updater._collected(), 2.0, torch.tensor(float(is_bad)))
        elif not is_bad:
            updater.apply(2.0)
    groups = [{key: value for key, value in one.items() if key != "params"} for one in updater.optimizer.param_groups]
    tensors = [*model.state_dict().values(), *state_tensors(updater.optimizer)]
    return updater, [tensor.tolist() for tensor in tensors], groups


MARKS = [False, True, False, False, True, True, False]


@pytest.mark.parametrize("name", [*OWN, *OTHERS, "counts on the host"])
def test_a_skipped_update_leaves_no_trace(name):
    make = {**OWN, **OTHERS, "counts on the host": lambda m: HostCounter(m.parameters())}[name]
    _, mine, groups = trained(make, MARKS, guarded=True)
    _, theirs, expected = trained(make, MARKS, guarded=False)
    assert mine == theirs
    assert groups == expected


@pytest.mark.parametrize("name", OWN)
def test_optimizers_that_skip_are_not_copied_as_a_whole(name, monkeypatch):
    copied = []
    whole = sum(param.nbytes for param in network().parameters())
    largest = max(param.nbytes for param in network().parameters())
    monkeypatch.setattr(device, "PIECE_BYTES", largest)
    original = device.undone_if

    def watched(skipped, values):
        values = [one for one in values if isinstance(one, torch.Tensor)]
        copied.append(sum(one.nbytes for one in values) if skipped is not None else 0)
        return original(skipped, values)

    monkeypatch.setattr(device, "undone_if", watched)
    monkeypatch.setattr("etude.engine.update.undone_if", watched)
    _, mine, _ = trained(OWN[name], MARKS, guarded=True)
    if name not in ("adamw", "sgd"):  # torch's kernels need no copies
        assert max(copied) <= 4 * largest < whole * 2
        assert sum(copied) > whole
    monkeypatch.undo()
    assert mine == trained(OWN[name], MARKS, guarded=True)[1]


def test_pieces_hold_every_parameter_once_and_are_bounded(monkeypatch):
    monkeypatch.setattr(device, "PIECE_BYTES", 40)
    params = [torch.zeros(count) for count in (3, 7, 1, 20, 2, 8)]
    pieces = list(in_pieces(params))
    assert [[one.numel() for one in piece] for piece in pieces] == [[3, 7], [1], [20], [2, 8]]
    found = [id(one) for piece in pieces for one in piece]
    assert found == [id(param) for param in params]


def test_both_gradients_of_sam_decide_about_a_skipped_update():
    def run(guarded):
        model = network()
        updater = Updater(SAM(Lion(model, lr=0.01)))
        for step in range(4):
            for is_second in (False, True):
                generator = torch.Generator().manual_seed(10 * step + is_second)
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
                if step == 2 and not is_second:
                    model[0].weight.grad[0, 0] = math.nan
                if not is_second:
                    updater.perturb()
            updater.restore()
            if guarded and step > 0:
                grads = updater._collected()
                updater._guarded_step(grads, 2.0, updater._is_skipped(updater._norm(grads)))
            else:
                updater.apply(2.0)
        return [tensor.tolist() for tensor in (*model.state_dict().values(), *state_tensors(updater.optimizer))]

    assert run(guarded=True) == run(guarded=False)
