"""Sparse gradients, as of nn.Embedding(sparse=True): the update of a loop by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import DataLoader, EtudeError, GradientMonitor, Trainer

ids = torch.randint(0, 20, (30, 5), generator=torch.Generator().manual_seed(0))
labels = ids.sum(1) % 2


class Bag(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6, sparse=sparse)
        self.out = nn.Linear(6, 2)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))


def by_hand(model, optimizer, accumulate, clip):
    batches = list(zip(ids.split(7), labels.split(7), strict=True))
    for start in range(0, len(batches), accumulate):
        group = batches[start : start + accumulate]
        optimizer.zero_grad()
        for data, target in group:
            loss = F.cross_entropy(model(data), target, reduction="sum") / sum(len(one) for _, one in group)
            loss.backward()
        if clip:
            for param in model.parameters():
                param.grad = param.grad.to_dense()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # torch's own, of its Adagrad
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_train_as_by_hand(kind, clip, accumulate):
    model, plain = Bag(), Bag()
    by_hand(plain, kind(plain.parameters(), lr=0.5), accumulate, clip)
    config = {"epochs": 1, "device": "cpu", "grad_accum_steps": accumulate, "gradient_clip_norm": clip}
    loader = DataLoader(ids, labels, 7, shuffle=False)
    optimizer = kind(model.parameters(), lr=0.5)
    result = Trainer(
        model, loader, config=config, optimizer=optimizer, callbacks=GradientMonitor(), progress=False
    ).train()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert result["grad_norm"] > 0


SPARSE = {
    "sgd": {"name": "sgd", "lr": 0.1, "kernel": "loop"},
    "momentum": {"name": "sgd", "lr": 0.1, "kernel": "loop", "momentum": 0.9},
    "adagrad": {"name": "adagrad", "lr": 0.1, "kernel": "loop"},
    "sparse adam": {"name": "torch.optim.SparseAdam", "lr": 0.05},
}


def trained(optimizer, folder=None, *, sparse=True, resume=False, **config):
    """Train with clipping and accumulation; the third step of the run has a bad micro-batch."""
    model = Bag(sparse)
    model.out.requires_grad_("SparseAdam" not in optimizer["name"])  # it takes sparse gradients only
    calls = iter(range(10 if resume else 0, 1000))

    def loss(output, labels):
        return F.cross_entropy(output, labels) * (float("nan") if next(calls) == 5 else 1.0)

    settings = {"epochs": 3, "batch_size": 5, "device": "cpu", "grad_accum_steps": 2, "gradient_clip_norm": 0.05}
    made = Trainer(
        model,
        (ids, labels),
        config={**settings, **config},
        optimizer=optimizer,
        loss=loss,
        output_dir=folder,
        progress=False,
    )
    if resume:
        made.load_checkpoint(folder)
    made.train()
    return model


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("optimizer", SPARSE.values(), ids=SPARSE)
def test_a_resumed_run_with_sparse_gradients_is_the_uninterrupted_one(optimizer, tmp_path):
    whole = trained(optimizer)
    trained(optimizer, tmp_path, max_steps=5)
    again = trained(optimizer, tmp_path, resume=True)
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)
    if "SparseAdam" not in optimizer["name"]:  # whose moments of rows without a gradient stay
        for one, other in zip(whole.parameters(), trained(optimizer, sparse=False).parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nesterov_momentum_of_sparse_gradients_trains():
    section = {"name": "sgd", "lr": 0.1, "kernel": "loop", "momentum": 0.9, "nesterov": True}
    for one, other in zip(trained(section).parameters(), trained(section, sparse=False).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_sparse_gradient_that_is_not_finite_is_skipped():
    model = Bag()
    before = model.embed.weight.detach().clone()
    bad = [(ids[:7], labels[:7]), (ids[7:14], labels[7:14])]
    calls = iter([1.0, float("nan")])

    def loss(output, labels):
        return F.cross_entropy(output, labels) * next(calls)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"epochs": 1, "device": "cpu"}
    result = Trainer(model, bad, config=config, optimizer=optimizer, loss=loss, progress=False).train()
    assert result["skipped"] == 1
    assert model.embed.weight.isfinite().all()
    assert not torch.equal(model.embed.weight, before)


def test_an_optimizer_that_takes_none_is_named_with_the_remedy():
    with pytest.raises(EtudeError, match=r"AdamW .*sparse gradients.*sparse=False"):
        Trainer(Bag(), (ids, labels), config={"epochs": 1}, progress=False).train()


def test_an_optimizer_that_takes_no_others_says_so():
    with pytest.raises(EtudeError, match=r"^SparseAdam does not support dense gradients"):
        Trainer(
            Bag(sparse=False),
            (ids, labels),
            config={"epochs": 1},
            optimizer={"name": "torch.optim.SparseAdam"},
            progress=False,
        ).train()
